// Decode attention on the paged 2-bit cache against device copy, on this machine's GPU.
// usage: decode_bench [--json FILE] [--only TEXT] [--sustained SECONDS] [--overlap on|off] [--anchors FILE]
//
// A time is that of one whole decode (queries into the basis, attention on both tiers, merge): a CUDA graph of launches, each
// on another cache, so that more than 600 MB are touched before a cache comes again (L2 is cold); time of a replay / launches,
// median of 15 replays. Bytes are those a decode has to read: coded pages and exact blocks. `copy` counts bytes read and
// written. bench/gpu/anchors.py measures BF16 and INT2 attention of others in the same way; --anchors prints how many times
// longer they take, from its report, and takes it into the JSON.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "caches.h"
#include "fill.h"
#include "oscar/cuda/decode.h"
#include "random_layer.h"

namespace {

using namespace oscar;
using cuda::check;
using cuda::DeviceArray;

using bench::Cache;
using bench::kTouched;
using bench::time_graph;
using bench::Times;

struct Size {
  std::string name;
  int batch, length;
  int dim = 128, kv_heads = 8, group = 4;
  bool uneven = false;  // heads of different slot counts
  bool mean = true;
  int queries = 1;
  float soft_cap = 0;
  bool int2 = false;
};

// What anchors.py measured of the same batch and context, 8 KV heads and 32 query heads of 128.
void print_anchors(const Size& size, double us, const nlohmann::json& anchors) {
  if (size.dim != 128 || size.kv_heads != 8 || size.group != 4 || size.queries != 1) return;
  const auto least = [&](const nlohmann::json& rows) {
    double found = 0;
    for (const nlohmann::json& row : rows) {
      if (row.at("batch") != size.batch || row.at("context") != size.length) continue;
      const double other = row.at("us");
      found = found == 0 ? other : std::min(found, other);
    }
    return found;
  };
  const double bf16 = anchors.contains("sdpa") ? least(anchors["sdpa"]) : 0;
  const double int2 = anchors.contains("int2_triton") ? least(anchors["int2_triton"].at("rows")) : 0;
  if (bf16 > 0) std::printf("%34s best BF16 %8.1f us: %.2fx\n", "", bf16, bf16 / us);
  if (int2 > 0) std::printf("%34s INT2 Triton %6.1f us: %.2fx\n", "", int2, int2 / us);
}

nlohmann::json measure(const Size& size, double copy, double sustained, bool overlap, const nlohmann::json& anchors) {
  const std::vector<int> slots = bench::slots_of_heads(size.kv_heads, size.dim, size.uneven);
  const test::RandomLayer made_up(size.int2, size.dim, slots, size.mean ? 1.0 : 0.0, false, 3);
  const std::unique_ptr<cuda::LayerTables> owned = made_up.on_device();
  const cuda::LayerTables& layer = *owned;
  const int sink = 64;
  const int recent = 256;
  const int ring = paged::ring_blocks(recent + size.queries - 1);
  const auto batch = static_cast<std::size_t>(size.batch);
  const auto kv_heads = static_cast<std::size_t>(size.kv_heads);
  const auto dim = static_cast<std::size_t>(size.dim);
  const std::size_t page_columns = (static_cast<std::size_t>(size.length) + 63) / 64;
  const std::size_t block_columns = static_cast<std::size_t>(sink / paged::kBlockTokens + ring);
  const std::size_t n_pages = batch * page_columns;
  const paged::Tiers tiers = paged::tiers_of(size.length, sink, recent, size.queries);
  const std::size_t bytes =
      batch * (static_cast<std::size_t>(tiers.pages()) * made_up.layout().page_bytes +
               static_cast<std::size_t>(tiers.exact_blocks()) * kv_heads * paged::exact_head_values(size.dim) * 2);
  const std::size_t n_caches = std::clamp<std::size_t>((kTouched + bytes - 1) / bytes, 2, 64);

  const std::vector<Cache> caches =
      bench::random_caches(n_caches, batch, page_columns, block_columns, made_up.layout(), layer.view());
  const std::size_t n_query = batch * static_cast<std::size_t>(size.queries * size.group) * kv_heads * dim;
  const DeviceArray<std::uint16_t> q(n_query);
  const DeviceArray<std::uint16_t> out(n_query);
  bench::fill_halves(q.data(), n_query, 77);
  check(cudaDeviceSynchronize(), "filling the caches");
  const DeviceArray<std::int32_t> lengths(std::vector<std::int32_t>(batch, size.length));
  const DeviceArray<std::uint8_t> workspace(cuda::decode_workspace_bytes(layer.view(), size.batch, size.group, size.queries));
  check(cudaMemset(workspace.data(), 0, workspace.size()), "cudaMemset");

  cuda::DecodeArgs args;
  args.layer = &layer.view();
  args.batch = size.batch;
  args.group = size.group;
  args.queries = size.queries;
  args.soft_cap = size.soft_cap;
  args.sink = sink;
  args.recent = recent;
  args.scale = 1.0F / std::sqrt(static_cast<float>(size.dim));
  args.q = q.data();
  args.lengths = lengths.data();
  args.page_columns = static_cast<int>(page_columns);
  args.ring = ring;
  args.out = out.data();
  args.workspace = workspace.data();
  args.workspace_bytes = workspace.size();
  args.overlaps_predecessor = overlap;
  const auto launch = [&](int i, cudaStream_t stream) {
    const Cache& c = caches[static_cast<std::size_t>(i) % n_caches];
    args.pages = c.pages.data();
    args.page_table = c.page_table.data();
    args.blocks = c.blocks.data();
    args.block_table = c.block_table.data();
    cuda::decode(args, stream);
  };
  const int launches = static_cast<int>(std::max<std::size_t>(n_caches, bytes > 200'000'000 ? 8 : 64));
  const Times t = time_graph(launches, launch, sustained);
  const double rate = static_cast<double>(bytes) / t.median;
  std::printf("%-34s %8.1f us  (%.1f .. %.1f)  %7.1f MB  %5.2f TB/s  %5.3f of copy\n", size.name.c_str(), t.median, t.low,
              t.high, static_cast<double>(bytes) * 1e-6, rate * 1e-6, rate / copy);
  if (sustained > 0) std::printf("%34s SM clock %.0f MHz, %.0f W\n", "", t.state.sm_clock_mhz, t.state.power_w);
  print_anchors(size, t.median, anchors);
  std::fflush(stdout);
  return {{"name", size.name},
          {"batch", size.batch},
          {"context", size.length},
          {"head_dim", size.dim},
          {"n_head_kv", size.kv_heads},
          {"group", size.group},
          {"uneven_slots", size.uneven},
          {"rope_mean", size.mean},
          {"queries", size.queries},
          {"soft_cap", size.soft_cap},
          {"codec", size.int2 ? "int2" : "spectral"},
          {"us", t.median},
          {"us_low", t.low},
          {"us_high", t.high},
          {"bytes", bytes},
          {"share_of_copy", rate / copy},
          {"sustained_s", sustained},
          {"sm_clock_mhz", t.state.sm_clock_mhz},
          {"power_w", t.state.power_w}};
}

std::vector<Size> sizes() {
  std::vector<Size> list;
  const auto add = [&](int batch, int length, int dim = 128, int group = 4) {
    const std::string at =
        std::to_string(batch) + " x " + (length % 1024 == 0 ? std::to_string(length / 1024) + "K" : std::to_string(length));
    const std::string shape =
        (dim != 128 ? ", D " + std::to_string(dim) : "") + (group != 4 ? ", group " + std::to_string(group) : "");
    list.push_back({at + shape, batch, length, dim, 8, group});
    list.push_back({at + shape + ", no mean", batch, length, dim, 8, group, false, false});
  };
  for (const auto& [batch, length] : {std::pair{1, 32768}, {1, 131072}, {8, 32768}, {8, 131072}, {32, 32768}, {256, 1024}})
    add(batch, length);
  list.push_back({"8 x 32K, uneven slots, no mean", 8, 32768, 128, 8, 4, true, false});
  list.push_back({"32 x 32K, uneven slots, no mean", 32, 32768, 128, 8, 4, true, false});
  list.push_back({"32 x 32K, uneven slots", 32, 32768, 128, 8, 4, true, true});
  add(32, 32768, 128, 8);
  add(32, 32768, 64);
  add(32, 32768, 256, 2);
  list.push_back({"8 x 32K, 2 queries", 8, 32768, 128, 8, 4, false, true, 2});
  list.push_back({"8 x 32K, 4 queries", 8, 32768, 128, 8, 4, false, true, 4});
  list.push_back({"8 x 32K, 8 queries", 8, 32768, 128, 8, 4, false, true, 8});
  list.push_back({"32 x 32K, 4 queries", 32, 32768, 128, 8, 4, false, true, 4});
  list.push_back({"32 x 32K, soft cap", 32, 32768, 128, 8, 4, false, true, 1, 50.0F});
  for (const auto& [batch, length] : {std::pair{1, 32768}, {8, 32768}, {32, 32768}, {8, 131072}, {256, 1024}}) {
    list.push_back({"int2, " + std::to_string(batch) + " x " + std::to_string(length / 1024) + "K, no mean", batch, length, 128,
                    8, 4, false, false});
    list.back().int2 = true;
  }
  return list;
}

}  // namespace

