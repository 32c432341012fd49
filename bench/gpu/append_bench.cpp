// Append to the paged 2-bit cache on this machine's GPU: by itself, and as a share of the decode attention that follows it.
// usage: append_bench [--json FILE] [--only TEXT]
//
// Times are those of CUDA-graph replays as in decode_bench. `alone` is a graph of appends to rotating caches, whose tables L2
// then holds; `in a step` is the time of append and decode together minus that of the same decodes by themselves (both twice,
// in turns), each layer with tables and a cache of its own, so that nothing of them is in L2. 8 KV heads, 32 query heads of
// 128, 128 slots per head, RoPE means.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "fill.h"
#include "oscar/cuda/append.h"
#include "oscar/paged/encode_tables.h"
#include "paged/spectral_layer.h"
#include "timing.h"

namespace {

using namespace oscar;
using bench::check;
using bench::DeviceArray;
using bench::shuffled;
using bench::time_graph;
using bench::Times;
using test::size_of;

constexpr int kHeads = 8;
constexpr int kGroup = 4;
constexpr int kDim = 128;
constexpr int kSink = 64;
constexpr int kRecent = 256;

// Per head 32 coordinates of two digits, 64 of one, 32 without a code: 128 slots.
test::SpectralLayer bench_layer() {
  test::SpectralLayer layer = test::spectral_layer(kHeads, kDim, 1);
  for (int h = 0; h < kHeads; ++h) {
    SpectralKeyHead head = test::plain_head(kDim, 2);
    head.transform = test::random_rotation(kDim, static_cast<unsigned>(h));
    head.inverse = head.transform.transpose();
    for (int d = 0; d < kDim; ++d) {
      const int width = d < 32 ? 4 : (d < 96 ? 2 : 0);
      head.width[size_of(d)] = width;
      head.step[size_of(d)] = width == 0 ? 1.0F : test::kGaussianStep[width / 2 - 1];
    }
    layer.keys.heads[size_of(h)] = head;
  }
  return layer;
}

// A layer with its cache.
struct Layer {
  Layer(const paged::SpectralTables& tables, const paged::EncodeTables& encode) : layer(tables), encoder(encode) {}
  cuda::LayerTables layer;
  cuda::EncoderTables encoder;
  DeviceArray<std::uint8_t> pages;
  DeviceArray<std::uint16_t> blocks;
  DeviceArray<std::int32_t> page_table, block_table;
};

class Bench {
 public:
  // rows: new ones of each sequence. length: tokens of each, those included.
  Bench(int batch, int rows, int length) : batch_(batch), rows_(rows), length_(length) {
    const test::SpectralLayer config = bench_layer();
    const paged::SpectralTables tables = paged::spectral_tables(config.keys, config.values);
    const paged::EncodeTables encode = paged::encode_tables(config.keys, config.values);
    const auto sequences = size_of(batch);
    const std::size_t page_columns = size_of((length + 63) / 64);
    const std::size_t block_columns = size_of(kSink / paged::kBlockTokens + paged::ring_blocks(kRecent));
    const std::size_t bytes = sequences * page_columns * tables.layout.page_bytes +
                              sequences * block_columns * kHeads * paged::exact_head_values(kDim) * 2;
    std::mt19937 rng(1);
    const std::size_t count = std::clamp<std::size_t>((bench::kTouched + bytes - 1) / bytes, 2, 32);
    for (std::size_t i = 0; i < count; ++i) {
      Layer& c = *layers_.emplace_back(std::make_unique<Layer>(tables, encode));
      c.pages = DeviceArray<std::uint8_t>(sequences * page_columns * tables.layout.page_bytes);
      c.blocks = DeviceArray<std::uint16_t>(sequences * block_columns * kHeads * paged::exact_head_values(kDim));
      bench::fill_words(c.pages.data(), c.pages.size(), i << 40);
      bench::fill_row_data(c.pages.data(), sequences * page_columns, c.layer.view());
      bench::fill_halves(c.blocks.data(), c.blocks.size(), (i << 40) + 1);
      c.page_table = DeviceArray<std::int32_t>(shuffled(sequences * page_columns, rng));
      c.block_table = DeviceArray<std::int32_t>(shuffled(sequences * block_columns, rng));
    }
    const std::size_t n_rows = sequences * size_of(rows);
    k_ = DeviceArray<std::uint16_t>(n_rows * kHeads * kDim);
    v_ = DeviceArray<std::uint16_t>(n_rows * kHeads * kDim);
    q_ = DeviceArray<std::uint16_t>(sequences * kHeads * kGroup * kDim);
    out_ = DeviceArray<std::uint16_t>(q_.size());
    bench::fill_halves(k_.data(), k_.size(), 5);
    bench::fill_halves(v_.data(), v_.size(), 6);
    bench::fill_halves(q_.data(), q_.size(), 7);
    lengths_ = DeviceArray<std::int32_t>(std::vector<std::int32_t>(sequences, length));
    std::vector<std::int32_t> starts;
    for (int b = 0; b <= batch; ++b) starts.push_back(b * rows);
    row_start_ = DeviceArray<std::int32_t>(starts);
    workspace_ = DeviceArray<std::uint8_t>(cuda::decode_workspace_bytes(layers_[0]->layer.view(), batch, kGroup));
    check(cudaMemset(workspace_.data(), 0, workspace_.size()), "cudaMemset");
    check(cudaDeviceSynchronize(), "filling the caches");
  }

