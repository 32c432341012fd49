// Rows and rotations for the codec and cache tests; everything is a function of the seed.
#pragma once

#include <Eigen/QR>

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "oscar/base/matrix.h"

namespace oscar::test {

inline std::vector<float> gaussian(std::size_t n, std::uint64_t seed, float sigma = 1.0F) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal(0.0F, sigma);
  std::vector<float> row(n);
  for (float& x : row) x = normal(rng);
  return row;
}

inline MatrixF random_rotation(int dim, std::uint64_t seed) {
  const std::vector<float> values = gaussian(static_cast<std::size_t>(dim) * static_cast<std::size_t>(dim), seed);
  const MatrixD m = Eigen::Map<const MatrixF>(values.data(), dim, dim).cast<double>();
  const MatrixD q = Eigen::HouseholderQR<MatrixD>(m).householderQ();
  return q.cast<float>();
}

// |a - b|^2 / |b|^2
template <class A, class B>
double relative_error(const A& a, const B& b) {
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    error += d * d;
    norm += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  return error / norm;
}

}  // namespace oscar::test
