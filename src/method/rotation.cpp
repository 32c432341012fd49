#include "oscar/method/rotation.h"

#include <Eigen/Eigenvalues>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "oscar/base/error.h"

namespace oscar {
namespace {

constexpr std::array<std::pair<Composition, std::string_view>, 9> kNames{{
    {Composition::plain, "plain"},
    {Composition::pbr, "pbr"},
    {Composition::br, "br"},
    {Composition::br_h128, "br_h128"},
    {Composition::r_h, "r_h"},
    {Composition::h_pbr, "h_pbr"},
    {Composition::h_r_pbr, "h_r_pbr"},
    {Composition::h_pbr_r, "h_pbr_r"},
    {Composition::r_h_pbr, "r_h_pbr"},
}};

// Four numbers in a register: compilers do not find them in loops over short strides.
constexpr int kLanes = 4;
using Lanes [[gnu::vector_size(kLanes * sizeof(float))]] = float;

Lanes load(const float* p) {
  Lanes v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
void store(float* p, Lanes v) { std::memcpy(p, &v, sizeof v); }

unsigned checked_dim(int dim, std::string_view what) {
  if (dim <= 0) fail("{}: dimension {} is not positive", what, dim);
  return static_cast<unsigned>(dim);
}

unsigned reverse_bits(unsigned value, unsigned size) {
  unsigned reversed = 0;
  for (unsigned bit = 1; bit < size; bit <<= 1) {
    reversed = (reversed << 1) | ((value & bit) != 0 ? 1U : 0U);
  }
  return reversed;
}

}  // namespace

Eigen2 symmetric_eigen(const MatrixD& moment) {
  if (moment.rows() != moment.cols() || moment.rows() == 0) {
    fail("eigen: a moment must be square, but this one is {} x {}", moment.rows(), moment.cols());
  }
  if (!moment.allFinite()) fail("eigen: the moment contains NaN or infinite values");
  const Eigen::MatrixXd symmetric = 0.5 * (moment + moment.transpose());
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(symmetric);
  if (solver.info() != Eigen::Success) fail("eigen: the decomposition did not converge");
  Eigen2 result{solver.eigenvalues().transpose(), solver.eigenvectors()};
  for (Eigen::Index j = 0; j < result.vectors.cols(); ++j) {
    auto column = result.vectors.col(j);
    // Entries that tie up to rounding must not decide by their rounding: the first of them does.
    const double largest = column.cwiseAbs().maxCoeff() * (1.0 - 1e-9);
    Eigen::Index i = 0;
    while (std::abs(column[i]) < largest) ++i;
    if (column[i] < 0.0) column = -column;
  }
  return result;
}

Eigen::Index numerical_rank(const VectorD& eigenvalues) {
  constexpr double kTolerance = 1e-12;
  return (eigenvalues.array() > kTolerance * eigenvalues[eigenvalues.size() - 1]).count();
}

MatrixD hadamard(int dim) {
  const unsigned size = checked_dim(dim, "hadamard");
  const unsigned block = size & (~size + 1U);  // largest power of two that divides it
  const double unit = 1.0 / std::sqrt(static_cast<double>(block));
  MatrixD h = MatrixD::Zero(dim, dim);
  for (unsigned i = 0; i < size; ++i) {
    for (unsigned j = 0; j < block; ++j) {
      const bool negative = (std::popcount((i % block) & j) & 1) != 0;
      h(i, (i / block) * block + j) = negative ? -unit : unit;
    }
  }
  return h;
}

void hadamard_in_place(float* x, int dim) {
  const int block = dim & -dim;
  if (block == 2) {
    for (int i = 0; i < dim; i += 2) {
      const float a = x[i];
      x[i] = a + x[i + 1];
      x[i + 1] = a - x[i + 1];
    }
  } else if (block >= kLanes) {
    for (int i = 0; i < dim; i += kLanes) {
      Lanes v = load(x + i);
      v = __builtin_shufflevector(v, v, 1, 0, 3, 2) + v * Lanes{1, -1, 1, -1};
      store(x + i, __builtin_shufflevector(v, v, 2, 3, 0, 1) + v * Lanes{1, 1, -1, -1});
    }
    for (int stride = kLanes; stride < block; stride *= 2) {
      for (int first = 0; first < dim; first += 2 * stride) {
        for (int i = first; i < first + stride; i += kLanes) {
          const Lanes a = load(x + i);
          const Lanes b = load(x + i + stride);
          store(x + i, a + b);
          store(x + i + stride, a - b);
        }
      }
    }
  }
  const auto unit = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
  for (int i = 0; i < dim; ++i) x[i] *= unit;
}

MatrixD bit_reversal(int dim) {
  const unsigned size = checked_dim(dim, "bit reversal");
  MatrixD p = MatrixD::Zero(dim, dim);
  for (unsigned j = 0; j < size; ++j) {
    const unsigned source = std::has_single_bit(size) ? reverse_bits(j, size) : j;
    p(size - 1 - source, j) = 1.0;
  }
  return p;
}

Composition parse_composition(std::string_view name) {
  std::string known;
  for (const auto& [composition, text] : kNames) {
    if (text == name) return composition;
    known += known.empty() ? "" : ", ";
    known += text;
  }
  fail("unknown composition '{}': use one of {}", name, known);
}

std::string_view to_string(Composition composition) {
  for (const auto& [value, text] : kNames) {
    if (value == composition) return text;
  }
  fail("composition {} does not exist", static_cast<int>(composition));
}

MatrixD compose(Composition composition, const MatrixD& eigenvectors) {
  if (eigenvectors.rows() != eigenvectors.cols()) {
    fail("compose: the eigenvectors must be square, but are {} x {}", eigenvectors.rows(), eigenvectors.cols());
  }
  const auto dim = static_cast<int>(eigenvectors.rows());
  const MatrixD& r = eigenvectors;
  switch (composition) {
    case Composition::plain:
      return r;
    case Composition::pbr:
      return bit_reversal(dim);
    case Composition::br:
      return r * bit_reversal(dim);
    case Composition::br_h128:
      return r * bit_reversal(dim) * hadamard(dim);
    case Composition::r_h:
      return r * hadamard(dim);
    case Composition::h_pbr:
      return hadamard(dim) * bit_reversal(dim);
    case Composition::h_r_pbr:
      return hadamard(dim) * r * bit_reversal(dim);
    case Composition::h_pbr_r:
      return hadamard(dim) * bit_reversal(dim) * r;
    case Composition::r_h_pbr:
      return r * hadamard(dim) * bit_reversal(dim);
  }
  fail("composition {} does not exist", static_cast<int>(composition));
}

double orthogonality_error(const MatrixF& rotation) {
  const MatrixD r = rotation.cast<double>();
  return (r.transpose() * r - MatrixD::Identity(r.cols(), r.cols())).cwiseAbs().maxCoeff();
}

}  // namespace oscar
