// Online softmax of one warp over tiles of 16 tokens by 8 columns (query rows), as tensor-core accumulators hold them.
//
// kWide: 8 columns. A lane holds rows g and g + 8 of columns 2t, 2t + 1 (g = lane / 4, t = lane mod 4).
// Not kWide: at most 4 rows; columns 4 .. 7 repeat columns 0 .. 3, lanes t < 2 keep rows g, lanes t >= 2 rows g + 8 of the
// same columns, so that no lane works twice on a value.
//
// The maximum is followed lazily: a tile whose probabilities stay below 2 against the old one needs no exchange between lanes.
#pragma once

#include "cuda/primitives.cuh"

namespace oscar::cuda {

template <bool kWide>
struct SoftmaxState {
  static constexpr int kRows = kWide ? 2 : 1;  // of each 16-token group
  float max[2] = {0, 0};                       // of the lane's columns, base-2 logits
  float sum[2] = {0, 0};                       // the lane's own share
  // Of each column: it has seen a token. One of several queries may have to wait for it longer than others.
  bool started[2] = {false, false};

  [[nodiscard]] __device__ static int row(int lane, int i) { return lane / 4 + (kWide ? 8 * i : (lane & 2) * 4); }
  [[nodiscard]] __device__ static int head(int lane, int i) { return (kWide ? lane % 4 : lane % 2) * 2 + i; }
  // The lane's values of an accumulator.
  __device__ static void pick(const float (&acc)[4], int lane, float (&x)[kRows][2]) {
    if constexpr (kWide) {
      x[0][0] = acc[0];
      x[0][1] = acc[1];
      x[1][0] = acc[2];
      x[1][1] = acc[3];
    } else {
      x[0][0] = (lane & 2) != 0 ? acc[2] : acc[0];
      x[0][1] = (lane & 2) != 0 ? acc[3] : acc[1];
    }
  }

  // y: base-2 logits minus max, becomes probabilities against the new maximum. out, weight: accumulators of columns 2t, 2t + 1,
  // rescaled when the maximum grows.
  template <int kGroups, int kTiles>
  __device__ __forceinline__ void update(float (&y)[kGroups][kRows][2], float (&out)[kTiles][4], float (&weight)[4]) {
    float p[kGroups][kRows][2];
    unsigned high = 0;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          p[j][r][c] = exp2_fast(y[j][r][c]);
          high |= __float_as_uint(p[j][r][c]);
        }
      }
    }
    // Bit 30 of a positive float: 2 or more.
    if (__any_sync(~0U, (high & 0x40000000U) != 0 || !started[0] || !started[1])) raise(y, p, out, weight);
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          sum[c] += p[j][r][c];
          y[j][r][c] = p[j][r][c];
        }
      }
    }
  }

  // y: base-2 logits minus max, becomes cap tanh(logit / cap) minus max; cap in base 2.
  template <int kGroups>
  __device__ __forceinline__ void soft_cap(float (&y)[kGroups][kRows][2], float cap) const {
    const float inverse = 1.0F / cap;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float x = y[j][r][c] + max[c];
          // tanh(|x|) = 1 - 2 / (e^(2 |x|) + 1)
          const float e = exp2_fast(2.0F * 1.4426950408889634F * inverse * fabsf(x));
          y[j][r][c] = copysignf(cap - __fdividef(2.0F * cap, e + 1.0F), x) - max[c];
        }
      }
    }
  }

  // Sums over the lanes that share a column. Call once, after the last update of them.
  __device__ void finish() {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int d = kWide ? 4 : 2; d < 32; d *= 2) sum[c] += __shfl_xor_sync(~0U, sum[c], d);
    }
  }

 private:
  template <int kGroups, int kTiles>
  __device__ __forceinline__ void raise(const float (&y)[kGroups][kRows][2], float (&p)[kGroups][kRows][2],
                                        float (&out)[kTiles][4], float (&weight)[4]) {
    float factor[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float most = y[0][0][c];
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) most = fmaxf(most, y[j][r][c]);
      }
#pragma unroll
      for (int d = kWide ? 4 : 2; d < 32; d *= 2) most = fmaxf(most, __shfl_xor_sync(~0U, most, d));
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
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) out[i][c] *= factor[c % 2];
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) weight[c] *= factor[c % 2];
  }
};

// P of one 16-token group, [token][head] across the lanes, into the B fragment of the product with V. w: probabilities times
// whatever weighs a token.
template <bool kWide>
__device__ __forceinline__ void probability_fragment(const float (&w)[SoftmaxState<kWide>::kRows][2], std::uint32_t& b0,
                                                     std::uint32_t& b1) {
  b0 = transpose(pack_half2(w[0][0], w[0][1]));
  if constexpr (kWide) {
    b1 = transpose(pack_half2(w[1][0], w[1][1]));
  } else {
    // Lanes g >= 4 hold tokens 8 .. 15 of heads 0 .. 3. Columns 4 .. 7 of the product mix the halves; nobody reads them.
    b1 = __shfl_xor_sync(~0U, b0, 16);
  }
}

}  // namespace oscar::cuda
