#include "codec/row_kernels.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
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
