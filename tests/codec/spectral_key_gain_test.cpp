// The search for the gain of a row of keys, and the errors that it leaves.
#include "codec/spectral_keys.h"

namespace oscar {
namespace {

using test::all_finite;
using test::Coding;
using test::coding;
using test::config_of;
using test::decode;
using test::dot;
using test::encode;
using test::falling_spectrum;
using test::gain_of;
using test::gaussian;
using test::kGaussianDistortion;
using test::norm_of;
using test::plain_head;
using test::relative_error;
using test::round_trip;
using test::row_of;
using test::search_may_end_at;
using test::size_of;
using test::Spectrum;
using test::wide;

// What a row is too long or too short by counts five times, so little of the shrinkage is left that the least error would bring
// (kGaussianDistortion: 12 % at 2 bits): on average, and of each row the more the fewer codes there are to choose from.
TEST(SpectralKey, DecodedRowsAreNearlyUnbiased) {
  struct Case {
    int width;
    double mean, mean_within, deviation;  // of <z, z^> / |z|^2 from 1
  };
  for (const Case& c : {Case{2, -0.0423, 2e-3, 0.0473}, Case{4, -0.0031, 6e-4, 0.0075}, Case{6, -0.0002, 2e-4, 0.0023}}) {
    const int dim = 64;
    const auto codec = make_spectral_key_codec(config_of({plain_head(dim, c.width)}));
    double sum = 0;
    double squares = 0;
    constexpr int kRows = 3000;
    for (unsigned i = 0; i < kRows; ++i) {
      const std::vector<float> row = gaussian(size_of(dim), i, i % 2 == 0 ? 1.0F : 0.1F);
      const double off = dot(row, round_trip(*codec, row)) / dot(row, row) - 1;
      sum += off / kRows;
      squares += off * off / kRows;
    }
    EXPECT_NEAR(sum, c.mean, c.mean_within) << c.width;
    EXPECT_NEAR(std::sqrt(squares), c.deviation, 0.06 * c.deviation) << c.width;
  }
}

double mean_error(const Codec& codec, const std::vector<float>& sigma, unsigned rows) {
  double error = 0;
  double energy = 0;
  for (unsigned i = 0; i < rows; ++i) {
    const std::vector<float> row = row_of(sigma, 1000U + i);
    error += relative_error(round_trip(codec, row), row) * dot(row, row);
    energy += dot(row, row);
  }
  return error / energy;
}

// Against the best grid for Gaussians of one size, which must reach as far as the largest of very many. The largest coordinate
// of one row is nearer, and a gain of its own makes use of that: the more so the more levels there are. With 2 bits the cost
// along the row outweighs it; a gain without bias there would come to 1 / (1 - 0.119) of the grid's error.
TEST(SpectralKey, ErrorOfGaussianRowsIsThatOfAGridForEach) {
  struct Case {
    int width;
    double share;  // of the error of that grid
  };
  const int dim = 128;
  for (const Case& c : {Case{2, 1.069}, Case{4, 0.878}, Case{6, 0.651}, Case{8, 0.458}}) {
    const auto codec = make_spectral_key_codec(config_of({plain_head(dim, c.width)}));
    const double error = mean_error(*codec, std::vector<float>(size_of(dim), 1.0F), 1500);
    EXPECT_NEAR(error / kGaussianDistortion[c.width / 2 - 1], c.share, 0.02 * c.share) << c.width;
  }
}

// The error is that of every coordinate at its width, and all of those without one, less what a gain for every row saves.
TEST(SpectralKey, ErrorOfASpectrumIsTheSumOfItsCoordinates) {
  struct Case {
    int dim;
    double share;
  };
  for (const auto& [dim, share] : {Case{64, 0.881}, Case{80, 0.896}, Case{128, 0.923}}) {
    const Spectrum s = falling_spectrum(dim);
    double energy = 0;
    double expected = 0;
    for (std::size_t d = 0; d < s.sigma.size(); ++d) {
      const double variance = std::pow(static_cast<double>(s.sigma[d]), 2);
      const int width = d < s.sigma.size() / 2 ? s.head.width[d] : 0;
      energy += variance;
      expected += variance * (width > 0 ? kGaussianDistortion[width / 2 - 1] : 1.0);
    }
    const auto codec = make_spectral_key_codec(config_of({s.head}));
    EXPECT_NEAR(mean_error(*codec, s.sigma, 3000) / (expected / energy), share, 0.02) << dim;
  }
}

// Against codes at the row's own norm g0 and the gain that makes such a row unbiased: what choosing a gain is for.
TEST(SpectralKey, TheChosenGainIsBetterThanTheNorm) {
  struct Case {
    int dim;
    double share;
  };
  for (const auto& [dim, share] : {Case{64, 0.751}, Case{128, 0.799}, Case{256, 0.849}}) {
    const Spectrum s = falling_spectrum(dim);
    const auto codec = make_spectral_key_codec(config_of({s.head}));
    double error = 0;
    double error_at_norm = 0;
    double length = 0;
    constexpr int kRows = 1000;
    for (unsigned i = 0; i < kRows; ++i) {
      const std::vector<float> row = row_of(s.sigma, 1000U + i);
      const VectorD z = wide(row);
      const std::vector<float> decoded = round_trip(*codec, row);
      for (std::size_t d = 0; d < row.size(); ++d) {
        if (s.head.width[d] > 0) error += std::pow(static_cast<double>(decoded[d]) - static_cast<double>(row[d]), 2);
      }
      length += dot(row, decoded) / (kRows * coding(s.head, z, 1.0).energy);
      // z^ = ratio * (codes at the norm): |z - z^|^2 from the three sums.
      const double norm = norm_of(s.head, z);
      const Coding at_norm = coding(s.head, z, norm);
      const double unbiased = norm * at_norm.energy / at_norm.product;
      const double ratio = gain_of(static_cast<int>(std::lround(128 + 16 * std::log2(unbiased)))) / norm;
      const double squares = at_norm.error - at_norm.energy + 2 * at_norm.product;
      error_at_norm += at_norm.energy - 2 * ratio * at_norm.product + ratio * ratio * squares;
    }
    EXPECT_NEAR(error / error_at_norm, share, 0.02) << dim;
    EXPECT_NEAR(length, 0.9989, 6e-4) << dim;  // all but unbiased: next to no energy lies in coordinates of 2 bits
  }
}

TEST(SpectralKey, SomeCoordinatesSaturateByDesign) {
  const int dim = 128;
  const auto codec = make_spectral_key_codec(config_of({plain_head(dim, 2)}));
  EncodeStats stats;
  for (unsigned i = 0; i < 400; ++i) (void)encode(*codec, gaussian(size_of(dim), i), 0, stats);
  const double share = static_cast<double>(stats.saturated) / (400.0 * dim);
  EXPECT_NEAR(share, 0.0209, 0.002);  // 0.0464 = P(|u| > 2 * .9957) at the norm; what is cut off costs more than coarser steps
  EXPECT_EQ(stats.rows, 400U);
  EXPECT_EQ(stats.sanitised, 0U);
}

// Steps so small that no cost is a number: the gain is the norm's.
TEST(SpectralKey, C3_WithoutACostTheNormDecides) {
  SpectralKeyHead head = plain_head(64, 2);
  std::fill(head.step.begin(), head.step.end(), 1e-25F);
  const auto codec = make_spectral_key_codec(config_of({head}));
  std::vector<float> row;
  for (int d = 0; d < 64; ++d) row.push_back(d % 2 == 0 ? 2.0F : -2.0F);
  EncodeStats stats;
  const std::vector<std::uint8_t> code = encode(*codec, row, 0, stats);
  EXPECT_EQ(code.back(), 128 + 16);
  EXPECT_EQ(code.front(), 0x33);  // codes 3 0 3 0
  EXPECT_EQ(stats.saturated, 64U);
  EXPECT_TRUE(all_finite(decode(*codec, code)));
}

// Nothing of the row has a code, whatever its norm.
TEST(SpectralKey, WithoutEnergyInTheCodesThereIsNoGain) {
  const Spectrum s = falling_spectrum(64);
  std::vector<float> row(64, 1.0F);
  for (std::size_t d = 0; d < row.size(); ++d) row[d] = s.head.width[d] > 0 ? 0.0F : 1.0F;
  SpectralKeyHead head = s.head;
  std::fill(head.inverse_sigma.begin(), head.inverse_sigma.end(), 1.0F);
  EncodeStats stats;
  EXPECT_THAT(encode(*make_spectral_key_codec(config_of({head})), row, 0, stats), testing::Each(0));
  EXPECT_EQ(stats.saturated, 0U);
}

TEST(SpectralKey, NormsBeyondTheRangeOfGainsAreCounted) {
  const int dim = 64;
  const SpectralKeyHead head = plain_head(dim, 8);
  const auto codec = make_spectral_key_codec(config_of({head}));
  for (const float sigma : {1e-3F, 1.0F, 1e4F}) {
    std::vector<float> row;
    for (int d = 0; d < dim; ++d) row.push_back(sigma * (d % 2 == 0 ? 1.0F : -1.0F));
    EncodeStats stats;
    const int gain = encode(*codec, row, 0, stats).back();
    EXPECT_EQ(stats.saturated, sigma == 1.0F ? 0U : (sigma < 1.0F ? 1U : 1U + 64)) << sigma;  // no code below 1e3 is clamped
    EXPECT_TRUE(search_may_end_at(gain, head, wide(row), static_cast<double>(sigma))) << sigma << " gain " << gain;
  }
}

// Gains of the search that have no byte are left out; the others are looked at as ever.
TEST(SpectralKey, TheSearchStaysWithinTheRange) {
  const int dim = 64;
  const SpectralKeyHead head = plain_head(dim, 4);
  const auto codec = make_spectral_key_codec(config_of({head}));
  for (const float sigma : {2e-4F, 3e-3F, 5e-3F, 6e-3F, 8e-3F, 0.012F, 100.0F, 150.0F, 200.0F, 240.0F, 300.0F}) {
    for (unsigned i = 0; i < 20; ++i) {
      std::vector<float> row = gaussian(size_of(dim), i, sigma);
      if (i % 4 == 0) row[i] = 40.0F * sigma;  // the last gain tried, or the last byte
      const VectorD z = wide(row);
      const int gain = encode(*codec, row).back();
      EXPECT_TRUE(search_may_end_at(gain, head, z, norm_of(head, z))) << sigma << " row " << i << " gain " << gain;
    }
  }
}

// Values of n + 3/8 and n + 5/8 in steps are 1/8 off with a gain of 1 and, on the other side, with a gain of 1/2. Both are
// tried, their costs are equal to the last bit and those of all others larger: the first remains.
TEST(SpectralKey, OfEqualCostsTheFirstIsTaken) {
  const int dim = 64;
  SpectralKeyHead head = plain_head(dim, 8);
  std::fill(head.step.begin(), head.step.end(), 1.0F);
  std::fill(head.inverse_sigma.begin() + 1, head.inverse_sigma.end(), 0.0F);
  std::vector<float> row;
  for (int d = 0; d < dim; ++d) {
    const float size = static_cast<float>(58 - d / 4 * 3) + (d % 4 < 2 ? 0.375F : 0.625F);
    row.push_back(d % 2 == 0 ? size : -size);
  }
  head.inverse_sigma[0] = 1.0F / row[0];
  const VectorD z = wide(row);
  EXPECT_EQ(coding(head, z, 1.0).error, coding(head, z, 0.5).error);
  EXPECT_EQ(coding(head, z, 1.0).high, coding(head, z, 0.5).high);
  EXPECT_EQ(encode(*make_spectral_key_codec(config_of({head})), row).back(), 128 - 16);
}

}  // namespace
}  // namespace oscar
