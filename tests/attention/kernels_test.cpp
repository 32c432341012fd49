// Every table of kernels against plain double-precision loops.
#include "attention/kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "oscar/attention/attention.h"
#include "oscar/base/error.h"
#include "oscar/base/half.h"
#include "world.h"

namespace oscar::attention {
namespace {

constexpr float kInvisible = -std::numeric_limits<float>::infinity();

std::vector<float> random_values(std::size_t n, unsigned seed) {
  std::mt19937 rng(seed);
  std::vector<float> values(n);
  for (float& x : values) x = test::normal(rng);
  return values;
}

class KernelsTest : public ::testing::TestWithParam<std::string> {
 protected:
  const Kernels& kernels() {
    const test::CpuPath path(GetParam());
    return active_kernels();
  }
};

INSTANTIATE_TEST_SUITE_P(Paths, KernelsTest, ::testing::ValuesIn(test::all_paths()), test::path_label);

TEST_P(KernelsTest, WidenIsExactForEveryHalf) {
  std::vector<std::uint16_t> halves(65536);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
  for (const int n : {65536, 65529, 5}) {
    std::vector<float> out(65537, -1.0F);
    kernels().widen(halves.data(), n, out.data());
    for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
      const float want = half_to_float(halves[i]);
      if (std::isnan(want)) {
        ASSERT_TRUE(std::isnan(out[i])) << i;
      } else {
        ASSERT_EQ(out[i], want) << i;
      }
    }
    EXPECT_EQ(out[static_cast<std::size_t>(n)], -1.0F);
  }
}

TEST_P(KernelsTest, MaskRowReportsWhatItHolds) {
  std::vector<std::uint16_t> mask(kTile, 0xFC00);
  std::vector<float> bias(kTile);
  EXPECT_EQ(kernels().mask_row(mask.data(), bias.data()), kSomeBias);
  EXPECT_EQ(bias[63], kInvisible);
  mask[63] = float_to_half(-1.5F);
  EXPECT_EQ(kernels().mask_row(mask.data(), bias.data()), kSomeBias | kSomeVisible);
  EXPECT_EQ(bias[63], -1.5F);
  std::fill(mask.begin(), mask.end(), std::uint16_t{0});
  EXPECT_EQ(kernels().mask_row(mask.data(), bias.data()), kSomeVisible);
}

TEST_P(KernelsTest, DotsAndTransposedProductAgreeWithDouble) {
  for (const int dim : {8, 64, 80, 256, 384}) {
    for (const int rows : {1, 2, 3, 4, 5, 7, 16, 33}) {
      const int ld = dim + 8;
      const std::vector<float> q = random_values(static_cast<std::size_t>(rows * ld), 1);
      const std::vector<float> k = random_values(static_cast<std::size_t>(kTile * ld), 2);
      std::vector<float> direct(static_cast<std::size_t>(rows * kTile));
      kernels().dots(q.data(), ld, rows, k.data(), ld, dim, direct.data());
      std::vector<float> panels(static_cast<std::size_t>(kTile * dim));
      kernels().transpose(k.data(), ld, dim, panels.data());
      std::vector<float> product(direct.size());
      for (int p = 0; p < kTile; p += kPanel) {
        kernels().multiply(q.data(), ld, rows, dim, panels.data() + p * dim, kPanel, kPanel, product.data() + p, kTile, false);
      }
      for (int r = 0; r < rows; ++r) {
        for (int j = 0; j < kTile; ++j) {
          double want = 0.0;
          double size = 0.0;
          for (int d = 0; d < dim; ++d) {
            const double term = static_cast<double>(q[static_cast<std::size_t>(r * ld + d)]) *
                                static_cast<double>(k[static_cast<std::size_t>(j * ld + d)]);
            want += term;
            size += std::abs(term);
          }
          const auto at = static_cast<std::size_t>(r * kTile + j);
          ASSERT_NEAR(static_cast<double>(direct[at]), want, 1e-6 * size) << dim << " " << rows;
          ASSERT_NEAR(static_cast<double>(product[at]), want, 2e-6 * size) << dim << " " << rows;
        }
      }
    }
  }
}

TEST_P(KernelsTest, MultiplyAccumulates) {
  const int depth = kTile;
  for (const int rows : {1, 6, 11, 128}) {
    for (const int cols : {16, 64, 80}) {
      const std::vector<float> a = random_values(static_cast<std::size_t>(rows * depth), 3);
      const std::vector<float> b = random_values(static_cast<std::size_t>(depth * cols), 4);
      std::vector<float> c = random_values(static_cast<std::size_t>(rows * (cols + 2)), 5);
      const std::vector<float> before = c;
      kernels().multiply(a.data(), depth, rows, depth, b.data(), cols, cols, c.data(), cols + 2, true);
      for (int r = 0; r < rows; ++r) {
        for (int n = 0; n < cols + 2; ++n) {
          const auto at = static_cast<std::size_t>(r * (cols + 2) + n);
          double want = static_cast<double>(before[at]);
          if (n < cols) {
            for (int i = 0; i < depth; ++i) {
              want += static_cast<double>(a[static_cast<std::size_t>(r * depth + i)]) *
                      static_cast<double>(b[static_cast<std::size_t>(i * cols + n)]);
            }
            ASSERT_NEAR(static_cast<double>(c[at]), want, 3e-5);
          } else {
            ASSERT_EQ(c[at], before[at]) << "written beyond the columns";
          }
        }
      }
    }
  }
}

TEST_P(KernelsTest, WeightedSumOfAnyNumberOfRows) {
  constexpr std::size_t kCols = 48;
  for (const std::size_t n : {0U, 1U, 9U}) {
    const std::vector<float> values = random_values(n * kCols, 10);
    const std::vector<float> weights = random_values(n, 11);
    std::vector<const float*> rows;
    for (std::size_t k = 0; k < n; ++k) rows.push_back(values.data() + k * kCols);
    std::vector<float> out(kCols + 1, -1.0F);
    kernels().weighted_sum(rows.data(), weights.data(), static_cast<int>(n), kCols, out.data());
    for (std::size_t i = 0; i < kCols; ++i) {
      double want = 0.0;
      for (std::size_t k = 0; k < n; ++k) want += static_cast<double>(weights[k]) * static_cast<double>(rows[k][i]);
      ASSERT_NEAR(static_cast<double>(out[i]), want, 1e-5);
    }
    EXPECT_EQ(out[kCols], -1.0F);
  }
}

TEST_P(KernelsTest, LogitsApplySoftcapSlopeAndMask) {
  for (const float softcap : {0.0F, 5.0F, 50.0F}) {
    for (const bool masked : {false, true}) {
      std::vector<float> s = random_values(kTile, 6);
      for (float& x : s) x *= 20.0F;
      const std::vector<float> before = s;
      std::vector<float> bias = random_values(kTile, 7);
      bias[0] = bias[17] = bias[63] = kInvisible;
      const float max = kernels().logits(s.data(), masked ? bias.data() : nullptr, 0.25F, softcap);
      double want_max = -std::numeric_limits<double>::infinity();
      for (std::size_t j = 0; j < s.size(); ++j) {
        double want = static_cast<double>(before[j]);
        if (softcap != 0.0F) want = static_cast<double>(softcap) * std::tanh(want / static_cast<double>(softcap));
        if (masked) want += 0.25 * static_cast<double>(bias[j]);
        want_max = std::max(want_max, want);
        if (masked && bias[j] == kInvisible) {
          ASSERT_EQ(s[j], kInvisible);
        } else {
          ASSERT_NEAR(static_cast<double>(s[j]), want, 1e-5);
        }
      }
      EXPECT_NEAR(static_cast<double>(max), want_max, 1e-5);
    }
  }
}

TEST_P(KernelsTest, ASlopeOfZeroStillHidesMaskedCells) {
  std::vector<float> s(kTile, 1.0F);
  std::vector<float> bias(kTile, kInvisible);
  bias[5] = -3.0F;
  EXPECT_EQ(kernels().logits(s.data(), bias.data(), 0.0F, 0.0F), 1.0F);
  EXPECT_EQ(s[5], 1.0F);
  EXPECT_EQ(s[6], kInvisible);
}

TEST_P(KernelsTest, ExponentialsAreAccurateAndExactlyZeroWhenHidden) {
  for (float span = 0.001F; span < 120.0F; span *= 1.7F) {
    std::vector<float> s(kTile);
    for (std::size_t j = 0; j < s.size(); ++j) s[j] = 3.0F - span * static_cast<float>(j) / 63.0F;
    s[9] = kInvisible;
    const std::vector<float> before = s;
    const float sum = kernels().exponentials(s.data(), 3.0F);
    double want_sum = 0.0;
    for (std::size_t j = 0; j < s.size(); ++j) {
      const double want = std::exp(static_cast<double>(before[j]) - 3.0);
      want_sum += want;
      if (want > 1.3e-38) {
        ASSERT_NEAR(static_cast<double>(s[j]) / want, 1.0, 3e-7) << before[j];
      } else {
        ASSERT_LE(s[j], 1.3e-38F);
      }
    }
    EXPECT_EQ(s[0], 1.0F);
    EXPECT_EQ(s[9], 0.0F);
    EXPECT_NEAR(static_cast<double>(sum) / want_sum, 1.0, 1e-6);
  }
}

TEST_P(KernelsTest, ComplexMultiplyAlsoInPlace) {
  const std::size_t n = 48;
  const std::size_t rows = 3;
  std::vector<float> a = random_values(rows * 2 * n, 8);
  const std::vector<float> b = random_values(2 * n, 9);
  std::vector<float> out(a.size());
  kernels().complex_multiply(a.data(), 3, b.data(), 48, out.data());
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t i = 0; i < n; ++i) {
      const std::size_t re = 2 * n * r + i;
      EXPECT_NEAR(out[re], a[re] * b[i] - a[re + n] * b[n + i], 1e-6F);
      EXPECT_NEAR(out[re + n], a[re] * b[n + i] + a[re + n] * b[i], 1e-6F);
    }
  }
  kernels().complex_multiply(a.data(), 3, b.data(), 48, a.data());
  EXPECT_EQ(a, out);
}

TEST(CpuPath, ScalarIsAlwaysThereAndLast) {
  ASSERT_FALSE(cpu_paths().empty());
  EXPECT_EQ(cpu_paths().back(), "scalar");
  EXPECT_EQ(cpu_path(), cpu_paths().front());
}

TEST(CpuPath, EnvironmentForcesAPathAndRefusesAnUnknownOne) {
  {
    const test::CpuPath path("scalar");
    EXPECT_EQ(cpu_path(), "scalar");
  }
  const test::CpuPath path("mmx");
  try {
    AttentionJob job;
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("OSCAR_CPU=mmx"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("scalar"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace oscar::attention
