// What coding rows with one layer's `spectral` codecs needs, as plain tables. Whoever follows them operation by operation
// (binary32, each operation rounded by itself, no fused multiply-add, products and quotients from the left, sums in ascending
// order unless said otherwise) writes the bytes of the CPU codec:
//
//   keys    x -= offset, x -= rest;  per pair (c, s) = binary32(magnitude cos, sin(position theta)), computed in binary64:
//           x_first -= m1 c - m2 s,  x_second -= m1 s + m2 c
//           z_j = sum_d x_d transform[d][j];  g0 = max(kSpectralMinNorm, sqrt(sum_j (z_j inverse_sigma_j)^2 / norm_count))
//           energy = sum z z over the coordinates of width > 0;  unless it is above 0 and, like the sum under g0, finite:
//           gain and codes 0
//           n0 = byte of g0;  the byte: of those that the search of oscar/codec/spectral.h looks at, 1 .. 255, the first of
//           least cost;  n0 if no cost is finite
//             g = its gain;  s = 1 / g;  y_j = z_j s inverse_step_j;  code = mid_rise(y_j, width_j);  zh = code - centre_j
//             error = sum (zh - y) (zh - y) weight;  radial = sum y (zh - y) weight
//             cost = (error + 4 radial (radial / (energy s s))) (g g)
//           the order of the sums energy, error and radial: GainError in src/codec/row_kernels.h
//   values  p = (position / 64) mod 4;  y_j = sum_d +- (x_d factor_d of p), - where d and j share an odd number of bits
//           r = sqrt(D / sum y y);  u = y r;  code = mid_rise(u value_inverse_step, 2)
//           g = D / (r sum u value_level[code]) / scale;  unless r is above 0 and finite: codes and gain 0
//   gain    of g = mantissa 2^exponent, as in codec/gain.h. K: byte n = 128 + 16 (exponent - 1) + the number of key_gain_edge
//           that the mantissa reaches, at least 1 and at most 255;  gain of byte n: gain[n]. V: n = 40 + 8 (exponent - 1) + the
//           number of value_gain_edge, at least 1 and at most 63;  byte n + 64 p
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "oscar/base/matrix.h"
#include "oscar/codec/spectral.h"
#include "oscar/paged/page_layout.h"

namespace oscar::paged {

// Static numbers of one coordinate of keys, in stored order. Without a code: inverse_step, weight and centre are 0.
struct KeyCoordinate {
  float inverse_sigma = 0;  // 0: not in the norm
  float inverse_step = 0;
  float weight = 0;  // step^2
  float centre = 0;  // (2^width - 1) / 2
};

struct EncodeTables : KeyMeanTables {
  int n_head_kv = 0, head_dim = 0;
  std::vector<MatrixF> transform;                      // per head [D, D], columns in stored order
  std::vector<std::vector<KeyCoordinate>> coordinate;  // per head [D]
  std::vector<int> norm_count;                         // [n_head_kv] at least 1
  // [kPatterns * n_head_kv, D], row p * n_head_kv + head: sign times the entry of the normalised Hadamard matrix
  MatrixF value_factor;
  std::vector<float> value_scale;  // [n_head_kv]
  float value_inverse_step = 0;
  std::array<float, 4> value_level{};
  std::array<float, 16> key_gain_edge{};
  std::array<float, 8> value_gain_edge{};
  std::array<float, 256> gain{};  // of a gain byte of keys
};

// Throws Error where spectral_tables() would.
EncodeTables encode_tables(const SpectralKeyConfig& keys, const SpectralValueConfig& values);

}  // namespace oscar::paged
