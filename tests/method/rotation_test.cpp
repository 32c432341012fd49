#include "oscar/method/rotation.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <set>

#include "oscar/base/error.h"

namespace oscar {
namespace {

constexpr Composition kAll[] = {Composition::plain,   Composition::pbr,     Composition::br,
                                Composition::br_h128, Composition::r_h,     Composition::h_pbr,
                                Composition::h_r_pbr, Composition::h_pbr_r, Composition::r_h_pbr};

MatrixD random_moment(int dim, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  MatrixD x(2 * dim, dim);
  for (Eigen::Index i = 0; i < x.size(); ++i) x.data()[i] = normal(generator);
  for (int j = 0; j < dim; ++j) x.col(j) *= std::exp(-0.05 * j);
  return x.transpose() * x / (2.0 * dim);
}

class OfDimension : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Rotation, OfDimension, testing::Values(64, 80, 96, 128, 256));

TEST_P(OfDimension, EveryCompositionIsOrthogonal) {
  const Eigen2 eigen = symmetric_eigen(random_moment(GetParam(), 1));
  for (const Composition composition : kAll) {
    EXPECT_LT(orthogonality_error(compose(composition, eigen.vectors).cast<float>()), 1e-6) << to_string(composition);
  }
}

TEST_P(OfDimension, EigenvectorsDiagonaliseAscending) {
  const MatrixD moment = random_moment(GetParam(), 2);
  const Eigen2 eigen = symmetric_eigen(moment);
  const MatrixD diagonal = eigen.vectors.transpose() * moment * eigen.vectors;
  EXPECT_LT((diagonal - MatrixD(eigen.values.asDiagonal())).cwiseAbs().maxCoeff(), 1e-12 * moment.trace());
  for (Eigen::Index i = 1; i < eigen.values.size(); ++i) EXPECT_LE(eigen.values[i - 1], eigen.values[i]);
  for (Eigen::Index j = 0; j < eigen.vectors.cols(); ++j) {
    EXPECT_GT(eigen.vectors.col(j).maxCoeff(), -eigen.vectors.col(j).minCoeff() * (1.0 - 1e-6));
  }
}

// What makes the method work (design note, section 1): after U H no direction is over-weighted.
TEST_P(OfDimension, HadamardEqualisesTheDiagonalWithinItsBlocks) {
  const int dim = GetParam();
  const int block = dim & -dim;
  const MatrixD moment = random_moment(dim, 3);
  const Eigen2 eigen = symmetric_eigen(moment);
  const MatrixD r = compose(Composition::r_h, eigen.vectors);
  const MatrixD rotated = r.transpose() * moment * r;
  for (int i = 0; i < dim; ++i) {
    const double mean = eigen.values.segment(i / block * block, block).mean();
    EXPECT_NEAR(rotated(i, i) / mean, 1.0, 1e-9);
    if (block == dim) {
      EXPECT_NEAR(rotated(i, i), moment.trace() / dim, 1e-9 * moment.trace());
    }
  }
  const MatrixD plain = eigen.vectors.transpose() * moment * eigen.vectors;
  EXPECT_GT(plain.diagonal().maxCoeff(), 2.0 * plain.diagonal().mean());  // the moment was not flat to begin with
}

TEST(Rotation, HadamardIsSylvesters) {
  const MatrixD h = hadamard(8);
  for (unsigned i = 0; i < 8; ++i) {
    for (unsigned j = 0; j < 8; ++j) EXPECT_DOUBLE_EQ(h(i, j), (std::popcount(i & j) % 2 == 0 ? 1.0 : -1.0) / std::sqrt(8.0));
  }
  const MatrixD odd = hadamard(12);  // three blocks of 4
  EXPECT_DOUBLE_EQ(odd(5, 5), -0.5);
  EXPECT_DOUBLE_EQ(odd(5, 4), 0.5);
  EXPECT_DOUBLE_EQ(odd(5, 3), 0.0);
  EXPECT_TRUE(hadamard(7).isIdentity());
}

// perm[br(i)] = s[i], s = indices by descending eigenvalue; column j of M P is column perm[j] of M.
TEST(Rotation, BitReversalFollowsItsDefinition) {
  const int dim = 16;
  const MatrixD m = random_moment(dim, 4);
  const MatrixD permuted = m * bit_reversal(dim);
  for (int i = 0; i < dim; ++i) {
    const int reversed = ((i & 1) << 3) | ((i & 2) << 1) | ((i & 4) >> 1) | ((i & 8) >> 3);
    EXPECT_EQ(permuted.col(reversed), m.col(dim - 1 - i)) << i;  // ascending: the i-th largest is column dim - 1 - i
  }
  const MatrixD reversed_order = random_moment(12, 4) * bit_reversal(12);
  EXPECT_EQ(reversed_order.col(0), random_moment(12, 4).col(11));
}

TEST(Rotation, BitReversalSpreadsTheStrongAxesOverTheGroups) {
  const int dim = 64;
  const MatrixD p = bit_reversal(dim);
  for (const int groups : {2, 4, 8, 16}) {
    std::set<int> hit;
    for (int strong = 0; strong < groups; ++strong) {
      Eigen::Index column = 0;
      p.row(dim - 1 - strong).maxCoeff(&column);
      hit.insert(static_cast<int>(column) / (dim / groups));
    }
    EXPECT_EQ(hit.size(), static_cast<std::size_t>(groups));
  }
}

TEST(Rotation, CompositionsReadLeftToRight) {
  const int dim = 32;
  const MatrixD r = symmetric_eigen(random_moment(dim, 5)).vectors;
  const MatrixD h = hadamard(dim);
  const MatrixD p = bit_reversal(dim);
  const auto equal = [](const MatrixD& a, const MatrixD& b) { return (a - b).cwiseAbs().maxCoeff() < 1e-13; };
  EXPECT_TRUE(equal(compose(parse_composition("plain"), r), r));
  EXPECT_TRUE(equal(compose(parse_composition("pbr"), r), p));
  EXPECT_TRUE(equal(compose(parse_composition("br"), r), r * p));
  EXPECT_TRUE(equal(compose(parse_composition("br_h128"), r), r * p * h));
  EXPECT_TRUE(equal(compose(parse_composition("r_h"), r), r * h));
  EXPECT_TRUE(equal(compose(parse_composition("h_pbr"), r), h * p));
  EXPECT_TRUE(equal(compose(parse_composition("h_r_pbr"), r), h * r * p));
  EXPECT_TRUE(equal(compose(parse_composition("h_pbr_r"), r), h * p * r));
  EXPECT_TRUE(equal(compose(parse_composition("r_h_pbr"), r), r * h * p));
  for (const Composition composition : kAll) EXPECT_EQ(parse_composition(to_string(composition)), composition);
  EXPECT_THROW(parse_composition("h_r"), Error);
}

TEST(Rotation, B1DegenerateMomentsStillGiveOrthogonalBases) {
  MatrixD zero = MatrixD::Zero(64, 64);
  MatrixD rank_one = MatrixD::Zero(64, 64);
  rank_one(3, 3) = 1e-30;
  MatrixD zero_channel = random_moment(64, 6);
  zero_channel.row(5).setZero();
  zero_channel.col(5).setZero();
  for (const MatrixD& moment : {zero, rank_one, zero_channel}) {
    const MatrixF r = compose(Composition::r_h_pbr, symmetric_eigen(moment).vectors).cast<float>();
    EXPECT_TRUE(r.allFinite());
    EXPECT_LT(orthogonality_error(r), 1e-6);
  }
}

TEST(Rotation, RefusesWhatIsNotAMoment) {
  MatrixD broken = random_moment(8, 7);
  broken(1, 2) = std::nan("");
  EXPECT_THROW(symmetric_eigen(broken), Error);
  EXPECT_THROW(symmetric_eigen(MatrixD::Zero(3, 4)), Error);
  EXPECT_THROW(hadamard(0), Error);
  EXPECT_THROW(compose(Composition::r_h, MatrixD::Zero(3, 4)), Error);
}

}  // namespace
}  // namespace oscar
