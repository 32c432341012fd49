// The life of cells and sequences: removal, holes, copies, shift, clear, and what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <set>
#include <string>

#include "cache/test_cache.h"
#include "oscar/base/error.h"

namespace oscar {
namespace {

using namespace test;

std::string refusal(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

// A key row of a layer as a model would make it: its pre-RoPE mean and some content, rotated to the position.
std::vector<float> key_row(int layer_index, std::int32_t position) {
  std::vector<float> row = gaussian(kValues, 5);
  for (std::size_t h = 0; h < kHeads; ++h) {
    const auto head = std::span(row).subspan(h * kDim, kDim);
    const KeyMean mean = coded_layers()[static_cast<std::size_t>(layer_index)].k->key_mean(static_cast<int>(h));
    for (std::size_t d = 0; d < head.size(); ++d) head[d] += mean.pre_rope[d];
    test_rope().apply(head, position);
  }
  return row;
}

TEST(KvCache, D5_RemovingTheMiddleLeavesHolesThatAreUsedAgain) {
  KvCache cache(128, {4, 16, 4}, coded_layers());
  feed(cache, 0, 1, 0, 100, 0);
  cache.seq_rm(0, 20, 40);
  EXPECT_EQ(cache.newest(0), 99);
  for (std::int64_t c = 20; c < 40; ++c) {
    EXPECT_EQ(cache.position(c), -1);
    EXPECT_FALSE(cache.has_code(c));
    EXPECT_FALSE(cache.has_exact(c));
    EXPECT_TRUE(cache.code(0, true, c).empty());
  }
  feed(cache, 0, 1, 100, 10, 25);  // appended text lands in the hole: windows follow the position, not the cell
  for (std::int32_t p = 100; p < 110; ++p) expect_cell_holds(cache, 25 + p - 100, 1, p);
  for (std::int32_t r = 94; r < 100; ++r) EXPECT_TRUE(cache.has_exact(r));
  for (std::int64_t c = 41; c < 70; ++c) EXPECT_FALSE(cache.has_exact(c));
  EXPECT_EQ(cache.newest(0), 109);
}

TEST(KvCache, D5_SequenceMinusOneMeansAll) {
  KvCache cache(128, {4, 16, 4}, coded_layers());
  feed(cache, 0, 1, 0, 30, 0);
  feed(cache, 1, 2, 0, 30, 30);
  cache.seq_rm(-1, 10, 20);
  EXPECT_EQ(cache.newest(0), 29);
  EXPECT_EQ(cache.position(15), -1);
  EXPECT_EQ(cache.position(45), -1);
  EXPECT_EQ(cache.position(50), 20);
  cache.seq_rm(-1, 0, -1);
  EXPECT_EQ(cache.newest(0), std::nullopt);
  EXPECT_EQ(cache.newest(1), std::nullopt);
  EXPECT_EQ(slots_in_use(cache), 0U);
  EXPECT_EQ(cache.memory().code_bytes, 0U);
}

// D14: a copied sequence diverges; both halves read what they would read alone.
TEST(KvCache, D14_CopyThenDivergeEqualsSolo) {
  const Windows w{4, 16, 4};
  KvCache cache(512, w, coded_layers());
  feed(cache, 0, 1, 0, 60, 0);
  cache.seq_cp(0, 1, 0, -1);
  EXPECT_EQ(cache.newest(1), 59);
  for (std::int32_t p = 60; p < 160; ++p) {
    feed(cache, 0, 1, p, 1, 100 + 2 * (p - 60));
    if (p < 90) feed(cache, 1, 2, p, 1, 101 + 2 * (p - 60));
  }
  for (std::int32_t p = 0; p < 60; ++p) expect_cell_holds(cache, p, 1, p);
  for (std::int32_t p = 60; p < 160; ++p) {
    expect_cell_holds(cache, 100 + 2 * (p - 60), 1, p);
    EXPECT_TRUE(!w.exact(p, 159) || cache.has_exact(100 + 2 * (p - 60)));
    if (p < 90) {
      expect_cell_holds(cache, 101 + 2 * (p - 60), 2, p);
      EXPECT_TRUE(!w.exact(p, 89) || cache.has_exact(101 + 2 * (p - 60)));
    }
  }
  cache.seq_rm(0, 0, -1);
  EXPECT_EQ(cache.position(5), 5);     // still in sequence 1
  EXPECT_EQ(cache.position(298), -1);  // was only in sequence 0
  cache.seq_cp(1, 1, 0, -1);
  cache.seq_cp(7, 8, 0, -1);  // nothing to copy
  EXPECT_EQ(cache.newest(8), std::nullopt);
}

TEST(KvCache, PartialCopyTakesOnlyTheRange) {
  KvCache cache(64, {4, 16, 4}, coded_layers());
  feed(cache, 0, 1, 0, 30, 0);
  cache.seq_cp(0, 3, 5, 12);
  EXPECT_EQ(cache.newest(3), 11);
  cache.seq_rm(0, 0, -1);
  for (std::int64_t c = 0; c < 30; ++c) EXPECT_EQ(cache.position(c), c >= 5 && c < 12 ? c : -1);
}

TEST(KvCache, OneCallMayPutACellIntoSeveralSequences) {
  KvCache cache(64, {4, 16, 4}, coded_layers());
  cache.place(std::vector<std::int64_t>{3, 3, 4}, std::vector<std::int32_t>{0, 0, 1}, std::vector<SeqId>{0, 1, 0});
  EXPECT_EQ(cache.newest(0), 1);
  EXPECT_EQ(cache.newest(1), 0);
  EXPECT_EQ(cache.counters().rows_written, 2U);
  cache.seq_rm(0, 0, -1);
  EXPECT_EQ(cache.position(3), 0);
  EXPECT_EQ(cache.position(4), -1);
}

TEST(KvCache, ARowWrittenByPartsIsTheRowWrittenAtOnce) {
  KvCache whole(8, {4, 16, 4}, coded_layers());
  KvCache parts(8, {4, 16, 4}, coded_layers());
  for (KvCache* cache : {&whole, &parts}) {
    cache->place(std::vector<std::int64_t>{5}, std::vector<std::int32_t>{5}, std::vector<SeqId>{0});
  }
  const std::vector<float> key = key_row(0, 5);
  const std::vector<float> value = gaussian(kValues, 8);
  whole.write_k(0, 5, key);
  whole.write_v(0, 5, value);
  for (const int part : {2, 0, 1}) {
    parts.write_k(0, 5, key, part, 3);
    parts.write_v(0, 5, value, part, 3);
  }
  for (const bool is_k : {true, false}) {
    EXPECT_THAT(parts.code(0, is_k, 5), testing::ElementsAreArray(whole.code(0, is_k, 5)));
    EXPECT_THAT(parts.exact(0, is_k, 5), testing::ElementsAreArray(whole.exact(0, is_k, 5)));
  }
  EXPECT_EQ(parts.counters().k.rows, 1U);
}

// D10, the cache's part: shifted exact rows equal rows written at the new position, up to the rounding of one rotation.
TEST(KvCache, D10_ShiftEqualsWritingAtTheNewPosition) {
  const std::vector<float> value = gaussian(kValues, 8);
  for (const bool coded : {true, false}) {
    KvCache cache(64, {4, 16, 4}, coded ? coded_layers() : exact_layers());
    cache.place(std::vector<std::int64_t>{0, 1, 2}, std::vector<std::int32_t>{40, 41, 42}, std::vector<SeqId>{0, 0, 0});
    for (std::int64_t c = 0; c < 3; ++c) {
      for (int layer = 0; layer < kLayers; ++layer) {
        cache.write_k(layer, c, key_row(layer, static_cast<std::int32_t>(40 + c)));
        cache.write_v(layer, c, value);
      }
    }
    cache.shift(0, 41, -1, -30);
    EXPECT_EQ(cache.position(0), 40);
    EXPECT_EQ(cache.position(1), 11);
    EXPECT_EQ(cache.position(2), 12);
    EXPECT_EQ(cache.newest(0), 40);
    EXPECT_EQ(cache.counters().shifted_rows, 2U);
    for (int layer = 0; layer < kLayers; ++layer) {
      std::vector<float> row(kValues);
      cache.read_row(layer, true, 2, true, row);
      EXPECT_LT(relative_error(row, key_row(layer, 12)), 1e-6);
      EXPECT_GT(relative_error(row, key_row(layer, 42)), 0.1);
      cache.read_row(layer, false, 2, true, row);
      EXPECT_EQ(row, to_floats(expected_exact(value)));
      if (!coded) continue;
      // The code is that of the new exact row at the new position.
      const auto exact = to_floats(cache.exact(layer, true, 2));
      EXPECT_EQ(copy_of(cache.code(layer, true, 2)),
                expected_code(*cache.layers()[static_cast<std::size_t>(layer)].k, exact, 12));
      cache.read_row(layer, true, 2, false, row);
      EXPECT_LT(relative_error(row, key_row(layer, 12)), 0.08);
    }
  }
}

TEST(KvCache, D10_ShiftOfRowsThatHaveOnlyCodes) {
  KvCache cache(256, {4, 16, 4}, coded_layers());
  for (std::int32_t p = 0; p < 100; ++p) {
    feed(cache, 0, 1, p, 1, p);
    for (int layer = 0; layer < kLayers; ++layer) cache.write_k(layer, p, key_row(layer, p));
  }
  ASSERT_FALSE(cache.has_exact(50));
  std::vector<float> before(kValues);
  cache.read_row(1, true, 50, false, before);
  cache.shift(0, 30, -1, -20);
  EXPECT_EQ(cache.position(50), 30);
  EXPECT_FALSE(cache.has_exact(50));
  std::vector<float> after(kValues);
  cache.read_row(1, true, 50, false, after);
  for (std::size_t h = 0; h < kHeads; ++h) test_rope().shift(std::span(before).subspan(h * kDim, kDim), -20);
  EXPECT_LT(relative_error(after, before), 0.08);  // coded twice
  EXPECT_LT(relative_error(after, key_row(1, 30)), 0.12);
  EXPECT_GT(relative_error(after, key_row(1, 50)), 0.2);  // and really rotated
}

TEST(KvCache, ShiftBelowZeroRemovesAsTheHostDoes) {
  KvCache cache(64, {4, 16, 4}, coded_layers());
  feed(cache, 0, 1, 0, 20, 0);
  cache.shift(0, 0, -1, -5);
  for (std::int64_t c = 0; c < 20; ++c) EXPECT_EQ(cache.position(c), c < 5 ? -1 : c - 5);
  EXPECT_EQ(cache.newest(0), 14);
  EXPECT_NE(refusal([&] { cache.shift(0, 0, -1, kMaxPosition); }), "");
  EXPECT_EQ(cache.newest(0), 14);
}

TEST(KvCache, ShiftByCellNeedsAllLayersThenPositions) {
  KvCache by_cell(64, {4, 16, 4}, coded_layers());
  KvCache by_range(64, {4, 16, 4}, coded_layers());
  for (KvCache* cache : {&by_cell, &by_range}) feed(*cache, 0, 1, 0, 40, 0);
  std::vector<std::int64_t> cells;
  for (std::int64_t c = 10; c < 40; ++c) cells.push_back(c);
  for (int layer = kLayers - 1; layer >= 0; --layer) {
    for (auto c = cells.rbegin(); c != cells.rend(); ++c) by_cell.shift_layer(layer, *c, -7);
  }
  by_cell.shift_positions(cells, std::vector<std::int32_t>(cells.size(), -7));
  by_range.shift(0, 10, -1, -7);
  for (std::int64_t c = 0; c < 40; ++c) {
    ASSERT_EQ(by_cell.position(c), by_range.position(c));
    for (int layer = 0; layer < kLayers; ++layer) {
      ASSERT_EQ(copy_of(by_cell.code(layer, true, c)), copy_of(by_range.code(layer, true, c)));
      ASSERT_EQ(copy_of(by_cell.exact(layer, true, c)), copy_of(by_range.exact(layer, true, c)));
    }
  }
}

TEST(KvCache, CopiedCellsHoldTheSameRowsUntilClaimed) {
  KvCache cache(512, {4, 16, 4}, coded_layers());
  for (std::int32_t p = 0; p < 100; ++p) feed(cache, 0, 1, p, 1, p);
  feed(cache, 5, 3, 0, 10, 250);
  cache.copy_cells(0, 200, 128);             // 28 of them empty: what lay there is gone
  EXPECT_EQ(cache.newest(5), std::nullopt);  // its cells 250..259 were replaced by copies of 50..59
  std::vector<std::int64_t> cells;
  for (std::int32_t p = 0; p < 100; ++p) {
    expect_cell_holds(cache, 200 + p, 1, p);
    EXPECT_EQ(cache.has_exact(200 + p), cache.has_exact(p));
    cells.push_back(200 + p);
  }
  for (std::int64_t c = 300; c < 328; ++c) EXPECT_EQ(cache.position(c), -1);
  feed(cache, 0, 1, 100, 1, 100, false);
  for (std::int32_t p = 84; p < 100; ++p) EXPECT_TRUE(cache.has_exact(200 + p));  // nobody has claimed them
  cache.set_members(2, cells);
  EXPECT_EQ(cache.newest(2), 99);
  for (std::int32_t p = 100; p < 160; ++p) feed(cache, 2, 1, p, 1, 300 + p);
  for (std::int32_t p = 84; p < 100; ++p) EXPECT_FALSE(cache.has_exact(200 + p));
  EXPECT_NE(refusal([&] { cache.copy_cells(0, 5, 10); }), "");
  EXPECT_NE(refusal([&] { cache.copy_cells(500, 0, 13); }), "");
}

TEST(KvCache, ClearReturnsTheMemory) {
  KvCache cache(20000, {4, 16, 4}, coded_layers());
  const std::size_t idle = cache.memory().resident_bytes;
  for (std::int32_t p = 0; p < 20000; p += 500) feed(cache, 0, 1, p, 500, p);
  const MemoryUsage full = cache.memory();
  std::size_t row_bytes = 0;
  for (const LayerSpec& layer : cache.layers()) row_bytes += layer.k->row_bytes() + layer.v->row_bytes();
  EXPECT_EQ(full.code_bytes, 20000 * row_bytes);
  const std::size_t pages = 4096 * 2 * 2 * kLayers;  // at most one started page per region
  EXPECT_GE(full.resident_bytes, full.code_bytes + full.exact_bytes);
  EXPECT_LE(full.resident_bytes, full.code_bytes + full.peak_exact_bytes + pages);
  cache.clear();
  EXPECT_EQ(cache.memory().resident_bytes, idle);
  EXPECT_EQ(idle, 0U);
  EXPECT_EQ(cache.memory().code_bytes, 0U);
  EXPECT_EQ(cache.position(10), -1);
  feed(cache, 0, 2, 0, 50, 0);
  for (std::int32_t p = 0; p < 50; ++p) expect_cell_holds(cache, p, 2, p);
}

// The exact pool's memory follows the slots in use, not their peak.
TEST(KvCache, APrefillsExactRowsAreGivenBack) {
  KvCache cache(8192, {4, 16, 4}, coded_layers());
  feed(cache, 0, 1, 0, 4096, 0);
  const std::size_t after_prefill = cache.memory().resident_bytes;
  EXPECT_GT(after_prefill, 4096 * kExactCellBytes);
  for (std::int32_t p = 4096; p < 4200; ++p) feed(cache, 0, 1, p, 1, p);
  const MemoryUsage m = cache.memory();
  EXPECT_LE(m.resident_bytes, m.code_bytes + m.exact_bytes + 2 * 4096 * 2 * 2 * kLayers);
}

// Rows that stay may sit behind thousands that were only passing through.
TEST(KvCache, HolesInTheExactPoolAreGivenBack) {
  KvCache cache(8192, {4, 600, 4}, coded_layers());
  feed(cache, 0, 1, 0, 4096, 0);
  for (std::int32_t p = 4096; p < 4096 + 32; ++p) feed(cache, 0, 1, p, 1, p);
  const MemoryUsage m = cache.memory();
  EXPECT_LE(m.resident_bytes, m.code_bytes + m.exact_bytes + 4 * 4096 * 2 * 2 * kLayers);
  for (std::int32_t p = 3600; p < 4096 + 32; ++p) expect_cell_holds(cache, p, 1, p);
}

// D15: byte offsets of codes beyond 2^31 and 2^32, against the codec itself. Only the touched pages exist.
TEST(KvCache, D15_LargePoolsUse64BitOffsets) {
  Int2Config config;
  config.n_head_kv = 16;
  config.head_dim = 1024;
  const std::shared_ptr<const Codec> codec = make_int2_codec(config);
  const std::size_t row_bytes = codec->row_bytes();
  const auto n_cells = static_cast<std::int64_t>((std::size_t{1} << 32) / row_bytes) + 1000;
  KvCache cache(n_cells, {0, 1, 0}, {{0, 16, 1024, 1024, codec, codec, Rope()}});
  const auto beyond = [&](int bits) { return static_cast<std::int64_t>((std::size_t{1} << bits) / row_bytes) + 1; };
  const std::vector<std::int64_t> cells = {0, 1, beyond(31), beyond(31) + 1, beyond(32), n_cells - 1};
  for (std::size_t i = 0; i < cells.size(); ++i) {
    cache.place(std::span(cells).subspan(i, 1), std::vector<std::int32_t>{static_cast<std::int32_t>(i)}, std::vector<SeqId>{0});
    cache.write_k(0, cells[i], gaussian(16384, i));
    cache.write_v(0, cells[i], gaussian(16384, 100 + i));
  }
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const auto position = static_cast<std::int32_t>(i);
    EXPECT_EQ(copy_of(cache.code(0, true, cells[i])), expected_code(*codec, gaussian(16384, i), position)) << cells[i];
    EXPECT_EQ(copy_of(cache.code(0, false, cells[i])), expected_code(*codec, gaussian(16384, 100 + i), position)) << cells[i];
  }
  EXPECT_LT(cache.memory().resident_bytes, std::size_t{1} << 20);
}

TEST(KvCache, C4_NaNRowsAreSanitisedAndNeighboursUntouched) {
  KvCache cache(8, {4, 16, 4}, coded_layers());
  feed(cache, 0, 1, 0, 3, 0);
  std::vector<float> row = text_row(0, true, 1, 1);
  row[7] = NAN;
  cache.write_k(0, 1, row);
  EXPECT_EQ(cache.counters().k.sanitised, 1U);
  EXPECT_EQ(cache.counters().v.sanitised, 0U);
  EXPECT_EQ(cache.counters().k.rows, 3U * kLayers + 1);
  std::vector<float> out(kValues);
  for (const bool exact : {true, false}) {
    cache.read_row(0, true, 1, exact, out);
    for (const float x : out) EXPECT_TRUE(std::isfinite(x));
  }
  expect_cell_holds(cache, 0, 1, 0);
  expect_cell_holds(cache, 2, 1, 2);
}

TEST(KvCache, BadRequestsAreRefusedByName) {
  using testing::HasSubstr;
  const auto layers = [](const std::function<void(LayerSpec&)>& change) {
    std::vector<LayerSpec> specs = coded_layers();
    change(specs[1]);
    return specs;
  };
  const auto build = [](std::vector<LayerSpec> specs, std::int64_t n = 8, Windows w = {}) {
    return refusal([&] { KvCache cache(n, w, std::move(specs)); });
  };
  EXPECT_THAT(build(coded_layers(), 0), HasSubstr("a cache of 0 cells"));
  EXPECT_THAT(build(coded_layers(), std::int64_t{1} << 40), HasSubstr("cells is not possible"));
  EXPECT_THAT(build({}), HasSubstr("at least one layer"));
  EXPECT_THAT(build(coded_layers(), 8, {-1, 2, 3}), HasSubstr("none may be negative"));
  EXPECT_THAT(build(layers([](LayerSpec& s) { s.v = nullptr; })), HasSubstr("layer 3: either K and V of all layers"));
  EXPECT_THAT(build(layers([](LayerSpec& s) { s.n_head_kv = 3; })), HasSubstr("layer 3: the K codec is for 2 KV heads of 36"));
  EXPECT_THAT(build(layers([](LayerSpec& s) { s.v_dim = 40; })), HasSubstr("layer 3: the V codec"));
  std::vector<LayerSpec> tiny = exact_layers();
  tiny[0].n_head_kv = 1;
  EXPECT_THAT(build(tiny), HasSubstr("a K row has 36 values"));
  Int2Config wasteful;  // 5 bytes per 4 values and a header just fit in 2 bytes per value
  wasteful.n_head_kv = 1;
  wasteful.head_dim = 64;
  wasteful.group_size = 4;
  const std::shared_ptr<const Codec> codec = make_int2_codec(wasteful);
  EXPECT_EQ(build({{0, 1, 64, 64, codec, codec, Rope()}}), "");
  wasteful.n_head_kv = 2;
  wasteful.head_dim = 32;
  const std::shared_ptr<const Codec> other = make_int2_codec(wasteful);
  EXPECT_EQ(build({{0, 2, 32, 32, other, other, Rope()}}), "");

  KvCache cache(8, {}, coded_layers());
  const std::vector<float> row(kValues);
  std::vector<float> out(kValues);
  EXPECT_THAT(refusal([&] { cache.write_k(0, 3, row); }), HasSubstr("cell 3 was written before it was placed"));
  feed(cache, 0, 1, 0, 4, 0);
  EXPECT_THAT(refusal([&] { cache.write_k(0, 8, row); }), HasSubstr("cell 8 is outside the cache of 8 cells"));
  EXPECT_THAT(refusal([&] { cache.write_k(2, 0, row); }), HasSubstr("layer index 2"));
  EXPECT_THAT(refusal([&] { cache.write_v(0, 0, std::span(row).first(5)); }), HasSubstr("a row of 5 values"));
  EXPECT_THAT(refusal([&] { cache.read_row(0, true, 7, true, out); }), HasSubstr("no exact row"));
  EXPECT_THAT(refusal([&] { cache.read_row(0, true, 7, false, out); }), HasSubstr("no code"));
  EXPECT_THAT(refusal([&] { feed(cache, 0, 1, 7, 2, 7, false); }), HasSubstr("cell 8 is outside"));
  EXPECT_EQ(cache.position(7), -1);  // nothing of a refused batch is placed
  EXPECT_THAT(refusal([&] { feed(cache, -1, 1, 4, 1, 4, false); }), HasSubstr("sequence -1"));
  EXPECT_THAT(refusal([&] { feed(cache, 0, 1, -3, 1, 4, false); }), HasSubstr("position -3"));
  EXPECT_THAT(refusal([&] { feed(cache, 0, 1, kMaxPosition, 2, 4, false); }), HasSubstr("position 268435456"));
  EXPECT_THAT(refusal([&] { cache.place_cell(0, 0); }), HasSubstr("outside an epoch"));
  EXPECT_THAT(refusal([&] { cache.end_epoch(); }), HasSubstr("had not begun"));
  EXPECT_THAT(refusal([&] { cache.set_members(0, std::vector<std::int64_t>{2, 1}); }), HasSubstr("not ascending"));
  EXPECT_EQ(cache.newest(0), 3);
}

// Random operations against a plain model: who holds what, which rows are there, and what the windows need.
TEST(KvCache, RandomLivesAgreeWithAPlainModel) {
  struct Cell {
    std::int32_t position = -1;
    std::uint64_t text = 0;
    std::set<SeqId> seqs;
  };
  const Windows w{3, 8, 5};
  const std::int64_t n_cells = 160;
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    std::mt19937_64 rng(seed);
    KvCache cache(n_cells, w, coded_layers());
    std::vector<Cell> model(n_cells);
    const auto newest = [&](SeqId s) {
      std::int32_t p = -1;
      for (const Cell& c : model) p = c.seqs.count(s) != 0 ? std::max(p, c.position) : p;
      return p;
    };
    const auto drop_orphans = [&] {
      for (Cell& c : model) {
        if (c.seqs.empty()) c = Cell();
      }
    };
    for (int step = 0; step < 150; ++step) {
      const auto s = static_cast<SeqId>(rng() % 4);
      const auto t = static_cast<SeqId>(rng() % 4);
      const std::int32_t end = newest(s) + 1;
      switch (rng() % 8) {
        case 0:
          cache.truncate(s, end - static_cast<std::int32_t>(rng() % 6));
          for (Cell& c : model) {
            if (cache.newest(s).value_or(-1) < c.position) c.seqs.erase(s);
          }
          drop_orphans();
          break;
        case 1: {
          const auto p0 = static_cast<std::int32_t>(rng() % 40);
          const std::int32_t p1 = p0 + static_cast<std::int32_t>(rng() % 20);
          cache.seq_rm(s, p0, p1);
          for (Cell& c : model) {
            if (c.position >= p0 && c.position < p1) c.seqs.erase(s);
          }
          drop_orphans();
          break;
        }
        case 2:
          if (rng() % 3 == 0 && newest(t) < 0) {
            cache.seq_cp(s, t, 0, -1);
            for (Cell& c : model) {
              if (c.seqs.count(s) != 0) c.seqs.insert(t);
            }
          }
          break;
        case 3:
          if (rng() % 8 == 0) {
            cache.seq_rm(s, 0, -1);
            for (Cell& c : model) c.seqs.erase(s);
            drop_orphans();
          }
          break;
        default: {
          std::vector<std::int64_t> cells;
          for (std::int64_t c = 0; c < n_cells && cells.size() < 1 + rng() % 12; ++c) {
            const auto cell = static_cast<std::int64_t>((static_cast<std::uint64_t>(c) * 37 + seed) % n_cells);
            if (model[static_cast<std::size_t>(cell)].position < 0) cells.push_back(cell);
          }
          if (cells.empty()) break;
          const std::uint64_t text = rng() % 1000;
          feed(cache, s, text, cells, end);
          for (std::size_t i = 0; i < cells.size(); ++i) {
            model[static_cast<std::size_t>(cells[i])] = {end + static_cast<std::int32_t>(i), text, {s}};
          }
        }
      }
      for (SeqId q = 0; q < 4; ++q) ASSERT_EQ(cache.newest(q).value_or(-1), newest(q)) << "seed " << seed << " step " << step;
      for (std::size_t c = 0; c < model.size(); ++c) {
        ASSERT_EQ(cache.position(static_cast<std::int64_t>(c)), model[c].position) << "seed " << seed << " step " << step;
        if (model[c].position < 0) {
          ASSERT_FALSE(cache.has_exact(static_cast<std::int64_t>(c)));
        }
      }
    }
    std::size_t held = 0;
    for (std::size_t c = 0; c < model.size(); ++c) {
      if (model[c].position < 0) continue;
      expect_cell_holds(cache, static_cast<std::int64_t>(c), model[c].text, model[c].position);
      ++held;
    }
    EXPECT_GT(held, 0U);
    EXPECT_EQ(cache.memory().exact_bytes, slots_in_use(cache) * kExactCellBytes);
  }
}

}  // namespace
}  // namespace oscar
