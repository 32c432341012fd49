#include "codec/row_kernels.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "codec/test_rows.h"

namespace oscar {
namespace {

using test::gaussian;

// Every instruction set this processor has; the baseline is always among them.
class RowKernelsOf : public testing::TestWithParam<RowKernels> {};

INSTANTIATE_TEST_SUITE_P(Sets, RowKernelsOf, testing::ValuesIn(row_kernel_sets().begin(), row_kernel_sets().end()),
                         [](const auto& set) { return std::string(set.param.name); });

TEST_P(RowKernelsOf, ProductIsBitIdenticalToThePlainLoop) {
  for (const int dim : {4, 8, 12, 60, 64, 68, 80, 96, 112, 128, 192, 256, 576}) {
    const auto n = static_cast<std::size_t>(dim);
    const std::vector<float> x = gaussian(n, 1);
    const std::vector<float> m = gaussian(n * n, 2);
    std::vector<float> y(n, NAN);
    GetParam().row_times_matrix(x.data(), m.data(), dim, y.data());
    for (std::size_t j = 0; j < n; ++j) {
      float sum = 0;
      for (std::size_t i = 0; i < n; ++i) {
        const volatile float product = x[i] * m[i * n + j];  // volatile: no fused multiply-add in the oracle
        sum += product;
      }
      ASSERT_EQ(y[j], sum) << "dim " << dim << " column " << j;
    }
  }
}

TEST_P(RowKernelsOf, C7_EveryByteUnpacksToItsFourCodes) {
  std::vector<std::uint8_t> bytes(256 + 3);  // an odd number of bytes: the tail of the vector loop
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i);
  std::vector<float> y(4 * bytes.size());
  GetParam().unpack(bytes.data(), bytes.size(), {0.375F, -1.25F}, y.data());
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    for (std::size_t k = 0; k < 4; ++k) {
      const auto code = static_cast<float>((bytes[i] >> (2 * k)) & 3);
      ASSERT_EQ(y[4 * i + k], -1.25F + 0.375F * code) << "byte " << i << " code " << k;
    }
  }
}

TEST_P(RowKernelsOf, C7_PackingWhatWasUnpackedGivesEveryByteBack) {
  std::vector<std::uint8_t> bytes(256);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i);
  std::vector<float> y(1024);
  GetParam().unpack(bytes.data(), bytes.size(), {0.5F, 3.0F}, y.data());
  std::vector<std::uint8_t> back(256);
  EXPECT_EQ(GetParam().pack(y.data(), y.size(), {0.5F, 3.0F}, back.data()), 0U);
  EXPECT_EQ(back, bytes);
}

TEST_P(RowKernelsOf, PackRoundsToTheNearestLevelAndCountsWhatLiesOutside) {
  const Int2Grid grid{1.0F, 0.0F};
  // Ties go up; -0.5 and 3.49 are still inside.
  const std::array<float, 12> y = {-0.5F, 0.49F, 0.5F, 1.5F, 2.49F, 2.5F, 3.0F, 3.49F, -0.51F, -100.0F, 3.5F, 1e9F};
  const std::array<unsigned, 12> expected = {0, 0, 1, 2, 2, 3, 3, 3, 0, 0, 3, 3};
  std::array<std::uint8_t, 3> codes{};
  EXPECT_EQ(GetParam().pack(y.data(), y.size(), grid, codes.data()), 4U);
  for (std::size_t i = 0; i < y.size(); ++i) EXPECT_EQ((unsigned{codes[i / 4]} >> (2 * (i % 4))) & 3U, expected[i]) << y[i];
}

// The order of GainError: element i of m is that of 2 m, plus its element i + m; the quads are the last of them.
float tree(const std::vector<float>& quads, std::size_t i, std::size_t m) {
  if (m >= quads.size()) return i < quads.size() ? quads[i] : 0.0F;
  return tree(quads, i, 2 * m) + tree(quads, i + m, 2 * m);
}

float ordered_sum(const std::vector<float>& terms) {
  std::vector<float> quads;
  for (std::size_t i = 0; i < terms.size(); i += 4) quads.push_back((terms[i] + terms[i + 1]) + (terms[i + 2] + terms[i + 3]));
  return tree(quads, 0, 1);
}

GainError gain_error_by_definition(const std::vector<float>& x, float scale, MidRiseRow grid,
                                   const std::vector<float>& weight) {
  std::vector<float> error;
  std::vector<float> radial;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float y = x[i] * scale * grid.inverse_step[i];
    const float levels = 2.0F * grid.half_levels[i];
    const float code = std::floor(y + grid.half_levels[i]);
    const float zh = (code >= 0.0F ? std::min(code, levels - 1.0F) : 0.0F) - (levels - 1.0F) / 2.0F;
    error.push_back((zh - y) * (zh - y) * weight[i]);
    radial.push_back(y * (zh - y) * weight[i]);
  }
  return {ordered_sum(error), ordered_sum(radial)};
}

// Which NaN it is depends on the processor, and nobody looks.
testing::AssertionResult same_bits(float a, float b) {
  if ((std::isnan(a) && std::isnan(b)) || std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b)) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure() << fmt::format("{} ({:a}) is not {} ({:a})", a, a, b, b);
}

