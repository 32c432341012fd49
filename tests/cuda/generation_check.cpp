// Steps of a generation: each appends a row per sequence and decodes. Enqueued without waiting, decodes fetching tiles while
// the append before still runs, they must give what they give one by one. Needs a GPU, as append_check and decode_check do.
#include <algorithm>
#include <cstdio>
#include <random>

#include "cuda/runtime.h"
#include "gains.h"
#include "oscar/base/half.h"
#include "oscar/cuda/append.h"
#include "oscar/cuda/decode.h"
#include "oscar/paged/encode_tables.h"
#include "paged/spectral_layer.h"

namespace {

using namespace oscar;
using cuda::check;
using cuda::DeviceArray;
using test::size_of;

class Generation {
 public:
  static constexpr int kSteps = 40;
  static constexpr int kDim = 128, kHeads = 2, kGroup = 4, kCapacity = 1088;

  Generation() : layer_(test::spectral_layer(kHeads, kDim, 40)), tables_(paged::spectral_tables(layer_.keys, layer_.values)) {
    std::mt19937 rng(6);
    std::normal_distribution<float> normal;
    const auto halves = [&](std::size_t n) {
      std::vector<std::uint16_t> x(n);
      for (std::uint16_t& h : x) h = float_to_half(normal(rng));
      return x;
    };
    const std::size_t rows = kSteps * start_.size();
    k_ = DeviceArray<std::uint16_t>(halves(rows * kHeads * kDim));
    v_ = DeviceArray<std::uint16_t>(halves(rows * kHeads * kDim));
    q_ = DeviceArray<std::uint16_t>(halves(rows * kHeads * kGroup * kDim));
    out_ = DeviceArray<std::uint16_t>(rows * kHeads * kGroup * kDim);
    std::vector<std::int32_t> lengths;
    for (int step = 1; step <= kSteps; ++step) {
      for (const std::int32_t n : start_) lengths.push_back(n + step);
    }
    lengths_ = DeviceArray<std::int32_t>(lengths);
    const int columns = 64 / paged::kBlockTokens + kRing;
    const auto identity = [&](int n) {
      std::vector<std::int32_t> ids(start_.size() * size_of(n));
      for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(ids.size() - 1 - i);
      return ids;
    };
    page_table_ = DeviceArray<std::int32_t>(identity(kCapacity / 64));
    block_table_ = DeviceArray<std::int32_t>(identity(columns));
    first_pages_.resize(start_.size() * (kCapacity / 64) * tables_.layout.page_bytes);
    for (std::uint8_t& x : first_pages_) x = static_cast<std::uint8_t>(rng());
    const int n_pages = static_cast<int>(first_pages_.size() / tables_.layout.page_bytes);
    for (int i = 0; i < n_pages; ++i) {  // in the order of the table, which is backwards
      test::fill_gains(tables_.layout, i % (kCapacity / 64),
                       first_pages_.data() + size_of(n_pages - 1 - i) * tables_.layout.page_bytes, rng);
    }
    first_blocks_ = halves(start_.size() * size_of(columns) * kHeads * paged::exact_head_values(kDim));
  }

  bool run() {
    const std::vector<std::uint16_t> want = outputs(false, false);
    bool good = std::none_of(want.begin(), want.end(), [](std::uint16_t x) { return (x & 0x7C00U) == 0x7C00U; });
    for (int i = 0; i < 4; ++i) good = good && outputs(true, i % 2 == 1) == want;
    std::printf("%-40s %s\n", "append and decode, enqueued at once", good ? "ok" : "FAILED");
    return good;
  }

 private:
  static constexpr int kRing = 17;

  std::vector<std::uint16_t> outputs(bool at_once, bool as_graph) {
    const cuda::LayerTables layer(tables_);
    const cuda::EncoderTables encoder(paged::encode_tables(layer_.keys, layer_.values));
    const DeviceArray<std::uint8_t> pages(first_pages_);
    const DeviceArray<std::uint16_t> blocks(first_blocks_);
    const int batch = static_cast<int>(start_.size());
    const DeviceArray<std::uint8_t> workspace(cuda::decode_workspace_bytes(layer.view(), batch, kGroup));
    check(cudaMemset(workspace.data(), 0, workspace.size()), "cudaMemset");
    check(cudaMemset(out_.data(), 0xFF, out_.size() * 2), "cudaMemset");
    cuda::AppendArgs append;
    append.layer = &layer.view();
    append.encoder = &encoder.view();
    append.batch = append.n_rows = batch;
    append.pages = pages.data();
    append.page_table = page_table_.data();
    append.page_columns = kCapacity / 64;
    append.blocks = blocks.data();
    append.block_table = block_table_.data();
    append.ring = kRing;
    cuda::DecodeArgs decode;
    decode.layer = &layer.view();
    decode.batch = batch;
    decode.group = kGroup;
    decode.scale = 0.05F;
    decode.pages = pages.data();
    decode.page_table = page_table_.data();
    decode.page_columns = kCapacity / 64;
    decode.blocks = blocks.data();
    decode.block_table = block_table_.data();
    decode.ring = kRing;
    decode.overlaps_predecessor = at_once;
    decode.workspace = workspace.data();
    decode.workspace_bytes = workspace.size();
    cudaStream_t stream = nullptr;
    check(cudaStreamCreate(&stream), "cudaStreamCreate");
    if (as_graph) check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    for (std::size_t step = 0; step < kSteps; ++step) {
      const std::size_t row = step * start_.size() * kHeads * kDim;
      append.k = k_.data() + row;
      append.v = v_.data() + row;
      append.lengths = decode.lengths = lengths_.data() + step * start_.size();
      decode.q = q_.data() + row * kGroup;
      decode.out = out_.data() + row * kGroup;
      cuda::append(append, stream);
      if (!at_once) check(cudaStreamSynchronize(stream), "an append");
      cuda::decode(decode, stream);
      if (!at_once) check(cudaStreamSynchronize(stream), "a decode");
    }
    if (as_graph) {
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t executable = nullptr;
      check(cudaStreamEndCapture(stream, &graph), "capture");
      check(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
      check(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
      check(cudaStreamSynchronize(stream), "a graph");
      check(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
      check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    }
    check(cudaStreamSynchronize(stream), "a generation");
    check(cudaStreamDestroy(stream), "cudaStreamDestroy");
    return out_.download();
  }

  test::SpectralLayer layer_;
  paged::SpectralTables tables_;
  std::vector<std::int32_t> start_{64, 70, 321, 1000, 300, 15, 640};
  std::vector<std::uint8_t> first_pages_;
  std::vector<std::uint16_t> first_blocks_;
  DeviceArray<std::uint16_t> k_, v_, q_, out_;
  DeviceArray<std::int32_t> lengths_, page_table_, block_table_;
};

}  // namespace

int main() {
  try {
    return Generation().run() ? 0 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "generation_check: error: %s\n", e.what());
    return 1;
  }
}
