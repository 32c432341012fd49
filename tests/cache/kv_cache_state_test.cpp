// Saving and restoring cells through a host's nominal 16-bit rows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <string>

#include "cache/test_cache.h"
#include "oscar/base/error.h"

namespace oscar {
namespace {

using namespace test;
using testing::HasSubstr;

using SavedRow = std::vector<std::uint16_t>;
using SavedState = std::vector<std::vector<SavedRow>>;  // [2 * layer + (is_k ? 0 : 1)][i]

// As llama.cpp does: K of all layers, then V of all layers, each over all cells.
SavedState save(const KvCache& cache, std::span<const std::int64_t> cells) {
  SavedState state(2 * kLayers, std::vector<SavedRow>(cells.size(), SavedRow(kValues)));
  for (const bool is_k : {true, false}) {
    for (int layer = 0; layer < kLayers; ++layer) {
      for (std::size_t i = 0; i < cells.size(); ++i) {
        cache.export_row(layer, is_k, cells[i], state[static_cast<std::size_t>(2 * layer) + (is_k ? 0 : 1)][i]);
      }
    }
  }
  return state;
}

void load(KvCache& cache, const SavedState& state, std::span<const std::int64_t> cells) {
  for (const bool is_k : {true, false}) {
    for (int layer = 0; layer < kLayers; ++layer) {
      for (std::size_t i = 0; i < cells.size(); ++i) {
        cache.import_row(layer, is_k, cells[i], state[static_cast<std::size_t>(2 * layer) + (is_k ? 0 : 1)][i]);
      }
    }
  }
}

std::string refusal(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

std::vector<std::int64_t> range(std::int64_t begin, std::int64_t n) {
  std::vector<std::int64_t> cells(static_cast<std::size_t>(n));
  std::iota(cells.begin(), cells.end(), begin);
  return cells;
}

// 100 tokens, token by token: positions 0..3 and 75.. exact, the rest coded.
std::unique_ptr<KvCache> filled(const std::vector<LayerSpec>& layers = coded_layers()) {
  auto cache = std::make_unique<KvCache>(256, Windows{4, 16, 8}, layers);
  cache->set_state_digest(kDigest);
  for (std::int32_t p = 0; p < 100; ++p) feed(*cache, 0, 1, p, 1, p);
  return cache;
}

TEST(State, D5_RestoreIntoAFragmentedCacheIsBitExactInBothTiers) {
  for (const bool coded : {true, false}) {
    const auto source = filled(coded ? coded_layers() : exact_layers());
    const SavedState state = save(*source, range(0, 100));
    EXPECT_EQ(source->counters().exported_rows, 100U * 2 * kLayers);

    KvCache target(256, {4, 16, 8}, coded ? coded_layers() : exact_layers());
    target.set_state_digest(kDigest);
    feed(target, 9, 5, 0, 60, 100);
    target.seq_rm(9, 10, 40);
    std::vector<std::int64_t> cells;  // the free ones, scattered
    for (std::int64_t c = 255; cells.size() < 100; --c) {
      if (target.position(c) < 0) cells.push_back(c);
    }
    load(target, state, cells);
    EXPECT_EQ(target.counters().imported_rows, 100U * 2 * kLayers);
    std::vector<std::int64_t> sorted = cells;
    std::sort(sorted.begin(), sorted.end());
    target.set_members(3, sorted);
    EXPECT_EQ(target.newest(3), 99);
    for (std::int32_t p = 0; p < 100; ++p) {
      const std::int64_t c = cells[static_cast<std::size_t>(p)];
      ASSERT_EQ(target.has_exact(c), source->has_exact(p)) << p;
      ASSERT_EQ(target.has_code(c), coded);
      expect_cell_holds(target, c, 1, p);
    }
    EXPECT_EQ(save(target, cells), state);
    // Going on is as if nothing had happened.
    for (std::int32_t p = 100; p < 120; ++p) {
      feed(target, 3, 1, p, 1, p - 100);
      feed(*source, 0, 1, p, 1, p);
    }
    for (std::int32_t p = 0; p < 100; ++p)
      ASSERT_EQ(target.has_exact(cells[static_cast<std::size_t>(p)]), source->has_exact(p)) << p;
  }
}

TEST(State, RestoredCellsKeepTheirExactRowsUntilClaimed) {
  const auto source = filled();
  KvCache target(256, {4, 16, 8}, coded_layers());
  target.set_state_digest(kDigest);
  load(target, save(*source, range(0, 100)), range(0, 100));
  for (std::int32_t p = 0; p < 50; ++p) feed(target, 7, 2, p, 1, 150 + p, false);  // other sequences go on meanwhile
  for (std::int64_t c = 0; c < 100; ++c) ASSERT_EQ(target.has_exact(c), source->has_exact(c));
  target.seq_rm(-1, 0, -1);
  EXPECT_EQ(slots_in_use(target), 0U);
}

TEST(State, D12_StateOfAnotherArtifactIsRefused) {
  const auto source = filled();
  const SavedState state = save(*source, range(0, 100));
  KvCache target(256, {4, 16, 8}, coded_layers());
  target.set_state_digest(kDigest + 1);
  feed(target, 0, 2, 0, 50, 100);
  EXPECT_THAT(refusal([&] { load(target, state, range(0, 100)); }),
              HasSubstr("made with calibration artifact 0123456789abcdef"));
  for (std::int32_t p = 0; p < 50; ++p) expect_cell_holds(target, 100 + p, 2, p);  // what was there is as it was
  KvCache exact(256, {4, 16, 8}, exact_layers());
  EXPECT_THAT(refusal([&] { load(exact, state, range(0, 100)); }), HasSubstr("exact mode"));
}

TEST(State, D12_DamagedRowsAreRefusedAndTheCellIsEmpty) {
  const auto source = filled();
  std::mt19937 rng(5);
  for (const std::int64_t cell : {std::int64_t{1}, std::int64_t{50}}) {  // exact; coded
    const std::vector<std::int64_t> cells = {cell};
    const SavedState state = save(*source, cells);
    for (std::size_t store = 0; store < state.size(); ++store) {
      for (int round = 0; round < 100; ++round) {
        SavedState damaged = state;
        const std::size_t bit = rng() % (16 * kValues);
        damaged[store][0][bit / 16] = static_cast<std::uint16_t>(damaged[store][0][bit / 16] ^ (1U << (bit % 16)));
        KvCache target(8, {4, 16, 8}, coded_layers());
        target.set_state_digest(kDigest);
        ASSERT_THAT(refusal([&] { load(target, damaged, range(2, 1)); }),
                    testing::AnyOf(HasSubstr("damaged"), HasSubstr("version")))
            << "cell " << cell << " bit " << bit;
        ASSERT_THAT(refusal([&] {
                      if (target.position(2) >= 0 || target.has_exact(2)) target.set_members(0, range(2, 1));
                      if (target.position(2) >= 0) fail("a damaged cell is in use");
                    }),
                    testing::Not(HasSubstr("in use")));
      }
    }
  }
}

TEST(State, RowsOfDifferentCellsDoNotMix) {
  const auto source = filled();
  SavedState state = save(*source, range(0, 100));
  std::swap(state[1][50], state[1][51]);  // V of layer 0
  KvCache target(256, {4, 16, 8}, coded_layers());
  target.set_state_digest(kDigest);
  EXPECT_THAT(refusal([&] { load(target, state, range(0, 100)); }), HasSubstr("disagree about their position"));
  EXPECT_EQ(target.position(50), -1);
}

TEST(State, A7_ATruncatedStateIsNoticedWhenTheCellsAreClaimed) {
  const auto source = filled();
  const SavedState state = save(*source, range(0, 10));
  KvCache target(256, {4, 16, 8}, coded_layers());
  target.set_state_digest(kDigest);
  for (std::size_t i = 0; i < 10; ++i) target.import_row(0, true, static_cast<std::int64_t>(i), state[0][i]);
  EXPECT_THAT(refusal([&] { target.set_members(0, range(0, 10)); }), HasSubstr("restored only partly: 3 of its 4 rows"));
  EXPECT_EQ(target.newest(0), std::nullopt);
}

TEST(State, RowsOfAStockProgramStayExactForEver) {
  std::mt19937 rng(6);
  SavedState state(2 * kLayers, std::vector<SavedRow>(20, SavedRow(kValues)));
  for (auto& rows : state) {
    for (auto& row : rows) {
      for (auto& h : row) h = static_cast<std::uint16_t>(0x3000U | (rng() & 0x8FFFU));
    }
  }
  KvCache cache(256, {4, 16, 8}, coded_layers());
  load(cache, state, range(30, 20));
  cache.set_members(0, range(30, 20));
  for (std::int32_t p = 20; p < 120; ++p) feed(cache, 0, 1, p, 1, p + 40);
  for (std::int64_t c = 30; c < 50; ++c) {
    EXPECT_EQ(cache.position(c), -1);
    EXPECT_TRUE(cache.has_exact(c));
    EXPECT_FALSE(cache.has_code(c));
  }
  EXPECT_EQ(save(cache, range(30, 20)), state);  // to the last bit
  EXPECT_EQ(cache.newest(0), 119);
  cache.seq_rm(0, 0, -1);
  EXPECT_FALSE(cache.has_exact(30));
}

TEST(State, StockRowsWithNaNAreSanitisedAndCounted) {
  SavedRow row(kValues, 0x3C00);
  row[30] = 0x7E00;
  KvCache cache(8, {4, 16, 8}, coded_layers());
  cache.import_row(0, false, 0, row);
  EXPECT_EQ(cache.counters().v.sanitised, 1U);
  EXPECT_EQ(cache.exact(0, false, 0)[30], 0);
  row[1] = 0x7C00;
  EXPECT_THAT(refusal([&] { cache.import_row(0, false, 1, row); }), HasSubstr("begins with NaN or Inf"));
}

TEST(State, AStockProgramReadsExactRowsWithinOneUnitInTheLastPlace) {
  const auto source = filled();
  SavedRow row(kValues);
  source->export_row(0, true, 99, row);
  const std::vector<std::uint16_t> stored = copy_of(source->exact(0, true, 99));
  for (std::size_t i = 0; i < kValues; ++i) EXPECT_LE(row[i] ^ stored[i], i < kMarkedValues ? 1 : 0);
}

TEST(State, ASecondLoadReplacesTheFirst) {
  const auto source = filled();
  const SavedState state = save(*source, range(0, 100));
  KvCache target(256, {4, 16, 8}, coded_layers());
  target.set_state_digest(kDigest);
  for (int round = 0; round < 3; ++round) {
    load(target, state, range(40, 100));
    target.set_members(0, range(40, 100));
    for (std::int32_t p = 0; p < 100; ++p) expect_cell_holds(target, 40 + p, 1, p);
    EXPECT_EQ(slots_in_use(target), slots_in_use(*source));
  }
  EXPECT_EQ(target.newest(0), 99);
}

TEST(State, EmptyCellsAreSavedAsZeros) {
  KvCache cache(8, {4, 16, 8}, coded_layers());
  SavedRow row(kValues, 0xFFFF);
  cache.export_row(1, false, 3, row);
  EXPECT_EQ(row, SavedRow(kValues, 0));
  EXPECT_THAT(refusal([&] { cache.export_row(1, false, 3, std::span(row).first(10)); }), HasSubstr("10 values"));
}

}  // namespace
}  // namespace oscar
