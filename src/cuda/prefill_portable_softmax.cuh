// Online softmax of a warp's 16 query rows over tiles of 64 tokens, as accumulators of m16n8 hold them: of lane 4 g + t
// x[j][2 r + b] is row g + 8 r, column 8 j + 2 t + b. Logits are base-2 logarithms. The maximum is followed lazily.
#pragma once

#include "cuda/decode_plan.cuh"
#include "cuda/softmax.cuh"
#include "cuda/warp_reduce.cuh"

namespace oscar::cuda {

struct RowSoftmax {
  // In powers of two: the maximum is followed when a logit exceeds it by so much, so that sums are hardly ever rescaled.
  static constexpr float kSlack = 8.0F;

  float max[2] = {-INFINITY, -INFINITY};  // of all lanes of a row
  float sum[2] = {0, 0};                  // the lane's own share
  float shrink[2] = {1, 1};

  // What logits are relative to.
  [[nodiscard]] __device__ float base(int r) const { return max[r] > -INFINITY ? max[r] : 0.0F; }

  // x: logits minus base(), become probabilities times 2^-max. Whether sums of values shrink.
  __device__ __forceinline__ bool update(float (&x)[8][4]) {
    float most[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {  // four short chains
      float part[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        part[i] = fmaxf(fmaxf(x[i][2 * r], x[i][2 * r + 1]), fmaxf(x[i + 4][2 * r], x[i + 4][2 * r + 1]));
      most[r] = fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]));
    }
    const bool raised = __any_sync(
        ~0U, most[0] > (max[0] > -INFINITY ? kSlack : -INFINITY) || most[1] > (max[1] > -INFINITY ? kSlack : -INFINITY));
    if (raised) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        most[r] = quad_max(most[r]);
        const float before = base(r);
        const float now = fmaxf(max[r], before + most[r]);
        shrink[r] = now > max[r] ? exp2_fast(max[r] - now) : 1.0F;
        max[r] = now;
        sum[r] *= shrink[r];
        const float growth = base(r) - before;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          x[j][2 * r] -= growth;
          x[j][2 * r + 1] -= growth;
        }
      }
    }
    float part[2][2] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[j][i] = exp2_fast(x[j][i]);
        part[i / 2][i % 2] += x[j][i];
      }
    }
    sum[0] += part[0][0] + part[0][1];
    sum[1] += part[1][0] + part[1][1];
    return raised;
  }
  // x: logits, become cap tanh(logit / cap) minus base().
  __device__ __forceinline__ void soft_cap(float (&x)[8][4], float soft_cap) const {
    const float inner = 2.0F / soft_cap;
    const float cap = soft_cap * kLog2E;
    const float from[2] = {base(0), base(1)};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[j][i] = soft_capped(x[j][i], inner, cap) - from[i / 2];
    }
  }
};

}  // namespace oscar::cuda
