// The inner loops of the codecs. Every instruction set computes the same operations in the same order (no fused
// multiply-add), so results are bit-identical on every processor: a code must not depend on where it was computed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace oscar {

// Quantisers of a row's coordinates, see mid_rise() in oscar/codec/spectral.h.
struct MidRiseRow {
  const float* inverse_step = nullptr;  // [n]
  const float* half_levels = nullptr;   // [n] 2^(width - 1)
};

// What coding coordinates with one gain costs, in units of it. The sums have an order of their own, which vectors, warps and
// scalar code can all follow: four neighbours as (a + b) + (c + d), then the upper half of the quads added to the lower half
// until one is left; missing quads are 0.
struct GainError {
  float error = 0.0F;   // sum of (zh - y)^2 weight
  float radial = 0.0F;  // sum of y (zh - y) weight
};
constexpr std::size_t kGainBlock = 32;  // coordinates; what is missing has inverse_step 0, half_levels 0.5 and weight 0

struct Int2Grid {
  float step = 0.0F;
  float lo = 0.0F;
};

// The kernels of one instruction set.
struct RowKernels {
  const char* name;
  // y [dim] = x [dim] * m [dim, dim] (row-major); terms added in ascending row order. y must not alias x or m; dim % 4 == 0.
  void (*row_times_matrix)(const float* x, const float* m, int dim, float* y);
  // y [4 * n_bytes]: y = lo + step * code, byte i holds codes of y[4i .. 4i+3] in bit pairs 0..3.
  void (*unpack)(const std::uint8_t* codes, std::size_t n_bytes, Int2Grid grid, float* y);
  // codes [n / 4] of y [n], n % 4 == 0, step > 0. Returns how many values lie more than half a step outside the grid.
  std::size_t (*pack)(const float* y, std::size_t n, Int2Grid grid, std::uint8_t* codes);
  // code = mid_rise(x * scale * inverse_step, width).code, i < n. Returns how many saturated.
  std::size_t (*quantise)(const float* x, float scale, MidRiseRow grid, std::size_t n, std::uint8_t* code);
  // y = x * scale * inverse_step, zh the middle of its code's interval; n % kGainBlock == 0, n <= kMaxHeadDim.
  GainError (*gain_error)(const float* x, float scale, MidRiseRow grid, const float* weight, std::size_t n);
};
// Sum of x^2, n as above and in the same order.
float sum_of_squares(const float* x, std::size_t n);

// All that this processor can run, best first.
std::span<const RowKernels> row_kernel_sets();
inline const RowKernels& row_kernels() { return row_kernel_sets().front(); }

}  // namespace oscar
