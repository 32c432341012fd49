// Methods of one token at a time, against their definitions.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "oscar/base/error.h"
#include "rivals/rival_rows.h"

namespace oscar {
namespace {

using test::error_of;
using test::gaussian_rows;
using test::neox_rope;
using test::off_grid;
using test::rival;
using test::round_trip;
using test::walsh;

constexpr double kRounding = 0.02;  // of binary16 metadata, in steps

TEST(NaiveInt2, IsMinMaxOfEachHead) {
  const int dim = 96;
  const MatrixF rows = gaussian_rows(20, 2 * dim, 1);
  for (const bool is_k : {true, false}) {
    const MatrixF decoded = round_trip(*rival("sim:naive-int2", is_k, 2, dim), rows);
    for (int t = 0; t < 20; ++t) {
      for (int h = 0; h < 2; ++h) {
        EXPECT_LT(test::off_min_max(rows.row(t).segment(h * dim, dim).cast<double>(),
                                    decoded.row(t).segment(h * dim, dim).cast<double>(), 2),
                  kRounding);
      }
    }
  }
}

// Grid of whole zero points: step (code - zero), zero = round(-clip min / step).
double off_zero_point(const VectorD& y, const VectorD& decoded, double clip) {
  const double step = clip * (y.maxCoeff() - y.minCoeff()) / 3;
  return off_grid(y, decoded, -step * std::nearbyint(-clip * y.minCoeff() / step), step, 3);
}

TEST(Quarot, IsAClippedGridInTheHadamardBasis) {
  const int dim = 64;
  const MatrixF rows = gaussian_rows(40, 2 * dim, 2);
  for (const bool is_k : {true, false}) {
    const MatrixF decoded = round_trip(*rival("sim:quarot-int2", is_k, 2, dim), rows);
    for (int t = 0; t < 40; ++t) {
      for (int h = 0; h < 2; ++h) {
        EXPECT_LT(off_zero_point(rows.row(t).segment(h * dim, dim).cast<double>() * walsh(dim),
                                 decoded.row(t).segment(h * dim, dim).cast<double>() * walsh(dim), 0.95),
                  kRounding);
      }
    }
  }
}

TEST(RotateKv, KeysAreCodedBeforeRopeWithFourHeadsTogether) {
  const int dim = 32, heads = 8, joint = 4 * dim;
  const Rope rope = neox_rope(dim, 32);
  const auto codec = rival("sim:rotatekv", true, heads, dim, rope);
  const MatrixF plain = gaussian_rows(20, heads * dim, 3);
  MatrixF rows = plain;
  for (int t = 0; t < 20; ++t) {
    for (int h = 0; h < heads; ++h) rope.apply({rows.data() + (t * heads + h) * dim, static_cast<std::size_t>(dim)}, 1000 + t);
  }
  MatrixF decoded = round_trip(*codec, rows, 1000);
  EXPECT_GT(error_of(decoded, rows), 0.05);
  for (int t = 0; t < 20; ++t) {
    for (int h = 0; h < heads; ++h)
      rope.undo({decoded.data() + (t * heads + h) * dim, static_cast<std::size_t>(dim)}, 1000 + t);
    for (int begin = 0; begin < heads * dim; begin += joint) {
      const VectorD y = plain.row(t).segment(begin, joint).cast<double>() * walsh(joint);
      const VectorD z = decoded.row(t).segment(begin, joint).cast<double>() * walsh(joint);
      for (int h = 0; h < joint; h += dim) EXPECT_LT(off_zero_point(y.segment(h, dim), z.segment(h, dim), 0.8), kRounding);
    }
  }
  // Values have no RoPE and a Hadamard of their own head.
  const MatrixF values = round_trip(*rival("sim:rotatekv", false, heads, dim), plain);
  EXPECT_LT(off_zero_point(plain.row(5).head(dim).cast<double>() * walsh(dim),
                           values.row(5).head(dim).cast<double>() * walsh(dim), 0.8),
            kRounding);
}

TEST(TurboQuant, KeepsTheLengthAndTheLloydMaxError) {
  const int dim = 128;
  const MatrixF rows = 7 * gaussian_rows(300, dim, 4);
  const auto check = [&](const char* name, double low, double high) {
    const MatrixF decoded = round_trip(*rival(name, true, 1, dim), rows);
    for (int t = 0; t < 300; ++t) EXPECT_NEAR(decoded.row(t).norm() / rows.row(t).norm(), 1, 6e-4);
    EXPECT_GT(error_of(decoded, rows), low);
    EXPECT_LT(error_of(decoded, rows), high);
  };
  // A vector of the same length at cosine sqrt(1 - d) is 2 - 2 sqrt(1 - d) away; d = .1175 and .03454.
  check("sim:turboquant-2", 0.115, 0.128);
  check("sim:turboquant-3", 0.033, 0.037);
  // Values: min-max, no rotation.
  const MatrixF values = round_trip(*rival("sim:turboquant-3", false, 1, dim), rows);
  for (int t = 0; t < 300; ++t)
    EXPECT_LT(test::off_min_max(rows.row(t).cast<double>(), values.row(t).cast<double>(), 3), kRounding);
}

TEST(SawInt4, RotatesKeysOnly) {
  const int dim = 64;
  const MatrixF rows = gaussian_rows(20, dim, 5);
  const MatrixF keys = round_trip(*rival("sim:saw-int4", true, 1, dim), rows);
  const MatrixF values = round_trip(*rival("sim:saw-int4", false, 1, dim), rows);
  for (int t = 0; t < 20; ++t) {
    const VectorD x = rows.row(t).cast<double>();
    EXPECT_LT(test::off_min_max(x * walsh(dim), keys.row(t).cast<double>() * walsh(dim), 4), kRounding);
    EXPECT_LT(test::off_min_max(x, values.row(t).cast<double>(), 4), kRounding);
  }
}

TEST(LlamaCache, ErrorsFromBothSides) {
  const MatrixF rows = gaussian_rows(200, 2 * 128, 6);
  const auto check = [&](const char* name, double low, double high) {
    for (const bool is_k : {true, false}) {
      const double error = error_of(round_trip(*rival(name, is_k, 2, 128), rows), rows);
      EXPECT_GT(error, low) << name;
      EXPECT_LT(error, high) << name;
    }
  };
  // Blocks of 32 of a Gaussian: the largest magnitude is about 2.35 sigma, the range about 4.1 sigma.
  check("sim:q8_0", 1.5e-5, 4e-5);  // (2.35 / 127)^2 / 12 = 2.9e-5
  check("sim:q4_0", 0.005, 0.010);  // (2.35 / 8)^2 / 12 = .0072
  check("sim:q4_0-plain", 0.005, 0.010);
  check("sim:q4_1", 0.005, 0.0075);  // (4.1 / 15)^2 / 12 = .0062
}

TEST(LlamaCache, TheHadamardSpreadsOutliersAndIsUndone) {
  MatrixF rows = gaussian_rows(50, 128, 7);
  rows.col(17).array() += 40.0F;
  const auto error = [&](const char* name, bool is_k) {
    return (round_trip(*rival(name, is_k, 1, 128), rows) - rows).squaredNorm() / 50;
  };
  EXPECT_LT(error("sim:q4_0", true), 0.7F * error("sim:q4_0-plain", true));
  // K is rotated as a whole, V in blocks of 64: the other block of V is as without the outlier.
  const MatrixF values = round_trip(*rival("sim:q4_0", false, 1, 128), rows);
  EXPECT_LT(error_of(values.rightCols(64), rows.rightCols(64)), 0.010);
  const MatrixF keys = round_trip(*rival("sim:q4_0", true, 1, 128), rows);
  EXPECT_GT(error_of(keys.rightCols(64), rows.rightCols(64)), 0.02);
}

TEST(LlamaCache, RowsMustBeWholeBlocks) {
  try {
    (void)rival("sim:q4_0", true, 1, 80);
    ADD_FAILURE();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), testing::AllOf(testing::HasSubstr("80"), testing::HasSubstr("32")));
  }
  EXPECT_EQ(rival("sim:q4_0", true, 2, 80)->row_bytes(), 2U * 80 * 4);  // blocks straddle heads
}

TEST(Fp8, RelativeErrorOfThreeMantissaBits) {
  const MatrixF rows = gaussian_rows(20, 64, 8);
  const MatrixF decoded = round_trip(*rival("sim:fp8-e4m3", true, 1, 64), rows);
  double largest = 0;
  for (Eigen::Index i = 0; i < rows.size(); ++i) {
    if (std::fabs(rows.data()[i]) < 0x1p-6F) continue;
    largest = std::max(largest, std::fabs(static_cast<double>(decoded.data()[i] / rows.data()[i]) - 1));
  }
  EXPECT_GT(largest, 0.05);
  EXPECT_LE(largest, 1.0 / 16);
}

}  // namespace
}  // namespace oscar
