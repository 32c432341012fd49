// How digits are shared out between quads, heads and layers.
#include "artifact/fit_spectral.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "oscar/base/error.h"
#include "oscar/codec/rates.h"
#include "oscar/codec/spectral.h"

namespace oscar {
namespace {

using Errors = QuadErrors;

Errors random_errors(std::size_t heads, std::size_t quads, int max_digits, unsigned seed) {
  std::mt19937 rng(seed);
  std::uniform_real_distribution<double> uniform;
  Errors errors(heads, std::vector<std::vector<double>>(quads));
  for (auto& head : errors) {
    for (auto& quad : head) {
      double e = std::pow(4.0, 5 * uniform(rng));
      for (int l = 0; l <= max_digits; ++l) {
        quad.push_back(e);
        e *= 0.05 + 0.5 * uniform(rng);
      }
    }
  }
  return errors;
}

double total_error(const Errors& errors, const std::vector<std::vector<int>>& digits) {
  double total = 0;
  for (std::size_t h = 0; h < errors.size(); ++h) {
    for (std::size_t q = 0; q < errors[h].size(); ++q) total += errors[h][q][static_cast<std::size_t>(digits[h][q])];
  }
  return total;
}

// Digits of each head, which must be multiples of 16, and their sum.
int checked_sum(const std::vector<std::vector<int>>& digits, int max_digits) {
  int sum = 0;
  for (const std::vector<int>& head : digits) {
    int of_head = 0;
    for (const int l : head) {
      EXPECT_GE(l, 0);
      EXPECT_LE(l, max_digits);
      of_head += 4 * l;
    }
    EXPECT_EQ(of_head % kSpectralSlots, 0);
    sum += of_head;
  }
  return sum;
}

// All assignments, one by one.
double least_error(const Errors& errors, int digits, int max_digits) {
  double least = std::numeric_limits<double>::infinity();
  std::vector<std::vector<int>> at(errors.size(), std::vector<int>(errors.front().size(), 0));
  const std::function<void(std::size_t, std::size_t, int, int)> visit = [&](std::size_t h, std::size_t q, int of_head,
                                                                            int left) {
    if (left < 0) return;
    if (h == errors.size()) {
      if (left == 0) least = std::min(least, total_error(errors, at));
      return;
    }
    if (q == errors[h].size()) {
      if (of_head % 16 == 0) visit(h + 1, 0, 0, left);
      return;
    }
    for (int l = 0; l <= max_digits; ++l) {
      at[h][q] = l;
      visit(h, q + 1, of_head + 4 * l, left - 4 * l);
    }
  };
  visit(0, 0, 0, digits);
  return least;
}

TEST(ShareDigits, IsTheLeastOfAllAssignments) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    const int max_digits = seed % 2 == 0 ? 3 : 4;
    const Errors errors = random_errors(2, 4, max_digits, seed);
    for (const int digits : {16, 32, 48, 64, 80, 96}) {
      if (digits > 2 * 4 * 4 * max_digits) continue;
      const auto shared = share_digits(errors, digits, max_digits);
      EXPECT_EQ(checked_sum(shared, max_digits), digits);
      const double least = least_error(errors, digits, max_digits);
      EXPECT_NEAR(total_error(errors, shared), least, 1e-12 * least) << "seed " << seed << " digits " << digits;
    }
  }
}

TEST(ShareDigits, HeadsShareOneBudget) {
  Errors errors = random_errors(3, 16, 4, 77);
  for (auto& quad : errors[1]) {
    for (double& e : quad) e *= 1e6;
  }
  for (auto& quad : errors[2]) {
    for (double& e : quad) e = 0;
  }
  const auto shared = share_digits(errors, 192, 4);
  EXPECT_EQ(checked_sum(shared, 4), 192);
  const auto of_head = [&](std::size_t h) { return std::accumulate(shared[h].begin(), shared[h].end(), 0); };
  EXPECT_GE(of_head(1), 2 * of_head(0));
  EXPECT_EQ(of_head(2), 0);
  double before = std::numeric_limits<double>::infinity();
  for (int digits = 0; digits <= 768; digits += 16) {
    const double error = total_error(errors, share_digits(errors, digits, 4));
    EXPECT_LT(error, before) << digits;
    before = error;
    if (digits == 512) break;  // head 2 has nothing to gain
  }
}

