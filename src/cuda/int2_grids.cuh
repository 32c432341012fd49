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

// Steps of values have no bound, but P times a step goes through binary16. So P is scaled by a power of two that follows the
// largest step a warp has met.
class ValueScale {
 public:
  // largest: of a page's steps. Where P (below 2) times it would not fit: the factor by which sums so far shrink; else 1.
  __device__ __forceinline__ float follow(float largest) {
    if (!(largest * scale_ > 24576.0F)) return 1.0F;
    // A power of two with which the largest step is in [2^13, 2^14). Steps are 2^-24 or more, or 0.
    const float scale = __uint_as_float((127U + 13U + 127U - (__float_as_uint(largest) >> 23)) << 23);
    const float shrink = scale / scale_;
    scale_ = scale;
    return shrink;
  }
  [[nodiscard]] __device__ float get() const { return scale_; }

 private:
  float scale_ = 0x1p40F;
};

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
  // Of the values of all lanes.
  [[nodiscard]] __device__ __forceinline__ float largest_value_step(int lane) const {
    const float most = fmaxf(fmaxf(step[0], step[1]), fmaxf(step[2], step[3]));
    return __uint_as_float(__reduce_max_sync(~0U, lane < 16 ? 0U : __float_as_uint(most)));
  }
  __device__ __forceinline__ void store(std::uint32_t scratch, float unit, int lane) const {
    const std::uint32_t at = scratch + 16U * static_cast<std::uint32_t>(lane);
    store_shared_float4(at, make_float4(unit * step[0], unit * step[1], unit * step[2], unit * step[3]));
    store_shared_float4(at + kKeyOffsets, make_float4(lo[0], lo[1], lo[2], lo[3]));
  }
};

}  // namespace oscar::cuda