  Times append() {
    return time_graph(launches(), [&](int i, cudaStream_t stream) { enqueue_append(i, stream); });
  }
  Times decode() {
    return time_graph(launches(), [&](int i, cudaStream_t stream) { enqueue_decode(i, stream); });
  }
  Times step() {
    return time_graph(launches(), [&](int i, cudaStream_t stream) {
      enqueue_append(i, stream);
      enqueue_decode(i, stream);
    });
  }

 private:
  // Short bursts: a long one meets the power cap.
  [[nodiscard]] int launches() const {
    const bool large = std::int64_t{batch_} * length_ > 2'000'000;
    return std::max(large ? 2 : 16, static_cast<int>(layers_.size()));
  }
  [[nodiscard]] const Layer& layer(int i) const { return *layers_[size_of(i) % layers_.size()]; }

  void enqueue_append(int i, cudaStream_t stream) {
    const Layer& c = layer(i);
    cuda::AppendArgs a;
    a.layer = &c.layer.view();
    a.encoder = &c.encoder.view();
    a.batch = batch_;
    a.n_rows = batch_ * rows_;
    a.sink = kSink;
    a.k = k_.data();
    a.v = v_.data();
    a.row_start = rows_ == 1 ? nullptr : row_start_.data();
    a.lengths = lengths_.data();
    a.pages = c.pages.data();
    a.page_table = c.page_table.data();
    a.page_columns = (length_ + 63) / 64;
    a.blocks = c.blocks.data();
    a.block_table = c.block_table.data();
    a.ring = paged::ring_blocks(kRecent);
    cuda::append(a, stream);
  }
  void enqueue_decode(int i, cudaStream_t stream) {
    const Layer& c = layer(i);
    cuda::DecodeArgs a;
    a.layer = &c.layer.view();
    a.batch = batch_;
    a.group = kGroup;
    a.sink = kSink;
    a.recent = kRecent;
    a.scale = 1.0F / std::sqrt(static_cast<float>(kDim));
    a.q = q_.data();
    a.lengths = lengths_.data();
    a.pages = c.pages.data();
    a.page_table = c.page_table.data();
    a.page_columns = (length_ + 63) / 64;
    a.blocks = c.blocks.data();
    a.block_table = c.block_table.data();
    a.ring = paged::ring_blocks(kRecent);
    a.out = out_.data();
    a.workspace = workspace_.data();
    a.workspace_bytes = workspace_.size();
    a.overlaps_predecessor = true;
    cuda::decode(a, stream);
  }