TEST(ShareDigits, BudgetsAreRoundedDownAndMustFit) {
  const Errors errors = random_errors(2, 4, 3, 5);
  EXPECT_EQ(checked_sum(share_digits(errors, 31, 3), 3), 16);
  EXPECT_EQ(checked_sum(share_digits(errors, 15, 3), 3), 0);
  EXPECT_EQ(checked_sum(share_digits(errors, 96, 3), 3), 96);
  try {
    share_digits(errors, 112, 3);
    ADD_FAILURE() << "112 digits in 2 heads of 16 coordinates";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "spectral: 112 digits do not fit 2 heads");
  }
}

std::vector<std::vector<int>> digits_of(const SpectralLayer& layer, std::size_t rate) {
  std::vector<std::vector<int>> digits;
  for (Eigen::Index h = 0; h < layer.mean.rows(); ++h) {
    auto& head = digits.emplace_back();
    for (Eigen::Index d = 0; d < layer.mean.cols(); d += kSpectralQuad)
      head.push_back(static_cast<int>(layer.width[rate](h, d)) / 2);
  }
  return digits;
}

// Layers that answer key errors more strongly get more digits than others, the model as many as the rate promises; the sum of
// noises, as amplitudes, is less than with equal shares.
TEST(ShareWidths, LayersShareByTheirNoise) {
  constexpr std::size_t kLayers = 3;
  const double loudness[kLayers] = {0.01, 1.0, 30.0};
  std::vector<SpectralLayer> layers(kLayers);
  std::vector<SpectralLayer*> pointers;
  std::vector<Errors> errors;
  for (std::size_t i = 0; i < kLayers; ++i) {
    layers[i].mean = MatrixF::Zero(2, 64);
    pointers.push_back(&layers[i]);
    errors.push_back(random_errors(2, 16, 4, 8));  // alike but for their loudness
    for (auto& head : errors.back()) {
      for (auto& quad : head) {
        for (double& e : quad) e *= loudness[i];
      }
    }
  }
  share_widths(pointers, errors);
  for (std::size_t r = 0; r < kSpectralRates.size(); ++r) {
    SCOPED_TRACE(kSpectralRates[r]);
    const int equal = static_cast<int>(kSpectralRates[r] * 32) * 2;
    const int most = kSpectralRates[r] > 2 ? 4 : 3;
    int sum = 0;
    int before = 0;
    double noise = 0;
    double noise_of_equals = 0;
    for (std::size_t i = 0; i < kLayers; ++i) {
      const auto digits = digits_of(layers[i], r);
      const int own = checked_sum(digits, most);
      EXPECT_GE(own, before);
      before = own;
      sum += own;
      noise += std::sqrt(total_error(errors[i], digits));
      noise_of_equals += std::sqrt(total_error(errors[i], share_digits(errors[i], equal, most)));
    }
    EXPECT_EQ(sum, 3 * equal);
    EXPECT_LT(noise, 0.95 * noise_of_equals);
    EXPECT_GT(noise, 0.4 * noise_of_equals);
  }
}

TEST(ShareWidths, EqualLayersGetEqualShares) {
  std::vector<SpectralLayer> layers(4);
  std::vector<SpectralLayer*> pointers;
  for (SpectralLayer& layer : layers) {
    layer.mean = MatrixF::Zero(1, 64);
    pointers.push_back(&layer);
  }
  const std::vector<Errors> errors(4, random_errors(1, 16, 4, 3));
  share_widths(pointers, errors);
  for (std::size_t r = 0; r < kSpectralRates.size(); ++r) {
    for (const SpectralLayer& layer : layers) {
      const int digits = checked_sum(digits_of(layer, r), 4);
      EXPECT_NEAR(digits, 32 * kSpectralRates[r], kSpectralSlots);
    }
  }
}

}  // namespace
}  // namespace oscar
