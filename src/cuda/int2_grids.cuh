// Grids of a page of codec `int2`, as the attention of a warp reads them.
#pragma once

#include "cuda/primitives.cuh"
#include "oscar/paged/page_format.h"

namespace oscar::cuda {

// In a warp's scratch: factors of codes, of keys [16 rows][4 tokens] and of values (as gains of `spectral` have them), then the
// offsets lo, of keys and of values.
inline constexpr std::uint32_t kKeyOffsets = 512;
inline constexpr std::uint32_t kValueOffsets = 768;
inline constexpr std::uint32_t kInt2ScratchBytes = 1024;

// What a lane has of the grids of a page: those of the keys of row `lane` (lanes 0 .. 15) or of the values of row lane - 16.
struct LaneGrids {
  float step[4], lo[4];

  __device__ __forceinline__ LaneGrids(std::uint32_t grids, int lane) {
    const uint4 four = load_shared_16(grids + 16U * static_cast<std::uint32_t>(lane));
    const std::uint32_t word[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&word[j]));
      step[j] = both.x;
      lo[j] = both.y;
    }
  }
  // Tokens outside low .. high - 1 of the page may hold anything, NaN included.
  __device__ void keep(int low, int high, int lane) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int token = paged::token_of(j, lane % 16);
      if (token >= low && token < high) continue;
      step[j] = 0.0F;
      lo[j] = 0.0F;
    }
  }
  // factor[j]: of the steps of group j.
  __device__ __forceinline__ void store(std::uint32_t scratch, const float (&factor)[4], int lane) const {
    const std::uint32_t at = scratch + 16U * static_cast<std::uint32_t>(lane);
    store_shared_float4(at, make_float4(factor[0] * step[0], factor[1] * step[1], factor[2] * step[2], factor[3] * step[3]));
    store_shared_float4(at + kKeyOffsets, make_float4(lo[0], lo[1], lo[2], lo[3]));
  }
};

}  // namespace oscar::cuda
