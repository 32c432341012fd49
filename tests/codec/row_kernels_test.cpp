#include "codec/row_kernels.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <vector>

#include "codec/test_rows.h"

namespace oscar {
namespace {

using test::gaussian;

TEST(RowKernels, ProductIsBitIdenticalToThePlainLoop) {
  for (const int dim : {4, 8, 12, 60, 64, 68, 80, 96, 112, 128, 192, 256, 576}) {
    const auto n = static_cast<std::size_t>(dim);
    const std::vector<float> x = gaussian(n, 1);
    const std::vector<float> m = gaussian(n * n, 2);
    std::vector<float> y(n, NAN);
    row_times_matrix(x.data(), m.data(), dim, y.data());
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

TEST(RowKernels, C7_EveryByteUnpacksToItsFourCodes) {
  std::vector<std::uint8_t> bytes(256 + 3);  // an odd number of bytes: the tail of the vector loop
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i);
  std::vector<float> y(4 * bytes.size());
  int2_unpack(bytes.data(), bytes.size(), 0.375F, -1.25F, y.data());
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    for (std::size_t k = 0; k < 4; ++k) {
      const auto code = static_cast<float>((bytes[i] >> (2 * k)) & 3);
      ASSERT_EQ(y[4 * i + k], -1.25F + 0.375F * code) << "byte " << i << " code " << k;
    }
  }
}

TEST(RowKernels, C7_PackingWhatWasUnpackedGivesEveryByteBack) {
  std::vector<std::uint8_t> bytes(256);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i);
  std::vector<float> y(1024);
  int2_unpack(bytes.data(), bytes.size(), 0.5F, 3.0F, y.data());
  std::vector<std::uint8_t> back(256);
  EXPECT_EQ(int2_pack(y.data(), y.size(), {0.5F, 3.0F}, back.data()), 0U);
  EXPECT_EQ(back, bytes);
}

TEST(RowKernels, PackRoundsToTheNearestLevelAndCountsWhatLiesOutside) {
  const Int2Grid grid{1.0F, 0.0F};
  // Ties go up; -0.5 and 3.49 are still inside.
  const std::array<float, 12> y = {-0.5F, 0.49F, 0.5F, 1.5F, 2.49F, 2.5F, 3.0F, 3.49F, -0.51F, -100.0F, 3.5F, 1e9F};
  const std::array<unsigned, 12> expected = {0, 0, 1, 2, 2, 3, 3, 3, 0, 0, 3, 3};
  std::array<std::uint8_t, 3> codes{};
  EXPECT_EQ(int2_pack(y.data(), y.size(), grid, codes.data()), 4U);
  for (std::size_t i = 0; i < y.size(); ++i) EXPECT_EQ((codes[i / 4] >> (2 * (i % 4))) & 3U, expected[i]) << y[i];
}

TEST(RowKernels, StepZeroGivesCodesZero) {
  const std::array<float, 8> y = {1, 2, 3, 4, 5, 6, 7, 8};
  std::array<std::uint8_t, 2> codes = {0xFF, 0xFF};
  EXPECT_EQ(int2_pack(y.data(), y.size(), {0.0F, 1.0F}, codes.data()), 0U);
  EXPECT_EQ(codes[0] | codes[1], 0);
}

}  // namespace
}  // namespace oscar
