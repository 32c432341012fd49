#include "codec/gain.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

namespace oscar {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Encoded {
  int byte = 0;
  bool clamped = false;
};
Encoded encode(float g) {
  Encoded e;
  e.byte = KeyGain::table().encode(g, e.clamped);
  return e;
}

TEST(GainCode, ByteIsASixteenthOfAnOctave) {
  const KeyGain& table = KeyGain::table();
  EXPECT_EQ(table.decode(0), 0.0F);
  EXPECT_EQ(table.decode(128), 1.0F);
  EXPECT_EQ(table.decode(144), 2.0F);
  EXPECT_EQ(table.decode(112), 0.5F);
  EXPECT_EQ(table.decode(16), 0x1p-7F);
  for (int n = 1; n < 256; ++n) {
    const double exact = std::pow(2.0, (n - 128) / 16.0);
    EXPECT_NEAR(static_cast<double>(table.decode(n)), exact, 6e-8 * exact) << n;
  }
}

TEST(GainCode, EveryByteComesBack) {
  for (int n = 1; n < 256; ++n) {
    const Encoded e = encode(KeyGain::table().decode(n));
    EXPECT_EQ(e.byte, n);
    EXPECT_FALSE(e.clamped) << n;
  }
}

TEST(GainCode, RoundsToTheNearestInTheLogarithm) {
  std::mt19937 rng(1);
  std::uniform_real_distribution<double> steps(0.51, 255.49);  // half a step beyond the first and last byte, less rounding
  for (int i = 0; i < 20000; ++i) {
    const double n = steps(rng);
    const auto g = static_cast<float>(std::pow(2.0, (n - 128.0) / 16.0));
    const double fraction = n - std::floor(n);
    if (std::abs(fraction - 0.5) < 1e-4) continue;  // binary32 cannot say on which side of the edge this lies
    const Encoded e = encode(g);
    EXPECT_EQ(e.byte, static_cast<int>(std::floor(n + 0.5))) << g;
    EXPECT_FALSE(e.clamped) << g;
  }
}

// Those of values: 63, eight to the octave.
TEST(GainCode, ValuesHaveCoarserSteps) {
  const ValueGain& table = ValueGain::table();
  EXPECT_EQ(table.decode(0), 0.0F);
  EXPECT_EQ(table.decode(40), 1.0F);
  EXPECT_EQ(table.decode(48), 2.0F);
  EXPECT_EQ(table.decode(32), 0.5F);
  for (int n = 1; n < 64; ++n) {
    bool clamped = false;
    EXPECT_NEAR(std::log2(static_cast<double>(table.decode(n))), (n - 40) / 8.0, 1e-7);
    EXPECT_EQ(table.encode(table.decode(n), clamped), n);
    EXPECT_EQ(table.encode(1.043F * table.decode(n), clamped), n);                        // less than half a step
    EXPECT_EQ(table.encode(table.decode(n) / 1.045F, clamped), std::max(1, n - 1)) << n;  // more than half a step
    EXPECT_EQ(clamped, n == 1);
  }
  bool clamped = false;
  EXPECT_EQ(table.encode(1e3F, clamped), 63);
  EXPECT_TRUE(clamped);
}

TEST(GainCode, OutsideTheRangeIsClampedAndSaid) {
  for (const float g : {253.0F, 1e10F, std::numeric_limits<float>::max(), kInf}) {
    EXPECT_EQ(encode(g).byte, 255) << g;
    EXPECT_TRUE(encode(g).clamped) << g;
  }
  for (const float g : {3.9e-3F, 1e-10F, std::numeric_limits<float>::min(), std::numeric_limits<float>::denorm_min()}) {
    EXPECT_EQ(encode(g).byte, 1) << g;
    EXPECT_TRUE(encode(g).clamped) << g;
  }
}

TEST(GainCode, NothingIsZero) {
  for (const float g : {0.0F, -0.0F, -1.0F, -kInf, std::numeric_limits<float>::quiet_NaN()}) {
    EXPECT_EQ(encode(g).byte, 0) << g;
    EXPECT_FALSE(encode(g).clamped) << g;
  }
}

}  // namespace
}  // namespace oscar
