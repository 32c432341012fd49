#include "rivals/grids.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

#include "rivals/rival_rows.h"

namespace oscar::rival {
namespace {

// A code of OCP E4M3 as a number; NaN for S.1111.111.
float e4m3_value(unsigned code) {
  const unsigned exponent = (code >> 3) & 15U;
  const auto mantissa = static_cast<float>(code & 7U);
  if ((code & 0x7FU) == 0x7FU) return std::numeric_limits<float>::quiet_NaN();
  const float magnitude =
      exponent == 0 ? mantissa * 0x1p-9F : std::ldexp(1.0F + mantissa / 8.0F, static_cast<int>(exponent) - 7);
  return (code & 0x80U) != 0 ? -magnitude : magnitude;
}

TEST(E4m3, AllCodesStayAndMidpointsGoToEven) {
  int codes = 0;
  for (unsigned code = 0; code < 256; ++code) {
    const float value = e4m3_value(code);
    if (std::isnan(value)) continue;
    ++codes;
    EXPECT_EQ(e4m3(value), value) << code;
    EXPECT_EQ(std::signbit(e4m3(value)), (code & 0x80U) != 0);
    const float next = e4m3_value(code + 1);
    if ((code & 0x7FU) >= 0x7EU) continue;
    const float middle = 0.5F * (value + next);
    EXPECT_EQ(e4m3(middle), code % 2 == 0 ? value : next) << code;
    EXPECT_EQ(e4m3(0.51F * value + 0.49F * next), value) << code;
    EXPECT_EQ(e4m3(0.49F * value + 0.51F * next), next) << code;
  }
  EXPECT_EQ(codes, 254);
  EXPECT_EQ(e4m3(1e9F), 448.0F);
  EXPECT_EQ(e4m3(-449.0F), -448.0F);
}

TEST(LloydMax, PublishedLevelsAndDistortions) {
  const auto check = [](int bits, const std::vector<double>& positive, double distortion) {
    const std::vector<float> levels = lloyd_max(bits);
    ASSERT_EQ(levels.size(), 2 * positive.size());
    for (std::size_t i = 0; i < positive.size(); ++i) {
      EXPECT_NEAR(levels[positive.size() + i], positive[i], 6e-5);
      EXPECT_NEAR(levels[positive.size() - 1 - i], -positive[i], 6e-5);
    }
    // Mean squared error over the Gaussian, integrated in steps of .001.
    double error = 0;
    for (int i = -8000; i <= 8000; ++i) {
      const double x = i * 0.001;
      const double e = x - static_cast<double>(nearest(levels, static_cast<float>(x)));
      error += e * e * std::exp(-0.5 * x * x) * 0.001 / std::sqrt(2 * 3.14159265358979);
    }
    EXPECT_NEAR(error, distortion, 5e-5);
  };
  check(1, {0.7979}, 0.3634);
  check(2, {0.4528, 1.5104}, 0.1175);
  check(3, {0.2451, 0.7560, 1.3439, 2.1519}, 0.03454);
}

TEST(LlamaBlocks, KnownAnswers) {
  std::array<float, kBlock> x{};
  for (int i = 0; i < kBlock; ++i) x[static_cast<std::size_t>(i)] = 0.5F * static_cast<float>(i % 16 - 8);
  auto y = x;  // -4 .. 3.5, the largest magnitude is negative: d = .5
  q4_0(y);
  EXPECT_EQ(y, x);
  for (float& v : y) v = -v;  // 4 .. -3.5: d = -.5
  const auto negative = y;
  q4_0(y);
  EXPECT_EQ(y, negative);
  y[8] = -4.0F;  // the side opposite to the first of the largest magnitudes has one level less
  y[0] = 4.0F;
  q4_0(y);
  EXPECT_EQ(y[0], 4.0F);
  EXPECT_EQ(y[8], -3.5F);

  auto z = x;
  for (float& v : z) v += 4.0F;  // 0 .. 7.5 in steps of .5
  const auto shifted = z;
  q4_1(z);
  EXPECT_EQ(z, shifted);

  std::array<float, kBlock> w{};
  for (int i = 0; i < kBlock; ++i) w[static_cast<std::size_t>(i)] = static_cast<float>(4 * i - 60);
  w[31] = 127.0F;
  const auto whole = w;
  q8_0(w);
  EXPECT_EQ(w, whole);
  w[31] = 1.0F;
  std::fill(w.begin(), w.end() - 1, 0.25F);
  q8_0(w);
  EXPECT_EQ(w[31], 127 * 0x1.02p-7F);  // d = f16(1 / 127)
  EXPECT_EQ(w[0], 32 * 0x1.02p-7F);

  std::array<float, kBlock> nothing{};
  for (auto* quantize : {q8_0, q4_0, q4_1}) {
    quantize(nothing);
    EXPECT_EQ(nothing, (std::array<float, kBlock>{}));
  }
}

TEST(MinMax, KnownAnswers) {
  std::vector<float> x = {-1, 0.4F, 0.6F, 2, 1.1F};
  min_max(x, 2);
  EXPECT_EQ(x, (std::vector<float>{-1, 0, 1, 2, 1}));
  std::vector<float> flat(5, 3.0F);
  min_max(flat, 2);
  EXPECT_EQ(flat, std::vector<float>(5, 3.0F));
  std::vector<float> groups = {0, 1.4F, 3, 10, 12, 16};
  min_max_groups(groups, 4, 2);
  const float step = round_half(10.0F / 3.0F);
  EXPECT_EQ(groups, (std::vector<float>{0, 0, step, 3 * step, 12, 12 + 3 * round_half(4.0F / 3.0F)}));
}

TEST(MinMax, ZeroPointIsAWholeNumber) {
  std::vector<float> x = {-1.2F, 0.4F, 0.9F, 3};
  min_max_zero_point(x, 2, 1.0F);  // step 1.4, zero round(.857) = 1: levels -1.4, 0, 1.4, 2.8
  const float step = round_half(1.4F);
  EXPECT_EQ(x, (std::vector<float>{-step, 0, step, 2 * step}));
  std::vector<float> clipped = {-3, -0.4F, 0.4F, 3};
  min_max_zero_point(clipped, 2, 0.5F);  // +-1.5: step 1, zero round(1.5) = 2: levels -2 .. 1
  EXPECT_EQ(clipped, (std::vector<float>{-2, 0, 0, 1}));
}

TEST(MinMax, GaussianErrorFromBothSides) {
  const MatrixF rows = test::gaussian_rows(400, 128, 3);
  const auto error = [&](int bits) {
    MatrixF coded = rows;
    for (Eigen::Index t = 0; t < coded.rows(); ++t) min_max({coded.data() + t * coded.cols(), 128}, bits);
    return test::error_of(coded, rows);
  };
  EXPECT_NEAR(error(2), 0.25, 0.015);  // known for rows of 128
  EXPECT_NEAR(error(4), 0.25 / 25, 0.001);
}

TEST(RoundHalf, StaysFinite) {
  EXPECT_EQ(round_half(1e6F), 65504.0F);
  EXPECT_EQ(round_half(-1e6F), -65504.0F);
  EXPECT_EQ(round_half(1.0F / 3.0F), 0x1.554p-2F);
}

}  // namespace
}  // namespace oscar::rival
