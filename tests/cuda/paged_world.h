// A random layer and random sequences in pages, for the checks and benchmarks of device kernels: tables as calibration makes
// them in kind (heads of different slot counts, coordinates of one to three digits, a large mean), logits of a few nats.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "gains.h"
#include "oscar/base/half.h"
#include "oscar/paged/decode_reference.h"

namespace oscar::test {

inline std::size_t size_of(int n) { return static_cast<std::size_t>(n); }

// About 65 % of the slots are first digits, 26 % second, the rest third; quads of coordinates share a width.
inline std::vector<std::uint16_t> slots_in_levels(int slots, int dim) {
  std::vector<int> count = {slots * 65 / 100 / 4 * 4, slots * 26 / 100 / 4 * 4, 0};
  count[0] = std::min(count[0], dim);
  count[2] = slots - count[0] - count[1];
  while (count[2] > count[1]) {
    count[1] += 4;
    count[2] -= 4;
  }
  std::vector<std::uint16_t> source;
  for (int level = 0; level < 3; ++level) {
    for (int i = 0; i < count[size_of(level)]; ++i) source.push_back(static_cast<std::uint16_t>(i + 4096 * level));
  }
  return source;
}

// mean_size: length of the mean against a query of unit coordinates, in nats of the logit at scale 1 / sqrt(D); 0: no mean.
inline paged::SpectralTables random_tables(int dim, const std::vector<int>& slots, double mean_size, unsigned seed,
                                           double rope_base = 1e6) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  const int heads = static_cast<int>(slots.size());
  paged::SpectralTables t;
  t.layout = paged::PageLayout(dim, slots);
  for (int h = 0; h < heads; ++h) {
    t.slot_source.push_back(slots_in_levels(slots[size_of(h)], dim));
    std::vector<int> digits(size_of(dim), 0);
    for (const std::uint16_t s : t.slot_source.back()) ++digits[s % 4096U];
    // Query coordinates of the logit's unit: all coordinates together give about 3 nats at scale 1 / sqrt(D).
    MatrixF q(dim, dim);
    const double all = 3.0 * std::sqrt(static_cast<double>(dim)) / std::sqrt(1.0 + static_cast<double>(slots[size_of(h)]));
    for (int i = 0; i < dim; ++i) {
      const int n = digits[size_of(i)];
      const double size = n == 0 ? 0.0 : all * std::pow(2.0, n - 1) * std::sqrt(12.0) / std::pow(4.0, n) / std::sqrt(dim);
      for (int d = 0; d < dim; ++d) q(d, i) = static_cast<float>(size) * normal(rng);
    }
    t.query.push_back(q);
    t.value_unit.push_back(1.13F + 0.1F * static_cast<float>(h));
  }
  t.key_constant.resize(heads, dim);
  for (Eigen::Index i = 0; i < t.key_constant.size(); ++i) t.key_constant.data()[i] = 0.1F * normal(rng);
  t.value_signs.resize(paged::kPatterns * heads, dim);
  for (Eigen::Index i = 0; i < t.value_signs.size(); ++i) t.value_signs.data()[i] = rng() % 2 == 0 ? 1.0F : -1.0F;
  if (mean_size > 0) {
    const int pairs = dim / 2;
    t.mean_first.resize(heads, pairs);
    t.mean_second.resize(heads, pairs);
    for (int i = 0; i < pairs; ++i) {
      t.theta.push_back(std::pow(rope_base, -2.0 * i / dim));
      t.pair_first.push_back(static_cast<std::uint16_t>(i));
      t.pair_second.push_back(static_cast<std::uint16_t>(i + pairs));
      for (int h = 0; h < heads; ++h) {
        t.mean_first(h, i) = static_cast<float>(mean_size) * normal(rng);
        t.mean_second(h, i) = static_cast<float>(mean_size) * normal(rng);
      }
    }
  }
  return t;
}

