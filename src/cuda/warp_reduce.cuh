// Over all lanes of a warp, the result in each.
#pragma once

#include "cuda/primitives.cuh"

namespace oscar::cuda {

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0U, x, d);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(~0U, x, d));
  return x;
}

}  // namespace oscar::cuda
