// Configurations and helpers shared by the tests of spectral keys and values.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "codec/test_rows.h"
#include "oscar/base/error.h"
#include "oscar/codec/spectral.h"

namespace oscar::test {

constexpr int kHeadSizes[] = {64, 80, 96, 112, 128, 192, 256};
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
// A gain byte of values is within half an eighth of an octave.
inline const double kGainRounding = std::pow(2.0, 1.0 / 16.0) * (1 + 1e-5);

// Best steps of a uniform quantiser of a unit Gaussian with 2, 4, 6 or 8 bits, and the squared error they leave (Max 1960).
constexpr float kGaussianStep[] = {0.9957F, 0.3352F, 0.1041F, 0.0308F};
constexpr double kGaussianDistortion[] = {0.11885, 0.01154, 0.00104, 9.5e-5};

inline std::size_t size_of(int n) { return static_cast<std::size_t>(n); }

inline Rope rope_of(RopePairing pairing, int n_rot, int dim) {
  RopeParams p;
  p.pairing = pairing;
  p.n_rot = n_rot;
  p.attn_factor = 1.25F;
  return {p, dim};
}

// T = I, all coordinates of one width, steps of a unit Gaussian, every coordinate counted in the norm.
inline SpectralKeyHead plain_head(int dim, int width) {
  SpectralKeyHead head;
  head.transform = head.inverse = MatrixF::Identity(dim, dim);
  head.width.assign(size_of(dim), width);
  head.step.assign(size_of(dim), width == 0 ? 1.0F : kGaussianStep[width / 2 - 1]);
  head.inverse_sigma.assign(size_of(dim), 1.0F);
  return head;
}

// Widths of every kind in an order of no kind, digits a multiple of 16, a transform that is far from orthogonal.
inline SpectralKeyHead random_head(int dim, unsigned seed) {
  std::mt19937 rng(seed);
  SpectralKeyHead head = plain_head(dim, 0);
  int digits = 0;
  for (int quad = 0; quad < dim / 4; ++quad) {
    const int width = 2 * static_cast<int>(rng() % 5);
    std::fill_n(head.width.begin() + 4 * quad, 4, width);
    digits += 2 * width;
  }
  for (int quad = 0; digits % kSpectralSlots != 0; ++quad) {  // one more level for a quad that has room
    const int width = head.width[size_of(4 * quad)];
    if (width == kSpectralMaxWidth) continue;
    std::fill_n(head.width.begin() + 4 * quad, 4, width + 2);
    digits += 4;
  }
  const MatrixD left = random_rotation(dim, seed + 1).cast<double>();
  const MatrixD right = random_rotation(dim, seed + 2).cast<double>();
  VectorD scale(dim);
  for (int d = 0; d < dim; ++d) scale[d] = std::pow(0.3, 2.0 * d / dim);
  head.transform = (left * scale.asDiagonal() * right).cast<float>();
  head.inverse = (right.transpose() * scale.cwiseInverse().asDiagonal() * left.transpose()).cast<float>();
  for (int d = 0; d < dim; ++d) {
    const float sigma = 0.5F + 0.01F * static_cast<float>(d % 7);
    const int width = head.width[size_of(d)];
    if (width > 0) head.step[size_of(d)] = sigma * kGaussianStep[width / 2 - 1];
    head.inverse_sigma[size_of(d)] = d < dim / 2 ? 1.0F / sigma : 0.0F;
  }
  return head;
}

inline MatrixF matrix_of(const std::vector<float>& values, int rows) {
  return Eigen::Map<const MatrixF>(values.data(), rows, static_cast<Eigen::Index>(values.size()) / rows);
}

inline std::vector<std::uint8_t> encode(const Codec& codec, std::span<const float> row, std::int64_t position,
                                        EncodeStats& stats) {
  std::vector<std::uint8_t> code(codec.row_bytes(), 0xAA);
  codec.encode(row, position, code, stats);
  return code;
}
inline std::vector<std::uint8_t> encode(const Codec& codec, std::span<const float> row, std::int64_t position = 0) {
  EncodeStats stats;
  return encode(codec, row, position, stats);
}

inline std::vector<float> decode(const Codec& codec, std::span<const std::uint8_t> code, std::int64_t position = 0) {
  std::vector<float> out(size_of(codec.n_head_kv() * codec.head_dim()), kNan);
  codec.decode(code, position, out);
  return out;
}

inline std::vector<float> round_trip(const Codec& codec, std::span<const float> row, std::int64_t position = 0) {
  return decode(codec, encode(codec, row, position), position);
}

inline double dot(std::span<const float> a, std::span<const float> b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

inline bool all_finite(std::span<const float> values) {
  return std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); });
}

}  // namespace oscar::test
