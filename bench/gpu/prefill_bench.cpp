// Prefill attention on the paged 2-bit cache on this machine's GPU. usage: prefill_bench [--json FILE] [--only TEXT]
//
// A time is that of one whole prefill of a layer: a CUDA graph of launches that take turns with a few caches, time of a replay
// / launches, median of 15 replays. Operations counted: 4 D per query row and position that it sees. bench/gpu/anchors.py
// --prefill measures PyTorch's BF16 attention in the same way.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "caches.h"
#include "cuda/prefill_params.h"
#include "fill.h"
#include "oscar/cuda/prefill.h"
#include "random_layer.h"

namespace {

using namespace oscar;
using bench::Cache;
using bench::time_graph;
using bench::Times;
using cuda::check;
using cuda::DeviceArray;

struct Size {
  std::string name;
  int batch, prefix, chunk;
  int dim = 128, kv_heads = 8, group = 4;
  bool uneven = false;  // heads of different slot counts
  bool mean = true;
  float soft_cap = 0;
  bool int2 = false;
  bool portable = false;  // the portable kernel in place of that of compute capability 9.0
};

constexpr int kCaches = 3;

nlohmann::json measure(const Size& size) {
  const std::vector<int> slots = bench::slots_of_heads(size.kv_heads, size.dim, size.uneven);
  const test::RandomLayer made_up(size.int2, size.dim, slots, size.mean ? 1.0 : 0.0, false, 3);
  const std::unique_ptr<cuda::LayerTables> owned = made_up.on_device();
  const cuda::LayerTables& layer = *owned;
  const int sink = 64;
  const int recent = 256;
  const int ring = paged::ring_blocks(recent);
  const int length = size.prefix + size.chunk;
  const auto batch = test::size_of(size.batch);
  const auto kv_heads = test::size_of(size.kv_heads);
  const auto dim = test::size_of(size.dim);
  const std::size_t page_columns = (test::size_of(length) + 63) / 64;
  const std::size_t block_columns = test::size_of(sink / paged::kBlockTokens + ring);
  const std::size_t n_pages = batch * page_columns;

  const std::vector<Cache> caches =
      bench::random_caches(kCaches, batch, page_columns, block_columns, made_up.layout(), layer.view());
  const std::size_t tokens = batch * test::size_of(size.chunk);
  const DeviceArray<std::uint16_t> q(tokens * test::size_of(size.group) * kv_heads * dim);
  const DeviceArray<std::uint16_t> k(tokens * kv_heads * dim);
  const DeviceArray<std::uint16_t> v(tokens * kv_heads * dim);
  const DeviceArray<std::uint16_t> out(q.size());
  bench::fill_halves(q.data(), q.size(), 77);
  bench::fill_halves(k.data(), k.size(), 78);
  bench::fill_halves(v.data(), v.size(), 79);
  check(cudaDeviceSynchronize(), "filling the caches");
  const DeviceArray<std::int32_t> lengths(std::vector<std::int32_t>(batch, length));
  std::vector<std::int32_t> starts;
  for (int b = 0; b <= size.batch; ++b) starts.push_back(b * size.chunk);
  const DeviceArray<std::int32_t> query_start(starts);

  cuda::PrefillArgs args;
  args.layer = &layer.view();
  args.batch = size.batch;
  args.n_tokens = size.batch * size.chunk;
  args.group = size.group;
  args.sink = sink;
  args.recent = recent;
  args.scale = 1.0F / std::sqrt(static_cast<float>(size.dim));
  args.soft_cap = size.soft_cap;
  args.q = q.data();
  args.k = k.data();
  args.v = v.data();
  args.query_start = query_start.data();
  args.lengths = lengths.data();
  args.page_columns = static_cast<int>(page_columns);
  args.ring = ring;
  args.out = out.data();
  const auto launch = [&](int i, cudaStream_t stream) {
    const Cache& c = caches[test::size_of(i) % kCaches];
    args.pages = c.pages.data();
    args.page_table = c.page_table.data();
    args.blocks = c.blocks.data();
    args.block_table = c.block_table.data();
    cuda::prefill_with(size.portable ? std::optional(cuda::PrefillKernel::portable) : std::nullopt, args, stream);
  };
  const double seen = static_cast<double>(size.chunk) * (size.prefix + (size.chunk + 1) / 2.0);
  const double operations = 4.0 * size.dim * size.kv_heads * size.group * size.batch * seen;
  const Times t = time_graph(kCaches, launch);
  const double rate = operations / t.median * 1e-6;
  std::printf("%-36s %9.1f us  (%.1f .. %.1f)  %6.1f TFLOP/s\n", size.name.c_str(), t.median, t.low, t.high, rate);
  std::fflush(stdout);
  return {{"name", size.name},
          {"batch", size.batch},
          {"prefix", size.prefix},
          {"chunk", size.chunk},
          {"head_dim", size.dim},
          {"n_head_kv", size.kv_heads},
          {"group", size.group},
          {"uneven_slots", size.uneven},
          {"rope_mean", size.mean},
          {"soft_cap", size.soft_cap},
          {"codec", size.int2 ? "int2" : "spectral"},
          {"portable", size.portable},
          {"us", t.median},
          {"us_low", t.low},
          {"us_high", t.high},
          {"tflops", rate}};
}

std::vector<Size> sizes() {
  std::vector<Size> list = {
      {"2048 on 32K", 1, 32768, 2048},
      {"2048 on 32K, no mean", 1, 32768, 2048, 128, 8, 4, false, false},
      {"2048 on 32K, uneven slots", 1, 32768, 2048, 128, 8, 4, true},
      {"2048 on 32K, soft cap", 1, 32768, 2048, 128, 8, 4, false, true, 50.0F},
      {"2048 on 32K, head_dim 64", 1, 32768, 2048, 64},
      {"2048 on 32K, 64 query heads", 1, 32768, 2048, 128, 8, 8},
      {"8192 alone", 1, 0, 8192},
      {"512 on 32K", 1, 32768, 512},
      {"8 x 256 on 8K", 8, 8192, 256},
      {"2048 on 128K", 1, 131072, 2048},
      {"2048 on 32K, head_dim 256", 1, 32768, 2048, 256, 8, 2},
      {"2048 on 32K, head_dim 256, no mean", 1, 32768, 2048, 256, 8, 2, false, false},
  };
  const auto add = [&](const char* name, int dim, bool mean, bool int2) {
    list.push_back({name, 1, 32768, 2048, dim, 8, 4, false, mean});
    list.back().int2 = int2;
    list.back().portable = !int2;
  };
  add("2048 on 32K, int2", 128, true, true);
  add("2048 on 32K, int2, no mean", 128, false, true);
  add("2048 on 32K, portable", 128, true, false);
  add("2048 on 32K, portable, no mean", 128, false, false);
  add("2048 on 32K, portable, head_dim 64", 64, true, false);
  return list;
}

}  // namespace

int main(int argc, char** argv) {
  std::string json_path;
  std::string only;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--json") json_path = argv[i + 1];
    if (flag == "--only") only = argv[i + 1];
  }
  try {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
    nlohmann::json report;
    report["device"] = properties.name;
    std::printf("%s\n", properties.name);
    for (const Size& size : sizes()) {
      if (size.name.find(only) != std::string::npos) report["prefill"].push_back(measure(size));
    }
    if (!json_path.empty()) std::ofstream(json_path) << report.dump(1) << '\n';
  } catch (const std::exception& e) {
    std::fprintf(stderr, "prefill_bench: error: %s\n", e.what());
    return 1;
  }
  return 0;
}
