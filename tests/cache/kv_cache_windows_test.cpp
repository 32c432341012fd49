// Which rows are at 16 bit, for every length, chunking and mix of sequences.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "cache/test_cache.h"

namespace oscar {
namespace {

using namespace test;

// Every query of a batch must find every exact row it asks for; cell = position + offset.
void expect_windows_complete(const KvCache& cache, std::int32_t first_query, std::int32_t end, std::int64_t offset = 0) {
  const Windows& w = cache.windows();
  for (std::int32_t q = first_query; q < end; ++q) {
    for (std::int32_t r = 0; r <= q; ++r) {
      if (w.exact(r, q)) {
        ASSERT_TRUE(cache.has_exact(r + offset))
            << "row " << r << " for query " << q << " of batch " << first_query << ".." << end;
      }
      ASSERT_TRUE(cache.has_code(r + offset));
    }
  }
}

class WindowChunks : public testing::TestWithParam<std::int32_t> {};

TEST_P(WindowChunks, D2_EveryQueryOfEveryLengthFindsItsWindow) {
  const std::int32_t chunk = GetParam();
  for (const Windows w : {Windows{}, Windows{8, 32, 8}, Windows{0, 1, 0}, Windows{4, 16, 0}}) {
    KvCache cache(700, w, coded_layers());
    std::size_t most = 0;
    for (std::int32_t p = 0; p < 700; p += chunk) {
      const std::int32_t n = std::min(chunk, 700 - p);
      feed(cache, 0, 1, p, n, p, false);
      expect_windows_complete(cache, p, p + n);
      ASSERT_EQ(cache.newest(0), p + n - 1);
      most = std::max(most, slots_in_use(cache));
    }
    EXPECT_LE(most, static_cast<std::size_t>(w.sink + w.recent + w.rollback + chunk));
    EXPECT_EQ(cache.memory().exact_bytes, slots_in_use(cache) * kExactCellBytes);
  }
}
INSTANTIATE_TEST_SUITE_P(Chunks, WindowChunks, testing::Values(1, 7, 64, 512, 700));

TEST(Windows, D2_AllExactUntilSinkPlusRecentThenOnlyTheMiddleIsCoded) {
  const Windows w{64, 256, 0};
  for (const std::int32_t n : {1, 63, 64, 65, 319, 320, 321, 322, 400}) {
    KvCache cache(512, w, coded_layers());
    for (std::int32_t p = 0; p < n; ++p) feed(cache, 0, 1, p, 1, p, false);
    std::int32_t coded_only = 0;
    for (std::int32_t r = 0; r < n; ++r) {
      const bool read_exact = w.exact(r, n - 1);
      EXPECT_EQ(read_exact, n <= 320 || r < 64 || r >= n - 256) << "row " << r << " of " << n;
      coded_only += read_exact ? 0 : 1;
    }
    EXPECT_EQ(coded_only, std::max(0, n - 320));
  }
}

TEST(Windows, D1_FiveThousandSingleSteps) {
  const Windows w{64, 128, 64};
  KvCache cache(8192, w, coded_layers());
  feed(cache, 0, 1, 0, 1, 0, false);
  for (std::int32_t p = 1; p <= 5000; ++p) {
    feed(cache, 0, 1, p, 1, p, false);
    ASSERT_LE(cache.memory().exact_bytes / kExactCellBytes, 64U + 128U + 64U + 1U);
  }
  int exact = 0;
  for (std::int32_t r = 64; r <= 5000; ++r) {
    exact += w.exact(r, 5000) ? 1 : 0;
    ASSERT_TRUE(!w.exact(r, 5000) || cache.has_exact(r));
  }
  EXPECT_EQ(exact, 128);
  // Slots are freed after a batch has got its own: at the peak, two batches stand beside the windows.
  EXPECT_EQ(cache.memory().peak_exact_bytes, (64U + 128U + 64U + 1U + 1U) * kExactCellBytes);
}

// D4: the same text in chunks of 1, 7, 64 and all, alone and among others: every byte of both tiers is the same.
TEST(Windows, D4_CodesAreBitIdenticalForEveryChunking) {
  const std::int32_t n = 200;
  for (const std::int32_t chunk : {1, 7, 64, n}) {
    KvCache cache(256, {8, 32, 8}, coded_layers());
    for (std::int32_t p = 0; p < n; p += chunk) feed(cache, 0, 9, p, std::min(chunk, n - p), p);
    for (std::int32_t p = 0; p < n; ++p) expect_cell_holds(cache, p, 9, p);
  }
}

TEST(Windows, D4_CodesAreBitIdenticalInAnyBatchMix) {
  std::mt19937 rng(3);
  const Windows w{4, 16, 4};
  KvCache cache(512, w, coded_layers());
  std::vector<std::int64_t> free_cells(512);
  std::iota(free_cells.begin(), free_cells.end(), 0);
  std::shuffle(free_cells.begin(), free_cells.end(), rng);
  std::map<SeqId, std::vector<std::int64_t>> cells_of;
  while (free_cells.size() > 40) {
    std::vector<std::int64_t> cells;
    std::vector<std::int32_t> positions;
    std::vector<SeqId> seqs;
    for (SeqId s = 0; s < 4; ++s) {
      for (auto n = rng() % 9; n > 0; --n) {  // different lengths, tokens of the sequences one after another
        cells.push_back(free_cells.back());
        positions.push_back(static_cast<std::int32_t>(cells_of[s].size()));
        seqs.push_back(s);
        cells_of[s].push_back(free_cells.back());
        free_cells.pop_back();
      }
    }
    cache.place(cells, positions, seqs);
    for (std::size_t i = 0; i < cells.size(); ++i) {
      write_rows(cache, std::span(cells).subspan(i, 1), std::span(positions).subspan(i, 1),
                 static_cast<std::uint64_t>(seqs[i]));
      for (std::int32_t r = 0; r <= positions[i]; ++r) {
        if (w.exact(r, positions[i])) {
          ASSERT_TRUE(cache.has_exact(cells_of[seqs[i]][static_cast<std::size_t>(r)]));
        }
      }
    }
  }
  for (const auto& [seq, cells] : cells_of) {
    ASSERT_GT(cells.size(), 60U);
    for (std::size_t p = 0; p < cells.size(); ++p) {
      expect_cell_holds(cache, cells[p], static_cast<std::uint64_t>(seq), static_cast<std::int32_t>(p));
    }
  }
}

TEST(Windows, RollbackWithinTheReserveLooksAsIfItNeverHappened) {
  const Windows w{8, 32, 16};
  KvCache rolled(256, w, coded_layers());
  KvCache straight(256, w, coded_layers());
  feed(straight, 0, 1, 0, 100, 0);
  feed(rolled, 0, 1, 0, 100, 0);
  for (int round = 0; round < 20; ++round) {  // drafts of 16 tokens, all rejected
    feed(rolled, 0, 77, 100, 16, 100 + (round % 2) * 16);
    rolled.truncate(0, 100);
    EXPECT_EQ(rolled.newest(0), 99);
  }
  for (std::int32_t p = 100; p < 140; ++p) {
    feed(straight, 0, 1, p, 1, p);
    feed(rolled, 0, 1, p, 1, p);
    expect_windows_complete(rolled, p, p + 1);
  }
  std::vector<float> a(kValues);
  std::vector<float> b(kValues);
  for (std::int32_t r = 0; r < 140; ++r) {
    for (const bool is_k : {true, false}) {
      straight.read_row(1, is_k, r, w.exact(r, 139), a);
      rolled.read_row(1, is_k, r, w.exact(r, 139), b);
      ASSERT_EQ(a, b) << r;
    }
  }
}

TEST(Windows, RollbackBeyondTheReserveLeavesOnlyCodes) {
  const Windows w{4, 16, 8};
  KvCache cache(256, w, coded_layers());
  for (std::int32_t p = 0; p < 200; ++p) feed(cache, 0, 1, p, 1, p);
  cache.truncate(0, 100);
  feed(cache, 0, 1, 100, 1, 100);
  std::uint64_t misses = 0;
  for (std::int32_t r = 0; r <= 100; ++r) misses += w.exact(r, 100) && !cache.has_exact(r) ? 1U : 0U;
  EXPECT_EQ(misses, 15U);  // all of the recent window but the query's own row
  cache.count_window_misses(misses);
  EXPECT_EQ(cache.counters().window_misses, 15U);
  for (std::int32_t r = 0; r <= 100; ++r) expect_cell_holds(cache, r, 1, r);
}

TEST(Windows, TwoSequencesOfDifferentLengthKeepTheirOwnWindows) {
  const Windows w{4, 16, 4};
  KvCache cache(1024, w, coded_layers());
  feed(cache, 0, 1, 0, 500, 0, false);
  feed(cache, 1, 2, 0, 30, 500, false);
  for (std::int32_t i = 0; i < 50; ++i) {  // one token of each per batch
    const std::vector<std::int64_t> cells = {600 + 2 * i, 601 + 2 * i};
    const std::vector<std::int32_t> positions = {500 + i, 30 + i};
    cache.place(cells, positions, std::vector<SeqId>{0, 1});
    for (std::int32_t r = std::max(0, 30 + i - 15); r < 30; ++r) ASSERT_TRUE(cache.has_exact(500 + r));
    for (std::int32_t r = 500 + i - 15; r < 500; ++r) ASSERT_TRUE(cache.has_exact(r));
    for (std::int64_t r = 0; r < 4; ++r) ASSERT_TRUE(cache.has_exact(r) && cache.has_exact(500 + r));
  }
  EXPECT_LE(slots_in_use(cache), 2U * (4 + 16 + 4 + 1));
}

TEST(Windows, SharedPrefixKeepsWhatTheShorterSequenceNeeds) {
  const Windows w{4, 16, 4};
  KvCache cache(1024, w, coded_layers());
  feed(cache, 0, 1, 0, 100, 0, false);
  cache.seq_cp(0, 1, 0, -1);
  for (std::int32_t p = 100; p < 400; ++p) feed(cache, 0, 1, p, 1, p, false);
  for (std::int32_t r = 100 - 16; r < 100; ++r) EXPECT_TRUE(cache.has_exact(r)) << r;  // sequence 1 still stands at 99
  cache.seq_rm(1, 0, -1);
  feed(cache, 0, 1, 400, 1, 400, false);
  for (std::int32_t r = 100 - 16; r < 100; ++r) EXPECT_FALSE(cache.has_exact(r)) << r;
  EXPECT_EQ(cache.newest(1), std::nullopt);
  EXPECT_EQ(cache.position(99), 99);
}

TEST(Windows, ExactModeKeepsEveryRow) {
  KvCache cache(1024, {4, 16, 4}, exact_layers());
  EXPECT_FALSE(cache.coded());
  for (std::int32_t p = 0; p < 1000; p += 100) feed(cache, 0, 1, p, 100, p);
  EXPECT_EQ(slots_in_use(cache), 1000U);
  EXPECT_EQ(cache.memory().code_bytes, 0U);
  for (std::int32_t p = 0; p < 1000; ++p) expect_cell_holds(cache, p, 1, p);
}

// A host that sees only masks declares members instead of naming sequences; the outcome is the same.
TEST(Windows, DeclaredMembersAndNamedSequencesAgree) {
  const Windows w{4, 16, 4};
  for (const bool declare_first : {false, true}) {
    KvCache named(512, w, coded_layers());
    KvCache masked(512, w, coded_layers());
    std::int32_t p = 0;
    for (const std::int32_t n : {30, 1, 1, 50, 7, 1, 1, 1, 100, 1, 1}) {
      feed(named, 0, 1, p, n, p, false);
      std::vector<std::int64_t> all(static_cast<std::size_t>(p + n));
      std::iota(all.begin(), all.end(), 0);
      masked.begin_epoch();
      if (declare_first) masked.set_members(0, all);
      for (std::int32_t i = p; i < p + n; ++i) masked.place_cell(i, i);
      if (!declare_first) masked.set_members(0, all);
      masked.end_epoch();
      p += n;
      ASSERT_EQ(masked.newest(0), p - 1);
      for (std::int32_t r = 0; r < p; ++r) ASSERT_EQ(masked.has_exact(r), named.has_exact(r)) << "row " << r << " of " << p;
    }
  }
}

TEST(Windows, CellsThatNoSequenceHoldsLoseTheirExactRowButNotTheirCode) {
  KvCache cache(64, {4, 16, 4}, coded_layers());
  feed(cache, 0, 1, 0, 10, 0);
  cache.begin_epoch();
  const std::vector<std::int64_t> half = {0, 1, 2, 3, 4};
  cache.set_members(0, half);
  cache.end_epoch();
  for (std::int64_t c = 0; c < 10; ++c) {
    EXPECT_EQ(cache.has_exact(c), c < 5);
    expect_cell_holds(cache, c, 1, static_cast<std::int32_t>(c));
  }
}

TEST(Windows, ManyShortSequencesDoNotLeak) {
  KvCache cache(256, {4, 16, 4}, coded_layers());
  std::size_t bookkeeping = 0;
  for (SeqId s = 0; s < 3000; ++s) {
    feed(cache, s, 1, 0, 20, (s % 10) * 20, false);  // replaces what sequence s - 10 had
    if (s >= 10) {
      EXPECT_EQ(cache.newest(s - 10), std::nullopt);
    }
    if (s == 100) bookkeeping = cache.memory().bookkeeping_bytes;
  }
  EXPECT_LE(cache.memory().bookkeeping_bytes, bookkeeping + 1024);
  EXPECT_LE(slots_in_use(cache), 200U);
}

}  // namespace
}  // namespace oscar
