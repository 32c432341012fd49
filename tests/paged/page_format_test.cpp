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

// What a kernel does: one AND of a lane's word is a register of four bytes, the digits times 4^e, of an A fragment of field e.
// Register i of lane 4 g + c holds row g + 8 (i mod 2), columns 16 (i / 2) + 4 c and the next three: of m16n8k32 four
// registers, of m16n8k16 the first two. at: of the lane's registers; place(row, column): of the fragment's digit.
template <class Place>
void expect_registers(const std::vector<std::uint8_t>& bytes, std::size_t at, int lane, int registers, int field,
                      Place&& place) {
  for (int i = 0; i < registers; ++i) {
    std::uint32_t word = 0;
    std::memcpy(&word, bytes.data() + at + 4 * static_cast<std::size_t>(i), 4);
    const std::uint32_t operand = word & 0x03030303U << (2 * field);
    for (int k = 0; k < 4; ++k) {
      const DigitPlace digit = place(lane / 4 + i % 2 * 8, i / 2 * 16 + lane % 4 * 4 + k);
      ASSERT_LT(digit.byte, bytes.size());
      const unsigned code = (static_cast<unsigned>(bytes[digit.byte]) >> digit.shift) & 3U;
      ASSERT_EQ(operand >> (8 * k) & 0xFFU, code << (2 * field)) << "byte " << at << " register " << i << " field " << field;
    }
  }
}

std::vector<std::uint8_t> random_bytes(std::size_t n) {
  std::mt19937 rng(3);
  std::vector<std::uint8_t> bytes(n);
  for (std::uint8_t& b : bytes) b = static_cast<std::uint8_t>(rng());
  return bytes;
}

TEST(PageFormat, OneAndGivesTheOperandsOfKeys) {
  for (const int slots : {16, 64, 80}) {
    const std::vector<std::uint8_t> keys = random_bytes(key_bytes(slots));
    for (int first = 0; first < slots; first += 32) {
      const int registers = first + 32 <= slots ? 4 : 2;
      for (int lane = 0; lane < 32; ++lane) {
        const auto at = static_cast<std::size_t>(16 * first + lane * 4 * registers);
        for (int field = 0; field < 4; ++field) {
          expect_registers(keys, at, lane, registers, field,
                           [&](int row, int column) { return key_digit(slots, token_of(field, row), first + column); });
        }
      }
    }
  }
}

// Columns 2 x and 2 x + 1 of a group of 16: the tokens in rows x and x + 8.
TEST(PageFormat, OneAndGivesTheOperandsOfValues) {
  for (const int dim : {64, 128, 256}) {
    const std::vector<std::uint8_t> values = random_bytes(value_bytes(dim));
    for (int pair = 0; pair < 2; ++pair) {
      for (int first = 0; first < dim; first += 64) {
        for (int lane = 0; lane < 32; ++lane) {
          const auto at = static_cast<std::size_t>(pair * 8 * dim + 8 * first + lane * 16);
          for (int field = 0; field < 4; ++field) {
            expect_registers(values, at, lane, 4, field, [&](int row, int column) {
              const int token = token_of(2 * pair + column / 16, column % 16 / 2 + column % 2 * 8);
              return value_digit(dim, token, first + 16 * field + row);
            });
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
  // Token 15 = row 0 of group 0, slot 0: lane 0, word 0, byte 0, field 0.
  EXPECT_EQ(key_digit(128, 15, 0).byte, 0U);
  EXPECT_EQ(key_digit(128, 15, 0).shift, 0);
  // Token 22 = group 1, row 9. Slot 59 = fragment 1, column 27: lane 4 (9 mod 8) + 2, word 2 + 1, byte 3.
  EXPECT_EQ(key_digit(128, 22, 59).byte, 512U + (4 + 2) * 16 + 3 * 4 + 3);
  EXPECT_EQ(key_digit(128, 22, 59).shift, 2);
  // The last 16 of an odd number have 8 bytes per lane. Token 40 = group 2, row 8. Slot 38: column 6.
  EXPECT_EQ(key_digit(48, 40, 38).byte, 2U * 256 + 1 * 8 + 4 + 2);
  EXPECT_EQ(key_digit(48, 40, 38).shift, 4);
  // Token 51 = group 3, row 3: column 16 + 6. Dimension 121 = block 1 of 64, field 3, row 9: lane 4 + 1, word 2 + 1, byte 2.
  EXPECT_EQ(value_digit(128, 51, 121).byte, 1024U + 512 + (4 + 1) * 16 + 3 * 4 + 2);
  EXPECT_EQ(value_digit(128, 51, 121).shift, 6);
  // Token 4 = group 0, row 11: column 7. Dimension 21 = field 1, row 5: lane 20 + 1, word 0, byte 3.
  EXPECT_EQ(value_digit(64, 4, 21).byte, (20U + 1) * 16 + 3);
  EXPECT_EQ(value_digit(64, 4, 21).shift, 2);
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
