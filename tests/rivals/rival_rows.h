// What the tests of simulated codecs share. Definitions here are written anew, in double, from the papers' descriptions.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "codec/test_rows.h"
#include "oscar/rivals/rivals.h"

namespace oscar::test {

using Bytes = std::vector<std::uint8_t>;

inline std::shared_ptr<const Codec> rival(std::string_view name, bool is_k, int heads, int dim, Rope rope = {},
                                          MatrixF mean = {}) {
  return make_rival(name, is_k, {heads, dim, std::move(rope), std::move(mean)});
}

inline Rope neox_rope(int dim, int n_rot) {
  RopeParams p;
  p.pairing = RopePairing::neox;
  p.n_rot = n_rot;
  return {p, dim};
}

// rows: [tokens, heads * dim] at positions first ..; the decoded rows, all encoded before any is decoded.
inline MatrixF round_trip(const Codec& codec, const MatrixF& rows, std::int64_t first = 0) {
  EncodeStats stats;
  const auto n = static_cast<std::size_t>(rows.cols());
  std::vector<Bytes> codes(static_cast<std::size_t>(rows.rows()), Bytes(codec.row_bytes()));
  for (Eigen::Index t = 0; t < rows.rows(); ++t)
    codec.encode({rows.data() + t * rows.cols(), n}, first + t, codes[static_cast<std::size_t>(t)], stats);
  MatrixF decoded(rows.rows(), rows.cols());
  for (Eigen::Index t = 0; t < rows.rows(); ++t)
    codec.decode(codes[static_cast<std::size_t>(t)], first + t, {decoded.data() + t * rows.cols(), n});
  return decoded;
}

inline MatrixF gaussian_rows(int tokens, int width, std::uint64_t seed) {
  const std::vector<float> x = gaussian(static_cast<std::size_t>(tokens) * static_cast<std::size_t>(width), seed);
  return Eigen::Map<const MatrixF>(x.data(), tokens, width);
}

inline double error_of(const MatrixF& decoded, const MatrixF& rows) {
  return (decoded - rows).cast<double>().squaredNorm() / rows.cast<double>().squaredNorm();
}

inline MatrixD walsh(int dim) {
  MatrixD h(dim, dim);
  for (unsigned i = 0; i < static_cast<unsigned>(dim); ++i) {
    for (unsigned j = 0; j < static_cast<unsigned>(dim); ++j)
      h(i, j) = (std::popcount(i & j) % 2 != 0 ? -1.0 : 1.0) / std::sqrt(static_cast<double>(dim));
  }
  return h;
}

// How far `decoded` is from the definition "the nearest level of lo + step * (0 .. largest) to each value", in steps: the
// largest distance from a level, or by how much another level would have been nearer. Only rounding is left of the right
// answer.
inline double off_grid(const VectorD& x, const VectorD& decoded, double lo, double step, int largest) {
  double off = 0;
  for (Eigen::Index i = 0; i < x.size(); ++i) {
    double to_value = std::numeric_limits<double>::infinity();
    double to_decoded = to_value;
    for (int code = 0; code <= largest; ++code) {
      to_value = std::min(to_value, std::abs(x[i] - lo - step * code));
      to_decoded = std::min(to_decoded, std::abs(decoded[i] - lo - step * code));
    }
    off = std::max({off, to_decoded / step, (std::abs(x[i] - decoded[i]) - to_value) / step});
  }
  return off;
}
inline double off_min_max(const VectorD& x, const VectorD& decoded, int bits) {
  const int largest = (1 << bits) - 1;
  return off_grid(x, decoded, x.minCoeff(), (x.maxCoeff() - x.minCoeff()) / largest, largest);
}

}  // namespace oscar::test