// The same of codec `int2`. values_mean: whether values have a mean.
inline paged::Int2Tables random_int2_tables(int dim, int heads, double mean_size, bool values_mean, unsigned seed) {
  const paged::SpectralTables like = random_tables(dim, std::vector<int>(size_of(heads), dim), mean_size, seed);
  std::mt19937 rng(seed + 1);
  std::normal_distribution<float> normal;
  paged::Int2Tables t;
  static_cast<paged::KeyTables&>(t) = like;
  t.layout = paged::PageLayout::int2(dim, heads);
  for (int h = 0; h < heads; ++h) {
    for (int i = 0; i < dim; ++i) t.slot_source[size_of(h)][size_of(i)] = static_cast<std::uint16_t>(i);
    MatrixF output(dim, dim);
    for (Eigen::Index i = 0; i < output.size(); ++i) output.data()[i] = normal(rng) / std::sqrt(static_cast<float>(dim));
    t.value_output.push_back(output);
    for (Eigen::Index i = 0; i < output.size(); ++i)
      t.query[size_of(h)].data()[i] = 2.5F * normal(rng) / std::sqrt(static_cast<float>(dim));
  }
  if (values_mean) {
    t.value_mean.resize(heads, dim);
    for (Eigen::Index i = 0; i < t.value_mean.size(); ++i) t.value_mean.data()[i] = normal(rng);
  }
  return t;
}

struct WorldShape {
  int group = 4;
  int sink = 64, recent = 256;
  std::vector<std::int32_t> lengths;
  int capacity = 0;  // positions the page table has columns for; 0: the longest length
  bool sink_logits = false;
  int queries = 1;
  float soft_cap = 0;
};

// Host copy of everything a decode reads. Unused table entries are -1, unused exact rows NaN, unused codes random.
class PagedWorld {
 public:
  PagedWorld(const paged::SpectralTables& tables, WorldShape shape, unsigned seed)
      : PagedWorld(tables, &tables, nullptr, std::move(shape), seed) {}
  PagedWorld(const paged::Int2Tables& tables, WorldShape shape, unsigned seed)
      : PagedWorld(tables, nullptr, &tables, std::move(shape), seed) {}

 private:
  PagedWorld(const paged::KeyTables& tables, const paged::SpectralTables* spectral, const paged::Int2Tables* int2,
             WorldShape shape, unsigned seed)
      : tables_(tables), spectral_(spectral), int2_(int2), shape_(std::move(shape)) {
    using paged::kBlockTokens;
    using paged::kPageTokens;
    std::mt19937 rng(seed);
    std::normal_distribution<float> normal;
    const int batch = static_cast<int>(shape_.lengths.size());
    const int heads = tables.layout.n_head_kv;
    const int dim = tables.layout.head_dim;
    for (const int n : shape_.lengths) shape_.capacity = std::max(shape_.capacity, n);
    page_columns = std::max(1, (shape_.capacity + kPageTokens - 1) / kPageTokens);
    ring = paged::ring_blocks(shape_.recent + shape_.queries - 1);
    q.resize(size_of(batch * shape_.queries * heads * shape_.group * dim));
    for (std::uint16_t& x : q) x = float_to_half(normal(rng));

    // Tables to random places.
    const int block_columns = shape_.sink / kBlockTokens + ring;
    std::vector<std::int32_t> page_ids, block_ids;
    for (int i = 0; i < batch * page_columns; ++i) page_ids.push_back(i);
    for (int i = 0; i < batch * block_columns; ++i) block_ids.push_back(i);
    std::shuffle(page_ids.begin(), page_ids.end(), rng);
    std::shuffle(block_ids.begin(), block_ids.end(), rng);
    page_table.assign(size_of(batch * page_columns), -1);
    block_table.assign(size_of(batch * block_columns), -1);
    n_pages = batch * page_columns;
    n_blocks = batch * block_columns;

    pages.resize(static_cast<std::size_t>(n_pages) * tables.layout.page_bytes);
    for (std::size_t i = 0; i + 4 <= pages.size(); i += 4) {
      const std::uint32_t bits = rng();
      __builtin_memcpy(pages.data() + i, &bits, 4);
    }
    for (int i = 0; i < n_pages; ++i) {
      const int number = i % page_columns;  // in its sequence
      std::uint8_t* page = pages.data() + size_of(page_ids[size_of(i)]) * tables.layout.page_bytes;
      if (int2_ != nullptr) {
        fill_grids(i / page_columns, number, page, rng);
      } else {
        fill_gains(tables.layout, number, page, rng);
      }
    }
    blocks.assign(size_of(n_blocks) * size_of(heads) * paged::exact_head_values(dim), 0x7E00);
    for (int b = 0; b < batch; ++b) {
      const int n = shape_.lengths[size_of(b)];
      for (int i = 0; i * kPageTokens < std::max(n, shape_.capacity); ++i)
        page_table[size_of(b * page_columns + i)] = page_ids[size_of(b * page_columns + i)];
      fill_exact(b, n, block_ids, normal, rng);
    }
    if (shape_.sink_logits) {
      for (int h = 0; h < heads * shape_.group; ++h) sinks.push_back(2.0F * normal(rng));
      sinks.front() = -std::numeric_limits<float>::infinity();  // as good as none
    }
  }

