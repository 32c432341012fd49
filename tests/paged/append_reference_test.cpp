#include "oscar/paged/append_reference.h"

#include "oscar/base/half.h"
#include "spectral_layer.h"

namespace oscar::paged {
namespace {

using test::size_of;

constexpr int kHeads = 2;
constexpr int kDim = 64;
constexpr int kSink = 16;
constexpr int kRing = 3;

// Two sequences in pages and blocks that are filled with one byte.
struct Cache {
  std::vector<std::int32_t> page_table{3, 1, 0, 4}, block_table{0, 5, 2, 7, 1, 6, 3, 4};  // 2 x 2 pages, 2 x (1 + 3) blocks
  std::vector<std::uint8_t> pages;
  std::vector<std::uint16_t> blocks;
  explicit Cache(const PageLayout& layout)
      : pages(5 * size_of(static_cast<int>(layout.page_bytes)), 0x5A),
        blocks(8 * size_of(kHeads) * exact_head_values(kDim), 0x7E01) {}
};

TEST(AppendReference, ChunksAndSingleRowsLeaveTheSameCache) {
  const test::SpectralLayer layer = test::spectral_layer(kHeads, kDim, 8);
  const SpectralTables tables = spectral_tables(layer.keys, layer.values);
  const auto keys = make_spectral_key_codec(layer.keys);
  const auto values = make_spectral_value_codec(layer.values);
  const std::vector<std::int32_t> lengths = {97, 20};
  const std::vector<std::int32_t> starts = {0, 97, 117};
  std::mt19937 rng(2);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> k(size_of(117 * kHeads * kDim)), v(k.size());
  for (std::uint16_t& x : k) x = float_to_half(normal(rng));
  for (std::uint16_t& x : v) x = float_to_half(normal(rng));
  AppendProblem p;
  p.layout = &tables.layout;
  p.keys = keys.get();
  p.values = values.get();
  p.batch = 2;
  p.sink = kSink;
  p.ring = kRing;
  p.page_columns = 2;
  const auto append = [&](Cache& cache, const std::uint16_t* k_rows, const std::uint16_t* v_rows, const std::int32_t* row_start,
                          const std::int32_t* n) {
    p.k = k_rows;
    p.v = v_rows;
    p.row_start = row_start;
    p.lengths = n;
    p.page_table = cache.page_table.data();
    p.block_table = cache.block_table.data();
    p.pages = cache.pages.data();
    p.blocks = cache.blocks.data();
    append_reference(p);
  };
  Cache chunk(tables.layout);
  append(chunk, k.data(), v.data(), starts.data(), lengths.data());

  Cache single(tables.layout);
  const std::size_t row = size_of(kHeads * kDim);
  for (int t = 0; t < 97; ++t) {
    std::vector<std::uint16_t> two_k(k.begin() + t * static_cast<std::ptrdiff_t>(row),
                                     k.begin() + (t + 1) * static_cast<std::ptrdiff_t>(row));
    std::vector<std::uint16_t> two_v(v.begin() + t * static_cast<std::ptrdiff_t>(row),
                                     v.begin() + (t + 1) * static_cast<std::ptrdiff_t>(row));
    two_k.resize(2 * row);
    two_v.resize(2 * row);
    const bool second = t < 20;
    if (second) {
      std::copy_n(k.begin() + (97 + t) * static_cast<std::ptrdiff_t>(row), row,
                  two_k.begin() + static_cast<std::ptrdiff_t>(row));
      std::copy_n(v.begin() + (97 + t) * static_cast<std::ptrdiff_t>(row), row,
                  two_v.begin() + static_cast<std::ptrdiff_t>(row));
    }
    const std::vector<std::int32_t> n = {t + 1, second ? t + 1 : 0};
    append(single, two_k.data(), two_v.data(), nullptr, n.data());
  }
  EXPECT_EQ(chunk.pages, single.pages);
  // Rows of the chunk that the ring no longer holds were never copied; what both hold is equal.
  std::size_t copied = 0;
  for (std::size_t i = 0; i < chunk.blocks.size(); ++i) {
    if (chunk.blocks[i] == 0x7E01) continue;
    ++copied;
    ASSERT_EQ(chunk.blocks[i], single.blocks[i]);
  }
  // Sequence 0: 16 of the sink, blocks 4, 5 and one row of block 6; sequence 1: all 20.
  EXPECT_EQ(copied, (16 + 32 + 1 + 20) * 2 * row);

  // What stands in the pages are the codec's rows, at their places.
  std::vector<std::uint8_t> k_row(tables.layout.key_row_bytes()), v_row(tables.layout.value_row_bytes());
  std::vector<float> exact(row);
  std::transform(k.begin() + 70 * static_cast<std::ptrdiff_t>(row), k.begin() + 71 * static_cast<std::ptrdiff_t>(row),
                 exact.begin(), half_to_float);
  tables.layout.load_rows({chunk.pages.data() + 1 * tables.layout.page_bytes, tables.layout.page_bytes}, 70, k_row, v_row);
  EXPECT_EQ(k_row, test::encode(*keys, exact, 70));
  std::transform(v.begin() + 70 * static_cast<std::ptrdiff_t>(row), v.begin() + 71 * static_cast<std::ptrdiff_t>(row),
                 exact.begin(), half_to_float);
  EXPECT_EQ(v_row, test::encode(*values, exact, 70));
}

TEST(AppendReference, PagesAndBlocksThatAreNotThereAreLeftOut) {
  const test::SpectralLayer layer = test::spectral_layer(kHeads, kDim, 8);
  const SpectralTables tables = spectral_tables(layer.keys, layer.values);
  const auto keys = make_spectral_key_codec(layer.keys);
  const auto values = make_spectral_value_codec(layer.values);
  const std::vector<std::uint16_t> rows(size_of(2 * kHeads * kDim), 0x3C00);
  Cache cache(tables.layout);
  std::fill(cache.page_table.begin(), cache.page_table.end(), -1);
  std::fill(cache.block_table.begin(), cache.block_table.end(), -1);
  const Cache before(tables.layout);
  const std::vector<std::int32_t> lengths = {5, 70};
  AppendProblem p;
  p.layout = &tables.layout;
  p.keys = keys.get();
  p.values = values.get();
  p.batch = 2;
  p.sink = kSink;
  p.ring = kRing;
  p.page_columns = 2;
  p.k = p.v = rows.data();
  p.lengths = lengths.data();
  p.page_table = cache.page_table.data();
  p.block_table = cache.block_table.data();
  p.pages = cache.pages.data();
  p.blocks = cache.blocks.data();
  append_reference(p);
  EXPECT_EQ(cache.pages, before.pages);
  EXPECT_EQ(cache.blocks, before.blocks);
}

}  // namespace
}  // namespace oscar::paged
