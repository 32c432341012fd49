// Format 2, `spectral`: transform coding of K with water-filled widths, unbiased Hadamard coding of V. The default.
//
// KEYS. Encode of one KV head's row x [D] at position p, with the head's static matrices and tables:
//   z   = (x - mean(p)) T            mean(p) = mu + RoPE_p(mu0)     T [D, D] whitens the attention-weighted covariance and
//                                                                 orders coordinates by it: see artifact/fit_spectral.h
//   g0  = max(1e-3, sqrt(mean over the norm coordinates of (z_d / sigma_d)^2)), n0 = the byte of the gain nearest to it
//   For a gain g:  y_d = z_d / g / step_d;  c_d = clamp(floor(y_d + 2^(b_d - 1)), 0, 2^b_d - 1);  zh_d = c_d - (2^b_d - 1) / 2;
//   e_d = g step_d (zh_d - y_d), the error of the decoded coordinate;  cost(g) = |e|^2 + 4 <z, e>^2 / |z|^2, both over the
//   coordinates with b_d > 0: the query sees |e|^2, and what all of a row is too long or too short by does not average out.
//   The gain byte is the one of least cost among n0 - 16, n0 - 12, ..., n0 + 12 and then among the two below and above that
//   one; of equal costs the one looked at first, and n0 where no cost is finite. A row without energy has gain 0 and digits 0;
//   so has one whose |z|^2 or g0 is not finite (counted as saturated).
// b_d in {0, 2, 4, 6, 8} is the coordinate's static width. Decode: z^_d = g step_d zh_d, x^ = z^ T^-1 + mean(p).
// Coordinates are stored by descending width; those of equal width keep T's order.
//
// VALUES. y = x S_p, S_p = diag(signs) diag(flip_p) H, H the normalised Hadamard matrix (block-diagonal with the largest power
// of two that divides D). Values that are alike err alike, and attention adds such errors up; so pages of 64 positions take
// turns with kSignPatterns patterns p = floor(position / 64) mod 4, which move to other positions with the row.
// flip_p(d) = 1 for p = 0, else value_flip(). With r = |y| / sqrt(D), u = y / r:
//   c_d = clamp(floor(u_d / step_b + 2^(b-1)), 0, 2^b - 1);  zh_d = (c_d - (2^b - 1) / 2) * step_b / (1 - d_b)
//   g   = |y|^2 / sum y_d zh_d                                                                (unbiased)
// b is 1, 2 or 3; a rate of 1.5 or 2.5 bits gives the larger width to the first half of the coordinates. step_b and d_b are
// step and distortion of the uniform quantiser of a unit Gaussian. Decode: x^ = g zh S_p^T.
//
// GAINS are one byte. K: 0 = the row is its mean; n > 0: g = 2^((n - 128) / 16). V: n + 64 p, n = 0: the row is 0 (and so is
// p); n = 1 .. 63: g = scale * 2^((n - 40) / 8), scale static per head. A gain (g0 of K) is rounded to the nearest in the
// logarithm; outside the range it is clamped (counted as saturated).
//
// Bytes of a K row: per head ascending its digits, then n_head_kv gain bytes. A coordinate of b bits is b / 2 base-4 digits,
// least significant first. A head's digits are stored by level: the first digits of its coordinates of b >= 2, then the second
// digits of those of b >= 4, and so on; digit i of a level in byte i / 4, bit pair i mod 4 (lowest first). Widths come in
// quads of coordinates, so every level starts on a byte; digits of a head are a multiple of 16 (4 bytes).
// Bytes of a V row: per head ascending, a level of 2 bit digits of the coordinates of b >= 2 (the low two bits of c), then a
// level of single bits (the high bit of b = 3, the only bit of b = 1) with coordinate i in byte i / 8, bit i mod 8, counted
// over the coordinates that have one; then n_head_kv gain bytes. D must be a multiple of 16.
//
// Inner basis (see codec.h): K: zh_d g in stored order, the query carries steps and T^-T; V: x^. Code form of V: zh g in basis
// p, S_p^T on the output.
// The same bytes come out on every processor: no fused multiply-add and no library logarithm in the encoder.
// Saturated (EncodeStats): coordinates whose code was clamped, 2-5 % by design, and clamped gains.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "oscar/base/matrix.h"
#include "oscar/codec/codec.h"