 public:
  [[nodiscard]] paged::DecodeProblem problem() const {
    paged::DecodeProblem p;
    p.tables = spectral_;
    p.int2_tables = int2_;
    p.batch = static_cast<int>(shape_.lengths.size());
    p.group = shape_.group;
    p.sink = shape_.sink;
    p.recent = shape_.recent;
    p.queries = shape_.queries;
    p.scale = scale();
    p.soft_cap = shape_.soft_cap;
    p.q = q.data();
    p.lengths = shape_.lengths.data();
    p.pages = pages.data();
    p.page_table = page_table.data();
    p.page_columns = page_columns;
    p.blocks = blocks.data();
    p.block_table = block_table.data();
    p.ring = ring;
    p.sinks = sinks.empty() ? nullptr : sinks.data();
    return p;
  }
  [[nodiscard]] float scale() const { return 1.0F / std::sqrt(static_cast<float>(tables_.layout.head_dim)); }
  [[nodiscard]] const WorldShape& shape() const { return shape_; }
  [[nodiscard]] const paged::PageLayout& layout() const { return tables_.layout; }
  // The other one is null.
  [[nodiscard]] const paged::SpectralTables* spectral_tables() const { return spectral_; }
  [[nodiscard]] const paged::Int2Tables* int2_tables() const { return int2_; }

  std::vector<std::uint16_t> q, blocks;
  std::vector<std::uint8_t> pages;
  std::vector<std::int32_t> page_table, block_table;
  std::vector<float> sinks;
  int page_columns = 0, ring = 0, n_pages = 0, n_blocks = 0;

 private:
  // Codes of about unit size, steps that differ by a factor of 8; NaN where a token is not read as a code.
  void fill_grids(int sequence, int number, std::uint8_t* page, std::mt19937& rng) const {
    const paged::Tiers tiers = paged::tiers_of(shape_.lengths[size_of(sequence)], shape_.sink, shape_.recent, shape_.queries);
    std::uniform_real_distribution<float> size(-1.5F, 1.5F), shift(-2.0F, -1.0F);
    for (int h = 0; h < layout().n_head_kv; ++h) {
      std::uint8_t* grids =
          page + layout().head_offset[size_of(h)] + paged::key_bytes(layout().head_dim) + paged::value_bytes(layout().head_dim);
      for (int token = 0; token < 2 * paged::kPageTokens; ++token) {
        const int position = number * paged::kPageTokens + token % paged::kPageTokens;
        const float step = std::exp2(size(rng));
        std::uint16_t grid[2] = {float_to_half(step), float_to_half(step * shift(rng))};
        if (position < tiers.sink_end || position >= tiers.coded_end) grid[0] = grid[1] = 0x7E00;
        __builtin_memcpy(grids + token / paged::kPageTokens * paged::row_data_bytes(paged::PageCodec::int2) +
                             paged::grid_byte(token % paged::kPageTokens),
                         grid, sizeof grid);
      }
    }
  }
  void fill_exact(int sequence, int n, const std::vector<std::int32_t>& ids, std::normal_distribution<float>& normal,
                  std::mt19937& rng) {
    const paged::Tiers tiers = paged::tiers_of(n, shape_.sink, shape_.recent, shape_.queries);
    const int heads = tables_.layout.n_head_kv;
    const int dim = tables_.layout.head_dim;
    const int columns = shape_.sink / paged::kBlockTokens + ring;
    for (int t = 0; t < n; ++t) {
      if (t >= tiers.sink_end && t < tiers.recent_begin) continue;
      const int column = sequence * columns + paged::block_column(t, shape_.sink, ring);
      block_table[size_of(column)] = ids[size_of(column)];
      for (int h = 0; h < heads; ++h) {
        std::uint16_t* head =
            blocks.data() + (size_of(ids[size_of(column)]) * size_of(heads) + size_of(h)) * paged::exact_head_values(dim);
        for (int d = 0; d < dim; ++d) {
          const std::uint32_t at = paged::exact_index(dim, t % paged::kBlockTokens, d);
          head[at] = float_to_half(1.5F * normal(rng));
          head[size_of(paged::kBlockTokens * dim) + at] = float_to_half(normal(rng));
        }
      }
    }
  }

  const paged::KeyTables& tables_;
  const paged::SpectralTables* spectral_;
  const paged::Int2Tables* int2_;
  WorldShape shape_;
};

}  // namespace oscar::test
