#include "oscar/paged/page_format.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <set>
#include <tuple>
#include <vector>

namespace oscar::paged {
namespace {

// Every 2-bit field of a head's keys belongs to exactly one (token, slot), and none is left over.
TEST(PageFormat, KeyDigitsFillTheirBytesOnce) {
  for (const int slots : {16, 32, 48, 128, 240}) {
    std::set<std::tuple<std::uint32_t, int>> places;
    for (int token = 0; token < kPageTokens; ++token) {
      for (int s = 0; s < slots; ++s) {
        const DigitPlace place = key_digit(slots, token, s);
        ASSERT_LT(place.byte, key_bytes(slots));
        ASSERT_TRUE(place.shift >= 0 && place.shift <= 6 && place.shift % 2 == 0);
        ASSERT_TRUE(places.insert({place.byte, place.shift}).second) << "token " << token << " slot " << s;
      }
    }
    EXPECT_EQ(places.size(), 4 * key_bytes(slots));
  }
}

TEST(PageFormat, ValueDigitsFillTheirBytesOnce) {
  for (const int dim : {64, 128, 256}) {
    std::set<std::tuple<std::uint32_t, int>> places;
    for (int token = 0; token < kPageTokens; ++token) {
      for (int d = 0; d < dim; ++d) {
        const DigitPlace place = value_digit(dim, token, d);
        ASSERT_LT(place.byte, value_bytes(dim));
        ASSERT_TRUE(places.insert({place.byte, place.shift}).second) << "token " << token << " dim " << d;
      }
    }
    EXPECT_EQ(places.size(), 4 * value_bytes(dim));
  }
}

// What a kernel does: the four registers of an m16n8k16 A fragment are one AND each, their halves the digit times 4^e.
// Register i of lane (g, t) holds rows g + 8 (i mod 2), columns 2t + 8 (i / 2) and the next.
TEST(PageFormat, OneAndGivesTheOperandsOfATensorCore) {
  constexpr std::uint32_t kMask[4] = {0x00030003, 0x00300030, 0x000C000C, 0x00C000C0};
  constexpr unsigned kField[4] = {0, 2, 1, 3};
  const int slots = 80;
  std::vector<std::uint8_t> keys(key_bytes(slots));
  std::mt19937 rng(3);
  for (std::uint8_t& b : keys) b = static_cast<std::uint8_t>(rng());
  for (int step = 0; step < slots / 16; ++step) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int group = 0; group < 4; ++group) {
        const int at = (step < 4 ? step / 2 * 512 + lane * 16 + step % 2 * 8 : step * 256 + lane * 8) + group / 2 * 4;
        std::uint32_t word = 0;
        std::memcpy(&word, keys.data() + at, 4);
        if (group % 2 == 1) word >>= 8;
        for (int i = 0; i < 4; ++i) {
          for (int half = 0; half < 2; ++half) {
            const int token = token_of(group, lane / 4 + i % 2 * 8);
            const int slot = 16 * step + lane % 4 * 2 + i / 2 * 8 + half;
            const DigitPlace place = key_digit(slots, token, slot);
            const unsigned digit = (static_cast<unsigned>(keys[place.byte]) >> place.shift) & 3U;
            EXPECT_EQ(((word & kMask[i]) >> (16 * half)) & 0xFFFFU, digit << (2 * kField[i]));
          }
        }
      }
    }
  }
}

TEST(PageFormat, TokensMirroredAtThePagesMiddleShareARow) {
  for (int x = 0; x < kPageTokens / 2; ++x) EXPECT_EQ(token_row(31 - x), token_row(32 + x));
  for (int token = 0; token < kPageTokens; ++token) EXPECT_EQ(token_of(token / 16, token_row(token)), token);
}

TEST(PageFormat, GainsAndExactValuesHaveTheirOwnPlaces) {
  std::set<std::uint32_t> gains;
  for (int token = 0; token < kPageTokens; ++token) gains.insert(gain_byte(token));
  EXPECT_EQ(gains.size(), 64U);
  EXPECT_EQ(*gains.rbegin(), 63U);
  std::set<std::uint32_t> values;
  for (int row = 0; row < kBlockTokens; ++row) {
    for (int d = 0; d < 64; ++d) values.insert(exact_index(64, row, d));
  }
  EXPECT_EQ(values.size(), 16U * 64U);
  EXPECT_EQ(*values.rbegin(), 16U * 64U - 1);
}

// Where the format says that digits stand: spelled out once by hand, so that a change of the layout does not pass unseen.
TEST(PageFormat, SomePlacesByHand) {
  // Token 15 = row 0 of group 0, slot 0: lane 0, k-step 0, word 0, field 0.
  EXPECT_EQ(key_digit(128, 15, 0).byte, 0U);
  EXPECT_EQ(key_digit(128, 15, 0).shift, 0);
  // Token 22 = group 1, row 9: lane 4 (9 mod 8) + .., odd byte, fields 2 and 3. Slot 43 = k-step 2, column 11: half-word 1,
  // lane + 1.
  EXPECT_EQ(key_digit(128, 22, 43).byte, 512U + (4 + 1) * 16 + 0 + 0 + 2 + 1);
  EXPECT_EQ(key_digit(128, 22, 43).shift, 6);
  // The last k-step of an odd number has 8 bytes per lane. Token 40 = group 2, row 8.
  EXPECT_EQ(key_digit(48, 40, 34).byte, 2U * 256 + 1 * 8 + 4 + 0 + 0);
  EXPECT_EQ(key_digit(48, 40, 34).shift, 4);
  // Token 51 = k-step 3, column 3: lane 1, half-word 1. Dimension 57 = tile 3, row 9.
  EXPECT_EQ(value_digit(128, 51, 57).byte, 3 * 512U + (4 + 1) * 16 + 4 + 2 + 1);
  EXPECT_EQ(value_digit(128, 51, 57).shift, 4);
  EXPECT_EQ(gain_byte(17), 14U * 4 + 1);
  EXPECT_EQ(exact_index(128, 5, 21), 5U * 128 + (2 ^ 5) * 8 + 5);
}

