// Online softmax of one warp over tiles of 16 tokens by up to 8 query rows, as tensor-core accumulators hold them: lane 4 g + t
// has rows g and g + 8 of the tile, and of the query rows t and, in wide tiles, t + 4.
//
// The maximum is followed lazily: a tile whose probabilities stay below 2 against the old one needs no exchange between lanes.
#pragma once

#include "cuda/primitives.cuh"

namespace oscar::cuda {

// cap tanh(inner x ln(2) / 2), by tanh(|y|) = 1 - 2 / (e^(2 |y|) + 1).
__device__ __forceinline__ float soft_capped(float x, float inner, float cap) {
  const float e = exp2_fast(inner * fabsf(x));
  return copysignf(cap - __fdividef(2.0F * cap, e + 1.0F), x);
}

template <bool kWide>
struct SoftmaxState {
  static constexpr int kColumns = kWide ? 2 : 1;  // query rows of a lane
  static constexpr int kRows = 2;                 // of each 16-token group
  float max[kColumns] = {};                       // base-2 logits
  float sum[kColumns] = {};                       // the lane's own share
  // Of each column: it has seen a token. One of several queries may have to wait for it longer than others.
  bool started[kColumns] = {};

  [[nodiscard]] __device__ static int row(int lane, int i) { return lane / 4 + 8 * i; }
  [[nodiscard]] __device__ static int head(int lane, int c) { return lane % 4 + 4 * c; }
  // Which query row column `n` of an operand of binary16 stands for, so that columns 2 t and 2 t + 1 are the lane's; tiles that
  // are not wide have each row twice.
  [[nodiscard]] __device__ static int head_of_column(int n) { return n / 2 + (kWide ? 4 * (n % 2) : 0); }
  // The lane's values of an accumulator of such columns.
  __device__ static void pick(const float (&acc)[4], float (&x)[kRows][kColumns]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) x[r][c] = acc[2 * r + c];
    }
  }

  // y: base-2 logits minus max, becomes probabilities against the new maximum. rescale(factors of the columns) is called when
  // the maximum grows.
  template <int kGroups, class Rescale>
  __device__ __forceinline__ void update(float (&y)[kGroups][kRows][kColumns], Rescale&& rescale) {
    float p[kGroups][kRows][kColumns];
    unsigned high = 0;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          p[j][r][c] = exp2_fast(y[j][r][c]);
          high |= __float_as_uint(p[j][r][c]);
        }
      }
    }
    bool all_started = started[0];
    if constexpr (kWide) all_started = all_started && started[1];
    // Bit 30 of a positive float: 2 or more.
    if (__any_sync(~0U, (high & 0x40000000U) != 0 || !all_started)) raise(y, p, rescale);
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          sum[c] += p[j][r][c];
          y[j][r][c] = p[j][r][c];
        }
      }
    }
  }

  // y: base-2 logits minus max, becomes cap tanh(logit / cap) minus max; cap in base 2.
  template <int kGroups>
  __device__ __forceinline__ void soft_cap(float (&y)[kGroups][kRows][kColumns], float cap) const {
    const float inner = 2.0F * 1.4426950408889634F * (1.0F / cap);
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          y[j][r][c] = soft_capped(y[j][r][c] + max[c], inner, cap) - max[c];
        }
      }
    }
  }

  // Over the lanes that share a column.
  [[nodiscard]] __device__ static float sum_over_rows(float x) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) x += __shfl_xor_sync(~0U, x, d);
    return x;
  }
  [[nodiscard]] __device__ static float max_over_rows(float x) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) x = fmaxf(x, __shfl_xor_sync(~0U, x, d));
    return x;
  }
  // Call once, after the last update.
  __device__ void finish() {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sum[c] = sum_over_rows(sum[c]);
  }

 private:
  template <int kGroups, class Rescale>
  __device__ __forceinline__ void raise(const float (&y)[kGroups][kRows][kColumns], float (&p)[kGroups][kRows][kColumns],
                                        Rescale&& rescale) {
    float factor[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float most = y[0][0][c];
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) most = fmaxf(most, y[j][r][c]);
      }
      most = max_over_rows(most);
      const bool sees = most > -INFINITY;
      const float growth = started[c] ? fmaxf(most, 0.0F) : (sees ? most : 0.0F);
      factor[c] = started[c] ? exp2_fast(-growth) : 0.0F;
      started[c] = started[c] || sees;
      max[c] += growth;
      sum[c] *= factor[c];
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) p[j][r][c] = exp2_fast(y[j][r][c] - growth);
      }
    }
    rescale(factor);
  }
};

}  // namespace oscar::cuda