  int batch_, rows_, length_;
  std::vector<std::unique_ptr<Layer>> layers_;
  DeviceArray<std::uint16_t> k_, v_, q_, out_;
  DeviceArray<std::int32_t> lengths_, row_start_;
  DeviceArray<std::uint8_t> workspace_;
};

nlohmann::json row_of(const std::string& name, const Times& t) {
  return {{"name", name}, {"us", t.median}, {"us_low", t.low}, {"us_high", t.high}};
}

nlohmann::json measure_step(const std::string& name, int batch, int length) {
  Bench bench(batch, 1, length);
  const Times alone = bench.append();
  double decode[2], step[2];
  for (int i = 0; i < 2; ++i) {
    decode[i] = bench.decode().median;
    step[i] = bench.step().median;
  }
  const double decode_us = (decode[0] + decode[1]) / 2;
  const double in_step = (step[0] + step[1]) / 2 - decode_us;
  std::printf("append %-24s %7.2f us alone (%.2f .. %.2f)  %7.2f us in a step (%.2f, %.2f): %.1f %% of the decode's %.1f us\n",
              name.c_str(), alone.median, alone.low, alone.high, in_step, step[0] - decode[0], step[1] - decode[1],
              100 * in_step / decode_us, decode_us);
  std::fflush(stdout);
  nlohmann::json row = row_of(name, alone);
  row.update({{"batch", batch}, {"context", length}, {"decode_us", decode}, {"step_us", step}, {"in_step_us", in_step}});
  return row;
}

nlohmann::json measure_chunk(const std::string& name, int batch, int rows, int length) {
  Bench bench(batch, rows, length);
  const Times t = bench.append();
  const double per_second = 1e6 * batch * rows / t.median;
  std::printf("append %-24s %7.2f us (%.2f .. %.2f)  %6.1f million rows/s\n", name.c_str(), t.median, t.low, t.high,
              per_second * 1e-6);
  std::fflush(stdout);
  nlohmann::json row = row_of(name, t);
  row.update({{"batch", batch}, {"rows", rows}, {"context", length}, {"rows_per_second", per_second}});
  return row;
}

}  // namespace

int main(int argc, char** argv) {
  std::string json_path;
  std::string only;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    if (flag == "--json")
      json_path = argv[i + 1];
    else if (flag == "--only")
      only = argv[i + 1];
  }
  try {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
    nlohmann::json report;
    report["device"] = properties.name;
    const auto wanted = [&](const std::string& name) { return name.find(only) != std::string::npos; };
    struct Step {
      const char* name;
      int batch, length;
    };
    for (const Step& s : {Step{"1 x 32K", 1, 32768},
                          {"8 x 32K", 8, 32768},
                          {"32 x 32K", 32, 32768},
                          {"64 x 8K", 64, 8192},
                          {"256 x 1K", 256, 1024},
                          {"256 x 32K", 256, 32768}}) {
      if (wanted(s.name)) report["step"].push_back(measure_step(s.name, s.batch, s.length));
    }
    struct Chunk {
      const char* name;
      int batch, rows, length;
    };
    for (const Chunk& c : {Chunk{"chunk of 512", 1, 512, 32768},
                           {"chunk of 2048", 1, 2048, 32768 + 2048},
                           {"chunk of 8192", 1, 8192, 8192},
                           {"32 chunks of 333", 32, 333, 1000},
                           {"256 drafts of 4", 256, 4, 1024}}) {
      if (wanted(c.name)) report["chunk"].push_back(measure_chunk(c.name, c.batch, c.rows, c.length));
    }
    if (!json_path.empty()) std::ofstream(json_path) << report.dump(1) << '\n';
  } catch (const std::exception& e) {
    std::fprintf(stderr, "append_bench: error: %s\n", e.what());
    return 1;
  }
  return 0;
}
