// What coding a row of keys with a gain costs: GainError of the codec (codec/row_kernels.h), operation by operation, its sums
// in their order. A row lies in kLanes lanes of a warp, kVectors times four coordinates in each.
#pragma once

#include <cuda_runtime_api.h>

#include "codec/gain.h"

namespace oscar::cuda {

// Of a coordinate, see paged::KeyCoordinate; all 0 where there is no code.
struct KeyGrid {
  float inverse_step, weight, centre;
};
// Sum over a row, in all its lanes.
template <int kLanes, int kVectors>
__device__ __forceinline__ float fold(const float (&term)[kVectors][4]) {
  float quad[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) quad[v] = __fadd_rn(__fadd_rn(term[v][0], term[v][1]), __fadd_rn(term[v][2], term[v][3]));
  float sum = quad[0];
  if constexpr (kVectors == 2) sum = __fadd_rn(quad[0], quad[1]);
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0U, sum, distance));
  return sum;
}
__device__ __forceinline__ float key_y(float z, float scale, const KeyGrid& grid) {
  return __fmul_rn(__fmul_rn(z, scale), grid.inverse_step);
}
__device__ __forceinline__ float key_code(float y, const KeyGrid& grid) {
  const float t = __fadd_rn(y, __fadd_rn(grid.centre, 0.5F));
  const float top = 2.0F * grid.centre;
  const float at_least = t > 0.0F ? t : 0.0F;
  return truncf(at_least < top ? at_least : top);
}
// z is 0 where there is no code; energy is z's sum of squares.
template <int kLanes, int kVectors>
__device__ __forceinline__ float gain_cost(const float (&z)[kVectors][4], const KeyGrid (&grid)[kVectors][4], float energy,
                                           float gain) {
  const float scale = __fdiv_rn(1.0F, gain);
  float error[kVectors][4], radial[kVectors][4];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const KeyGrid& g = grid[v][j];
      const float y = key_y(z[v][j], scale, g);
      const float off = __fsub_rn(__fsub_rn(key_code(y, g), g.centre), y);
      error[v][j] = __fmul_rn(__fmul_rn(off, off), g.weight);
      radial[v][j] = __fmul_rn(__fmul_rn(y, off), g.weight);
    }
  }
  const float along = fold<kLanes>(radial);
  const float share = __fdiv_rn(along, __fmul_rn(__fmul_rn(energy, scale), scale));
  const float cost = __fadd_rn(fold<kLanes>(error), __fmul_rn(__fmul_rn(kRadialCost, along), share));
  return __fmul_rn(cost, __fmul_rn(gain, gain));
}

}  // namespace oscar::cuda