int main(int argc, char** argv) {
  std::string json_path, only, anchors_path;
  nlohmann::json anchors;
  double sustained = 0;
  bool overlap = true;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--json")
      json_path = argv[i + 1];
    else if (flag == "--only")
      only = argv[i + 1];
    else if (flag == "--sustained")
      sustained = std::atof(argv[i + 1]);
    else if (flag == "--overlap")
      overlap = std::string(argv[i + 1]) != "off";
    else if (flag == "--anchors")
      anchors_path = argv[i + 1];
  }
  try {
    if (!anchors_path.empty()) {
      std::ifstream file(anchors_path);
      if (!file) fail("cannot read {}; bench/gpu/anchors.py writes it", anchors_path);
      anchors = nlohmann::json::parse(file);
    }
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
    nlohmann::json report;
    report["device"] = properties.name;
    const double copy = bench::copy_rate();
    report["copy_TBps"] = copy * 1e-6;
    std::printf("%s, device copy %.3f TB/s (read + written)\n", properties.name, copy * 1e-6);
    for (const Size& size : sizes()) {
      if (size.name.find(only) == std::string::npos) continue;
      report["decode"].push_back(measure(size, copy, sustained, overlap, anchors));
    }
    const bench::GpuState state = bench::gpu_state();
    report["after"] = {{"sm_clock_mhz", state.sm_clock_mhz}, {"power_w", state.power_w}};
    report["copy_TBps_after"] = bench::copy_rate() * 1e-6;
    if (!anchors.is_null()) report["anchors"] = anchors;
    if (!json_path.empty()) std::ofstream(json_path) << report.dump(1) << '\n';
  } catch (const std::exception& e) {
    std::fprintf(stderr, "decode_bench: error: %s\n", e.what());
    return 1;
  }
  return 0;
}
