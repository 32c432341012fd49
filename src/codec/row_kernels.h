// The three inner loops of the int2 codec. Every instruction set computes the same operations in the same order (no fused
// multiply-add), so results are bit-identical on every processor: a code must not depend on where it was computed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace oscar {

// y [dim] = x [dim] * m [dim, dim] (row-major); terms added in ascending row order. y must not alias x or m; dim % 4 == 0.
void row_times_matrix(const float* x, const float* m, int dim, float* y);

// y [4 * n_bytes]: y = lo + step * code, byte i holds codes of y[4i .. 4i+3] in bit pairs 0..3.
void int2_unpack(const std::uint8_t* codes, std::size_t n_bytes, float step, float lo, float* y);

struct Int2Grid {
  float step = 0.0F;  // 0: all codes 0
  float lo = 0.0F;
};
// codes [n / 4] of y [n], n % 4 == 0. Returns how many values lay more than half a step outside the grid.
std::size_t int2_pack(const float* y, std::size_t n, Int2Grid grid, std::uint8_t* codes);

}  // namespace oscar
