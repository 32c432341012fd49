// A small cache whose rows are functions of (layer, K or V, text, position), so that a test knows what every cell must hold.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "codec/test_rows.h"
#include "oscar/base/half.h"
#include "oscar/cache/kv_cache.h"
#include "oscar/cache/state_row.h"
#include "oscar/codec/int2.h"

namespace oscar::test {

inline constexpr int kHeads = 2;
inline constexpr int kDim = 36;  // 72 values a row: 64 with a reserved bit, 8 without
inline constexpr std::size_t kValues = 72;
inline constexpr int kLayers = 2;
inline constexpr std::uint64_t kDigest = 0x0123456789ABCDEFU;

inline Rope test_rope() {
  RopeParams p;
  p.pairing = RopePairing::neox;
  p.n_rot = 32;
  return {p, kDim};
}

inline std::shared_ptr<const Codec> test_codec(bool is_k, std::uint64_t seed) {
  Int2Config config;
  config.n_head_kv = kHeads;
  config.head_dim = kDim;
  config.clip = {0.95F};
  config.rotation = {random_rotation(kDim, seed)};
  if (is_k) {
    const std::vector<float> mean = gaussian(kValues, seed + 1, 2.0F);
    config.mean_pre_rope = Eigen::Map<const MatrixF>(mean.data(), kHeads, kDim);
    config.rope = test_rope();
  }
  return make_int2_codec(std::move(config));
}

inline const std::vector<LayerSpec>& coded_layers() {
  static const std::vector<LayerSpec> layers = [] {
    std::vector<LayerSpec> specs;
    for (int i = 0; i < kLayers; ++i) {
      const auto seed = static_cast<std::uint64_t>(100 + 10 * i);
      specs.push_back({3 * i, kHeads, kDim, kDim, test_codec(true, seed), test_codec(false, seed + 5), test_rope()});
    }
    return specs;
  }();
  return layers;
}

inline std::vector<LayerSpec> exact_layers() {
  std::vector<LayerSpec> specs = coded_layers();
  for (LayerSpec& s : specs) s.k = s.v = nullptr;
  return specs;
}

// Cheap, so that property tests can write millions of rows.
inline std::vector<float> text_row(int layer_index, bool is_k, std::uint64_t text, std::int32_t position) {
  std::uint64_t state = (text * 1000003U + static_cast<std::uint64_t>(position)) * 8U +
                        static_cast<std::uint64_t>(layer_index) * 2U + (is_k ? 1U : 0U);
  std::vector<float> row(kValues);
  for (float& x : row) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    x = static_cast<float>(static_cast<std::int32_t>(state >> 32)) * 0x1p-30F;
  }
  return row;
}

inline std::vector<std::uint16_t> expected_exact(std::span<const float> row) {
  std::vector<std::uint16_t> out(row.size());
  EncodeStats stats;
  round_exact_row(row, out, stats);
  return out;
}

inline std::vector<float> to_floats(std::span<const std::uint16_t> half) {
  std::vector<float> out(half.size());
  for (std::size_t i = 0; i < half.size(); ++i) out[i] = half_to_float(half[i]);
  return out;
}

inline std::vector<std::uint8_t> expected_code(const Codec& codec, std::span<const float> row, std::int32_t position) {
  std::vector<std::uint8_t> out(codec.row_bytes());
  EncodeStats stats;
  codec.encode(to_floats(expected_exact(row)), position, out, stats);
  return out;
}

template <class T>
std::vector<std::remove_const_t<T>> copy_of(std::span<T> s) {
  return {s.begin(), s.end()};
}

// What a host does with one batch of one text.
inline void write_rows(KvCache& cache, std::span<const std::int64_t> cells, std::span<const std::int32_t> positions,
                       std::uint64_t text) {
  for (std::size_t i = 0; i < cells.size(); ++i) {
    for (int layer = 0; layer < kLayers; ++layer) {
      cache.write_k(layer, cells[i], text_row(layer, true, text, positions[i]));
      cache.write_v(layer, cells[i], text_row(layer, false, text, positions[i]));
    }
  }
}

inline void feed(KvCache& cache, SeqId seq, std::uint64_t text, std::span<const std::int64_t> cells,
                 std::int32_t first_position, bool rows = true) {
  std::vector<std::int32_t> positions(cells.size());
  std::iota(positions.begin(), positions.end(), first_position);
  cache.place(cells, positions, std::vector<SeqId>(cells.size(), seq));
  if (rows) write_rows(cache, cells, positions, text);
}

// Cells first_cell .. +n-1 for positions p .. p+n-1.
inline void feed(KvCache& cache, SeqId seq, std::uint64_t text, std::int32_t position, std::int32_t n, std::int64_t first_cell,
                 bool rows = true) {
  std::vector<std::int64_t> cells(static_cast<std::size_t>(n));
  std::iota(cells.begin(), cells.end(), first_cell);
  feed(cache, seq, text, cells, position, rows);
}

inline void expect_cell_holds(const KvCache& cache, std::int64_t cell, std::uint64_t text, std::int32_t position) {
  ASSERT_EQ(cache.position(cell), position) << "cell " << cell;
  for (int layer = 0; layer < kLayers; ++layer) {
    for (const bool is_k : {true, false}) {
      const std::vector<float> row = text_row(layer, is_k, text, position);
      if (cache.has_exact(cell)) {
        ASSERT_EQ(copy_of(cache.exact(layer, is_k, cell)), expected_exact(row)) << "cell " << cell;
      }
      if (cache.coded()) {
        const LayerSpec& spec = cache.layers()[static_cast<std::size_t>(layer)];
        ASSERT_EQ(copy_of(cache.code(layer, is_k, cell)), expected_code(is_k ? *spec.k : *spec.v, row, position))
            << "cell " << cell;
      }
    }
  }
}

inline std::size_t slots_in_use(const KvCache& cache) {
  std::size_t n = 0;
  for (std::int64_t cell = 0; cell < cache.n_cells(); ++cell) n += cache.has_exact(cell) ? 1U : 0U;
  return n;
}

inline constexpr std::size_t kExactCellBytes = 2 * 2 * kValues * kLayers;

}  // namespace oscar::test