constexpr std::size_t kSumSizes[] = {32, 64, 96, 128, 160, 256, 1024};

TEST_P(RowKernelsOf, GainErrorIsBitIdenticalToTheDefinition) {
  const auto check = [](const std::vector<float>& x, float scale, MidRiseRow grid, const std::vector<float>& weight) {
    const GainError want = gain_error_by_definition(x, scale, grid, weight);
    const RowKernels& baseline = row_kernel_sets().back();
    for (const RowKernels* k : {&GetParam(), &baseline}) {
      const GainError got = k->gain_error(x.data(), scale, grid, weight.data(), x.size());
      EXPECT_TRUE(same_bits(got.error, want.error)) << "error of " << x.size() << ", scale " << scale;
      EXPECT_TRUE(same_bits(got.radial, want.radial)) << "radial of " << x.size() << ", scale " << scale;
    }
    return want;
  };
  for (const std::size_t n : kSumSizes) {
    for (const std::size_t missing : {0U, 1U, 12U, 31U}) {
      const std::vector<float> steps = gaussian(n, n + missing);
      std::vector<float> inverse_step(n, 0.0F);
      std::vector<float> half_levels(n, 0.5F);
      std::vector<float> weight(n, 0.0F);
      for (std::size_t i = 0; i + missing < n; ++i) {
        const float step = 0.05F + std::fabs(steps[i]);
        inverse_step[i] = 1.0F / step;
        half_levels[i] = std::array{2.0F, 8.0F, 32.0F, 128.0F}[i * 7 / 4 % 4];
        weight[i] = step * step;
      }
      const MidRiseRow grid{inverse_step.data(), half_levels.data()};
      const std::vector<float> x = gaussian(n, 1000 + n + missing, 3.0F);
      for (const float scale : {1.0F, 0.9576F, 0.004F, 30.0F, 1e6F, 1e-30F, 1e30F}) {  // from nothing to infinite sums
        const GainError e = check(x, scale, grid, weight);
        EXPECT_EQ(std::isfinite(e.error), scale < 1e20F);
      }
      std::vector<float> odd(n, 0.0F);
      EXPECT_GT(check(odd, 1.0F, grid, weight).error, 0.0F);  // a zero lies on an edge
      std::fill(odd.begin(), odd.end(), -0.0F);
      check(odd, 1.0F, grid, weight);
      for (std::size_t i = 0; i < n; ++i) {  // edges between codes, to the last bit
        const float edge = std::round(x[i]) / std::max(inverse_step[i], 0.1F);
        odd[i] = i % 3 == 0 ? edge : std::nextafter(edge, i % 3 == 1 ? -100.0F : 100.0F);
      }
      check(odd, 1.0F, grid, weight);
      odd = x;
      odd[0] = INFINITY;
      EXPECT_EQ(check(odd, 1.0F, grid, weight).radial, -INFINITY);
      odd[n - missing - 1] = -INFINITY;
      EXPECT_EQ(check(odd, 1.0F, grid, weight).error, INFINITY);
      if (missing > 0) {  // beside the codes
        odd[n - 1] = INFINITY;
        EXPECT_TRUE(std::isnan(check(odd, 1.0F, grid, weight).error));
      }
      odd = x;
      odd[n / 2] = NAN;
      EXPECT_TRUE(std::isnan(check(odd, 1.0F, grid, weight).error));
    }
  }
}

TEST(RowKernels, SumOfSquaresIsBitIdenticalToTheDefinition) {
  for (const std::size_t n : kSumSizes) {
    for (const float sigma : {1.0F, 1e-19F, 1e12F}) {
      std::vector<float> x = gaussian(n, n, sigma);
      std::fill_n(x.end() - 5, 5, 0.0F);
      std::vector<float> squares;
      for (const float v : x) squares.push_back(v * v);
      EXPECT_TRUE(same_bits(sum_of_squares(x.data(), n), ordered_sum(squares))) << n << " of " << sigma;
    }
    std::vector<float> x(n, 0.0F);
    EXPECT_TRUE(same_bits(sum_of_squares(x.data(), n), 0.0F));
    x[n / 3] = -INFINITY;
    EXPECT_EQ(sum_of_squares(x.data(), n), INFINITY);
    x[n - 1] = NAN;
    EXPECT_TRUE(std::isnan(sum_of_squares(x.data(), n)));
  }
  EXPECT_EQ(sum_of_squares(nullptr, 0), 0.0F);
}

TEST(RowKernels, AllSetsGiveTheSameBits) {
  const std::vector<float> x = gaussian(192, 5);
  const std::vector<float> m = gaussian(192 * 192, 6, 0.1F);
  std::vector<std::vector<std::uint8_t>> codes;
  for (const RowKernels& k : row_kernel_sets()) {
    std::vector<float> y(192);
    k.row_times_matrix(x.data(), m.data(), 192, y.data());
    codes.emplace_back(48);
    k.pack(y.data(), y.size(), {0.7F, -1.0F}, codes.back().data());
  }
  EXPECT_STREQ(row_kernel_sets().back().name, "baseline");
  for (const auto& c : codes) EXPECT_EQ(c, codes.front());
}

}  // namespace
}  // namespace oscar
