#include "oscar/cache/state_row.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "cache/test_cache.h"
#include "oscar/base/error.h"

namespace oscar {
namespace {

using namespace test;

std::string refusal(std::span<const std::uint16_t> row, std::size_t code_bytes, std::uint64_t digest) {
  try {
    (void)parse_state_row(row, code_bytes, digest);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

// Oracle: the nearest of all finite binary16 values with an even pattern (or all of them), ties to the even one of the set.
std::uint16_t nearest_half(float x, bool even_only) {
  const unsigned step = even_only ? 2 : 1;
  const double magnitude = std::min(std::fabs(static_cast<double>(x)), 65536.0);
  std::uint16_t best = 0;
  double best_distance = std::numeric_limits<double>::infinity();
  for (unsigned h = 0; h < 0x7C00; h += step) {
    const double distance = std::fabs(magnitude - static_cast<double>(half_to_float(static_cast<std::uint16_t>(h))));
    if (distance < best_distance || (distance == best_distance && h % (2 * step) == 0)) {
      best = static_cast<std::uint16_t>(h);
      best_distance = distance;
    }
  }
  return static_cast<std::uint16_t>(best | (std::signbit(x) ? 0x8000U : 0U));
}

TEST(StateRow, RoundingIsToTheNearestAllowedValue) {
  std::vector<float> values = {0.0F,
                               -0.0F,
                               1.0F,
                               1.0F + 0x1p-10F,
                               1.0F + 0x1p-9F,
                               1.0F + 3 * 0x1p-10F,
                               -3.14159F,
                               65472.0F,
                               65488.0F,
                               65504.0F,
                               65519.0F,
                               65536.0F,
                               1e30F,
                               0x1p-14F,
                               0x1p-14F - 0x1p-25F,
                               0x1p-23F,
                               0x1p-24F,
                               3 * 0x1p-24F,
                               0x1p-25F,
                               1e-30F,
                               1023 * 0x1p-24F,
                               1025 * 0x1p-24F,
                               2047 * 0x1p-24F};
  const std::vector<float> random = gaussian(20, 4, 3.0F);
  values.insert(values.end(), random.begin(), random.end());
  for (const float x : values) {
    const std::vector<float> row(kValues, x);
    std::vector<std::uint16_t> out(kValues);
    EncodeStats stats;
    round_exact_row(row, out, stats);
    EXPECT_EQ(out[0], nearest_half(x, true)) << x;
    EXPECT_EQ(out[kMarkedValues - 1], out[0]);
    EXPECT_EQ(out[kMarkedValues], nearest_half(x, false)) << x;
    EXPECT_EQ(stats.saturated, (x > 65472.0F ? 64U : 0U) + (x > 65504.0F ? 8U : 0U)) << x;
    EXPECT_EQ(stats.sanitised, 0U);
    const std::vector<std::uint16_t> once = out;  // a stored row rounds to itself
    round_exact_row(to_floats(once), out, stats);
    EXPECT_EQ(out, once);
  }
}

TEST(StateRow, C4_NaNAndInfBecomeZeroAndAreCountedPerRow) {
  std::vector<float> row = gaussian(kValues, 1);
  row[3] = NAN;
  row[70] = -std::numeric_limits<float>::infinity();
  std::vector<std::uint16_t> out(kValues);
  EncodeStats stats;
  round_exact_row(row, out, stats);
  EXPECT_EQ(stats.sanitised, 1U);
  EXPECT_EQ(out[3], 0);
  EXPECT_EQ(out[70], 0);
}

TEST(StateRow, ExactRowsCarryTheirPositionAndComeBackBitForBit) {
  for (const std::int32_t position : {0, 1, 4095, 123456, kMaxPosition}) {
    const std::vector<std::uint16_t> row = expected_exact(gaussian(kValues, static_cast<std::uint64_t>(position)));
    std::vector<std::uint16_t> saved(kValues);
    export_exact_row(row, position, saved);
    for (std::size_t i = 0; i < kValues; ++i) EXPECT_EQ(saved[i] & 0xFFFE, row[i] & 0xFFFE);
    const StateRow parsed = parse_state_row(saved, 20, 1);
    EXPECT_EQ(parsed.kind, StateRowKind::exact);
    EXPECT_EQ(parsed.position, position);
    std::vector<std::uint16_t> back(kValues);
    import_exact_row(saved, back);
    EXPECT_EQ(back, row);
  }
}

TEST(StateRow, EveryFlippedBitOfAnExactRowIsNoticed) {
  const std::vector<std::uint16_t> row = expected_exact(gaussian(kValues, 3));
  std::vector<std::uint16_t> saved(kValues);
  export_exact_row(row, 1234, saved);
  for (std::size_t bit = 0; bit < 16 * kValues; ++bit) {
    std::vector<std::uint16_t> damaged = saved;
    damaged[bit / 16] = static_cast<std::uint16_t>(damaged[bit / 16] ^ (1U << (bit % 16)));
    if (refusal(damaged, 20, 1).empty()) {
      ASSERT_EQ(parse_state_row(damaged, 20, 1).kind, StateRowKind::plain) << "bit " << bit;
    }
  }
}

TEST(StateRow, StockRowsArePlain) {
  EXPECT_EQ(parse_state_row(std::vector<std::uint16_t>(kValues, 0), 20, 1).kind, StateRowKind::plain);
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    std::vector<std::uint16_t> row;
    for (const float x : gaussian(kValues, seed)) row.push_back(float_to_half(x));
    ASSERT_EQ(parse_state_row(row, 20, 1).kind, StateRowKind::plain);
  }
}

TEST(StateRow, PackedBytesAreTheSpecifiedOnes) {
  const std::vector<std::uint8_t> code = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  std::vector<std::uint16_t> saved(kValues, 0xFFFF);
  export_coded_row(code, 0x00ABCDEF, 0x1122334455667788U, saved);
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(saved.data());
  const std::vector<std::uint8_t> header = {'O',  0x7E, 'S',  0x7E, 'C',  0x7E, '2',  0x7E, 1, 0, 0, 0, 0xEF, 0xCD, 0xAB, 0,
                                            0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 9, 0, 0, 0, 0,    0,    0,    0};
  EXPECT_EQ(std::vector<std::uint8_t>(bytes, bytes + 32), header);
  EXPECT_EQ(std::vector<std::uint8_t>(bytes + 40, bytes + 49), code);
  for (std::size_t i = 49; i < 2 * kValues; ++i) EXPECT_EQ(bytes[i], 0);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_TRUE(std::isnan(half_to_float(saved[i])));  // fails visibly in a stock program
  const StateRow parsed = parse_state_row(saved, 9, 0x1122334455667788U);
  EXPECT_EQ(parsed.kind, StateRowKind::packed);
  EXPECT_EQ(parsed.position, 0x00ABCDEF);
  EXPECT_EQ(copy_of(parsed.code), code);
}

TEST(StateRow, D12_AnotherArtifactIsRefusedByName) {
  std::vector<std::uint16_t> saved(kValues);
  export_coded_row(std::vector<std::uint8_t>(20, 7), 5, 0xAAAA, saved);
  EXPECT_THAT(refusal(saved, 20, 0xBBBB),
              testing::StartsWith(
                  "this saved state was made with calibration artifact 000000000000aaaa, but 000000000000bbbb is loaded"));
  EXPECT_THAT(refusal(saved, 24, 0xAAAA), testing::HasSubstr("coded rows of 20 bytes, but this codec's rows have 24"));
  EXPECT_EQ(refusal(saved, 20, 0xAAAA), "");
}

TEST(StateRow, D12_EveryFlippedBitOfAPackedRowIsRefused) {
  std::vector<std::uint16_t> saved(kValues);
  export_coded_row(std::vector<std::uint8_t>(20, 7), 5, 0xAAAA, saved);
  for (std::size_t bit = 0; bit < 16 * kValues; ++bit) {
    std::vector<std::uint16_t> damaged = saved;
    damaged[bit / 16] = static_cast<std::uint16_t>(damaged[bit / 16] ^ (1U << (bit % 16)));
    ASSERT_NE(refusal(damaged, 20, 0xAAAA), "") << "bit " << bit;
  }
}

TEST(StateRow, TruncatedRowsAreRefused) {
  EXPECT_NE(refusal(std::vector<std::uint16_t>(63, 0), 20, 1), "");
  EXPECT_NE(refusal({}, 20, 1), "");
}

TEST(StateRow, HashIsTheSpecifiedOne) {
  const auto mix = [](std::uint64_t h, std::uint64_t w) {
    h = (h ^ w) * 0xFF51AFD7ED558CCDU;
    return h ^ (h >> 32);
  };
  std::uint64_t h = mix(0x4F53434152303031U, 42);
  h = mix(h, 0x0807060504030201U);
  h = mix(h, 0x0A09U);
  h *= 0xC4CEB9FE1A85EC53U;
  h ^= h >> 29;
  const std::uint64_t word = 42;
  EXPECT_EQ(state_hash({&word, 1}, std::vector<std::uint8_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}), h);
}

}  // namespace
}  // namespace oscar
