#include "oscar/method/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <numbers>
#include <random>

#include "oscar/base/error.h"

namespace oscar {
namespace {

RopeParams params(RopePairing pairing, int n_rot) {
  RopeParams p;
  p.pairing = pairing;
  p.n_rot = n_rot;
  return p;
}

std::vector<float> random_row(int dim, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> row(static_cast<std::size_t>(dim));
  for (float& x : row) x = normal(generator);
  return row;
}

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    largest = std::max(largest, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
  return largest;
}

TEST(Rope, TurnsPairsAsComplexNumbers) {
  for (const RopePairing pairing : {RopePairing::norm, RopePairing::neox}) {
    const int dim = 16;
    const int n_rot = 12;  // partial rotary: the last four coordinates stay
    const Rope rope(params(pairing, n_rot), dim);
    const std::vector<float> before = random_row(dim, 1);
    std::vector<float> after = before;
    rope.apply(after, 37);
    for (std::size_t i = 0; i < 6; ++i) {
      const std::size_t first = pairing == RopePairing::norm ? 2 * i : i;
      const std::size_t second = pairing == RopePairing::norm ? 2 * i + 1 : i + 6;
      const std::complex<double> turned =
          std::complex<double>(static_cast<double>(before[first]), static_cast<double>(before[second])) *
          std::polar(1.0, 37.0 * std::pow(10000.0, -static_cast<double>(i) / 6.0));
      EXPECT_NEAR(static_cast<double>(after[first]), turned.real(), 1e-6);
      EXPECT_NEAR(static_cast<double>(after[second]), turned.imag(), 1e-6);
    }
    for (std::size_t i = 12; i < 16; ++i) EXPECT_EQ(after[i], before[i]);
  }
}

TEST(Rope, UndoAndShiftInvert) {
  RopeParams p = params(RopePairing::neox, 64);
  p.base = 1e6F;
  p.freq_scale = 0.25F;
  p.ext_factor = 1.0F;
  p.attn_factor = 1.3F;
  p.n_ctx_orig = 4096;
  for (const RopePairing pairing : {RopePairing::norm, RopePairing::neox}) {
    p.pairing = pairing;
    const Rope rope(p, 80);
    const std::vector<float> original = random_row(80, 2);
    for (const std::int64_t position : {0, 1, 4095, 131071}) {
      std::vector<float> row = original;
      rope.apply(row, position);
      std::vector<float> shifted = original;
      rope.apply(shifted, position + 100);
      rope.shift(shifted, -100);
      EXPECT_LT(largest_difference(row, shifted), 2e-6);
      rope.undo(row, position);
      EXPECT_LT(largest_difference(row, original), 2e-6);
    }
    std::vector<float> moved = original;
    rope.apply(moved, 3000);
    EXPECT_GT(largest_difference(moved, original), 0.1);
  }
}

TEST(Rope, FrequencyFactorsDivide) {
  RopeParams p = params(RopePairing::norm, 8);
  p.freq_factors = {1.0F, 2.0F, 4.0F, 8.0F};
  const Rope rope(p, 8);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_DOUBLE_EQ(rope.theta()[i], std::pow(10000.0, -static_cast<double>(i) / 4.0) / std::exp2(static_cast<double>(i)));
  }
}

TEST(Rope, LinearScalingInterpolates) {
  RopeParams p = params(RopePairing::neox, 8);
  p.freq_scale = 0.5F;
  p.attn_factor = 2.0F;
  const Rope rope(p, 8);
  EXPECT_DOUBLE_EQ(rope.theta()[0], 0.5);
  EXPECT_DOUBLE_EQ(rope.magnitude(), 2.0);  // no YaRN: the logarithmic correction does not apply
}

// The paper's own formulation (arXiv 2309.00071, sections 3.2 and 3.4): ramp on the number of turns a pair makes within the
// original context, between its correction dimensions. Numbers: Qwen2.5 with factor 4.
TEST(Rope, YarnMatchesIndependentFormula) {
  RopeParams p = params(RopePairing::neox, 128);
  p.base = 1e6F;
  p.freq_scale = 0.25F;
  p.ext_factor = 1.0F;
  p.n_ctx_orig = 32768;
  const Rope rope(p, 128);
  const auto correction = [](double turns) {
    return 128.0 * std::log(32768.0 / (turns * 2.0 * std::numbers::pi)) / (2.0 * std::log(1e6));
  };
  const double low = std::floor(correction(32.0));
  const double high = std::ceil(correction(1.0));
  EXPECT_EQ(low, 23.0);
  EXPECT_EQ(high, 40.0);
  for (int i = 0; i < 64; ++i) {
    const double trained = std::pow(1e6, -i / 64.0);
    const double kept = i <= 23 ? 1.0 : (i >= 40 ? 0.0 : 1.0 - (i - low) / (high - low));
    EXPECT_NEAR(rope.theta()[static_cast<std::size_t>(i)] / (trained * (kept + (1.0 - kept) / 4.0)), 1.0, 1e-12) << i;
  }
  EXPECT_NEAR(rope.magnitude(), 0.1 * std::log(4.0) + 1.0, 1e-12);
}

TEST(Rope, NoneLeavesRowsAlone) {
  const Rope rope(RopeParams{}, 8);
  const std::vector<float> original = random_row(8, 3);
  std::vector<float> row = original;
  rope.apply(row, 100);
  rope.undo(row, 7);
  EXPECT_EQ(row, original);
  EXPECT_TRUE(rope.theta().empty());
}

TEST(Rope, RefusesImpossibleParameters) {
  EXPECT_THROW(Rope(params(RopePairing::norm, 7), 8), Error);
  EXPECT_THROW(Rope(params(RopePairing::norm, 16), 8), Error);
  RopeParams factors = params(RopePairing::norm, 8);
  factors.freq_factors = {1.0F};
  EXPECT_THROW(Rope(factors, 8), Error);
  factors.freq_factors = {1.0F, 0.0F, 1.0F, 1.0F};
  EXPECT_THROW(Rope(factors, 8), Error);
  RopeParams yarn = params(RopePairing::norm, 8);
  yarn.ext_factor = 1.0F;
  EXPECT_THROW(Rope(yarn, 8), Error);  // no original context length
  std::vector<float> wrong(4);
  EXPECT_THROW(Rope(params(RopePairing::norm, 8), 8).apply(wrong, 1), Error);
}

}  // namespace
}  // namespace oscar