namespace oscar {

inline constexpr int kSpectralQuad = 4;    // coordinates that share a width
inline constexpr int kSpectralSlots = 16;  // digits of a head are a multiple of it
inline constexpr int kSpectralMaxWidth = 8;
// ||T|| ||T^-1|| (Frobenius) may not exceed this times D: it bounds how much a rounding error can grow on the way through the
// basis, and with it cond(T). A fit stays below 19 D whatever its data (kSpectralRidge in artifact/fit_spectral.h).
inline constexpr double kSpectralMaxSpread = 32;
inline constexpr float kSpectralMinNorm = 1e-3F;  // least g0: of a row that is nothing but its mean

struct SpectralKeyHead {
  MatrixF transform, inverse;        // T, T^-1 [D, D]
  std::vector<int> width;            // [D] in T's order, quads of equal width
  std::vector<float> step;           // [D] > 0 where width > 0
  std::vector<float> inverse_sigma;  // [D] 1 / sigma; 0: not a norm coordinate
};
struct SpectralKeyConfig {
  int n_head_kv = 0, head_dim = 0;
  std::vector<SpectralKeyHead> heads;
  MatrixF mean;           // mu [n_head_kv, D] or empty
  MatrixF mean_pre_rope;  // mu0 [n_head_kv, D] or empty; needs rope
  Rope rope;
};
// Throws Error on inconsistent shapes, widths that do not fit the format, non-finite values, a T^-1 that is not T's inverse
// (max |T T^-1 - I| > 1e-2), or a T beyond kSpectralMaxSpread.
std::unique_ptr<Codec> make_spectral_key_codec(SpectralKeyConfig config);

inline constexpr int kSignPatterns = 4;
inline constexpr int kPatternPositions = 64;  // consecutive positions that share a pattern
[[nodiscard]] constexpr int value_pattern(std::int64_t position) {
  return static_cast<int>(static_cast<std::uint64_t>(position) / kPatternPositions % kSignPatterns);
}
// +1 or -1, fixed once for all: bit 40 of a hash (two multiplications, one shift) of 4096 p + d.
[[nodiscard]] constexpr float value_flip(int pattern, int d) {
  std::uint64_t x = (4096U * static_cast<std::uint64_t>(pattern) + static_cast<std::uint64_t>(d)) * 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 31)) * 0xBF58476D1CE4E5B9U;
  return pattern != 0 && (x >> 40 & 1U) != 0 ? -1.0F : 1.0F;
}

// step_b and d_b of the values, b = 0 .. 3: the best uniform mid-rise quantiser of a unit Gaussian and its mean squared error.
struct GaussianGrid {
  float step;
  double distortion;
  // Code c stands for (c - centre) * unit().
  [[nodiscard]] constexpr float unit() const { return static_cast<float>(static_cast<double>(step) / (1.0 - distortion)); }
};
inline constexpr std::array<GaussianGrid, 4> kGaussianGrid = {
    {{0.0F, 1.0}, {1.5958F, 0.36338}, {0.9957F, 0.11885}, {0.5860F, 0.03744}}};

struct SpectralValueConfig {
  int n_head_kv = 0, head_dim = 0;
  double bits = 2;           // one of kSpectralRates (codec/rates.h)
  MatrixF signs;             // [n_head_kv, D] of +1 and -1
  std::vector<float> scale;  // [n_head_kv] > 0: the gain's unit, about the RMS of a value
};
std::unique_ptr<Codec> make_spectral_value_codec(SpectralValueConfig config);

// The quantiser of both codecs: 2^width levels with mid-rise steps; y is value / step.
struct MidRise {
  int code = 0;
  bool saturated = false;
};
MidRise mid_rise(float y, int width);

}  // namespace oscar