TEST(Tiers, EveryPositionIsInOneTierAndInAPageOrBlock) {
  for (const int sink : {0, 16, 64}) {
    for (const int recent : {1, 40, 256}) {
      for (const int n : {0, 1, 15, 16, 17, 63, 64, 65, 255, 319, 320, 321, 322, 384, 385, 1000}) {
        const Tiers t = tiers_of(n, sink, recent);
        const int ring = ring_blocks(recent);
        std::set<int> in_blocks;
        std::set<int> columns;
        for (int i = 0; i < t.exact_blocks(); ++i) {
          const int first = t.block_position(i);
          const bool is_sink = i < t.sink_blocks();
          const int low = is_sink ? 0 : std::max(first, t.recent_begin);
          const int high = std::min(first + kBlockTokens, is_sink ? t.sink_end : n);
          ASSERT_LT(low, high);
          for (int p = std::max(first, low); p < high; ++p) ASSERT_TRUE(in_blocks.insert(p).second);
          ASSERT_TRUE(columns.insert(block_column(first, sink, ring)).second) << n;
          ASSERT_LT(block_column(first, sink, ring), sink / kBlockTokens + ring);
        }
        for (int p = 0; p < n; ++p) {
          const bool exact = p < sink || n - 1 - p < recent;
          EXPECT_EQ(in_blocks.count(p), exact ? 1U : 0U) << "n " << n << " position " << p;
          if (exact) continue;
          EXPECT_GE(p / kPageTokens, t.first_page());
          EXPECT_LT(p / kPageTokens, t.first_page() + t.pages());
        }
        if (n <= sink + recent) {
          EXPECT_EQ(t.pages(), 0);
        }
      }
    }
  }
}

// Series are the pages that share a pattern of signs, and the order of places goes through each page once.
TEST(Tiers, PagesInTheOrderOfTheirPatterns) {
  for (const int sink : {0, 64, 128}) {
    for (int n = 0; n < 1500; n += 37) {
      const Tiers t = tiers_of(n, sink, 40);
      std::set<int> pages;
      int before = 0;
      for (int series = 0; series < kPatterns; ++series) {
        for (int i = 0; i < t.series_pages(series); ++i) {
          const int page = t.page_of(before + i);
          ASSERT_EQ(page, series + kPatterns * i);
          ASSERT_EQ((t.first_page() + page) % kPatterns, t.series_pattern(series));
          ASSERT_LT(page, t.pages());
          ASSERT_TRUE(pages.insert(page).second);
        }
        before += t.series_pages(series);
      }
      ASSERT_EQ(static_cast<int>(pages.size()), t.pages()) << n;
    }
  }
}

TEST(Tiers, AWalkGoesThroughItsPartOfTheOrder) {
  for (const int n : {105, 190, 300, 450, 1400}) {
    const Tiers t = tiers_of(n, 0, 40);
    for (int begin = 0; begin < t.pages(); ++begin) {
      for (int end = begin + 1; end <= t.pages(); ++end) {
        int i = begin;
        for (PageWalk walk(t, begin, end); walk.left > 0; walk.next_series(t.pages())) {
          bool more = true;
          for (; more; more = walk.next()) ASSERT_EQ(walk.page, t.page_of(i++)) << n << " " << begin << " " << end;
        }
        ASSERT_EQ(i, end);
      }
    }
  }
}

// Of several queries: each position that any of them reads in a tier is in that tier's range, and the ranges' ends are needed.
TEST(Tiers, OfSeveralQueriesHoldWhatAnyOfThemReads) {
  for (const int queries : {2, 3, 8}) {
    for (const int sink : {0, 16, 64}) {
      for (const int recent : {1, 40, 256}) {
        for (int n = 0; n < 400; ++n) {
          const Tiers t = tiers_of(n, sink, recent, queries);
          std::set<int> exact;
          std::set<int> coded;
          for (int query = 0; query < queries; ++query) {
            const int seen = seen_by(n, query, queries);
            for (int p = 0; p < seen; ++p) (p < sink || seen - 1 - p < recent ? exact : coded).insert(p);
          }
          for (const int p : exact) ASSERT_TRUE(p < t.sink_end || (p >= t.recent_begin && p < n));
          for (const int p : coded) ASSERT_TRUE(p >= t.sink_end && p < t.coded_end);
          if (n >= queries) {
            EXPECT_EQ(static_cast<int>(exact.size()), t.sink_end + n - t.recent_begin) << n;
            EXPECT_EQ(static_cast<int>(coded.size()), t.coded_end - t.sink_end) << n;
          }
          std::set<int> columns;
          const int ring = ring_blocks(recent + queries - 1);
          for (int i = 0; i < t.exact_blocks(); ++i)
            ASSERT_TRUE(columns.insert(block_column(t.block_position(i), sink, ring)).second);
        }
      }
    }
  }
}

}  // namespace
}  // namespace oscar::paged
