// Sums of coded values of the portable prefill kernel, on their way to the model's basis: x[j][2 r + b] of lane 4 g + t is row
// g + 8 r, dimension 8 j + 2 t + b, as in the accumulators of m16n8.
#pragma once

#include "cuda/prefill_portable_queries.cuh"

namespace oscar::cuda {

// Unnormalised Hadamard transform of each row. Bits b and j are within a lane, t across four.
template <int D>
__device__ __forceinline__ void hadamard_rows(float (&x)[D / 8][4], int lane) {
  const auto butterfly = [](float& a, float& b) {
    const float sum = a + b;
    b = a - b;
    a = sum;
  };
#pragma unroll
  for (int j = 0; j < D / 8; ++j) {
    butterfly(x[j][0], x[j][1]);
    butterfly(x[j][2], x[j][3]);
  }
#pragma unroll
  for (int d = 1; d < D / 8; d *= 2) {
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      if ((j & d) != 0) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) butterfly(x[j][i], x[j + d][i]);
    }
  }
#pragma unroll
  for (int d = 1; d < 4; d *= 2) {
    const float sign = (lane & d) == 0 ? 1.0F : -1.0F;
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[j][i] = fmaf(sign, x[j][i], __shfl_xor_sync(~0U, x[j][i], d));
    }
  }
}

// Sums of digits, of dimensions in units of their fields, to sums of digits - 1.5 times `unit`, plus `offset` of the row.
// weight: sums of what the digits were multiplied by.
template <int D>
__device__ __forceinline__ void centre_sums(float (&x)[D / 8][4], const float (&weight)[4], float unit,
                                            const float (&offset)[2]) {
#pragma unroll
  for (int j = 0; j < D / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x[j][i] = fmaf(x[j][i], field_unit(j / 2 % 4) * unit, fmaf(weight[i / 2 * 2], -1.5F * unit, offset[i / 2]));
  }
}

// `spectral`: centred sums from the Hadamard basis of a pattern of signs to that of another one, in units of the fields again,
// or (to = -1) to the model's.
template <int D>
__device__ __forceinline__ void turn_sums(const PrefillParams& p, int kv, int from, int to, int lane, float (&x)[D / 8][4]) {
  const float* signs = p.layer.value_signs + kv * D + lane % 4 * 2;
  const int stride = p.layer.n_head_kv * D;
  hadamard_rows<D>(x, lane);
  const float factor = to < 0 ? p.layer.value_unit[kv] * rsqrtf(static_cast<float>(D)) : 1.0F / static_cast<float>(D);
#pragma unroll
  for (int j = 0; j < D / 8; ++j) {
    float2 sign = __ldg(reinterpret_cast<const float2*>(signs + from * stride + 8 * j));
    if (to >= 0) {
      const float2 other = __ldg(reinterpret_cast<const float2*>(signs + to * stride + 8 * j));
      sign = make_float2(sign.x * other.x, sign.y * other.y);
    }
    x[j][0] *= factor * sign.x;
    x[j][1] *= factor * sign.y;
    x[j][2] *= factor * sign.x;
    x[j][3] *= factor * sign.y;
  }
  if (to < 0) return;
  hadamard_rows<D>(x, lane);
#pragma unroll
  for (int j = 0; j < D / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[j][i] *= 1.0F / field_unit(j / 2 % 4);
  }
}

// `int2`: centred sums to the model's basis by the head's matrix, plus the mean of values times `weight` of the row. scratch:
// of the warp, 16 D binary16. Rows are rounded to binary16 in a unit of their own, the matrix is not.
template <int D>
__device__ __forceinline__ void rotate_sums(const PrefillParams& p, int kv, std::uint32_t scratch, const float (&weight)[2],
                                            int lane, float (&x)[D / 8][4]) {
  float unit[2];
  float inverse[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float most = 0;
#pragma unroll
    for (int j = 0; j < D / 8; ++j) most = fmaxf(most, fmaxf(fabsf(x[j][2 * r]), fabsf(x[j][2 * r + 1])));
    const int exponent = exponent_of(quad_max(most));
    unit[r] = ldexpf(1.0F, exponent);
    inverse[r] = ldexpf(1.0F, -exponent);
  }
  __syncwarp();
#pragma unroll
  for (int j = 0; j < D / 8; j += 2) {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      words[i] = pack_half2(x[j + i / 2][i % 2 * 2] * inverse[i % 2], x[j + i / 2][i % 2 * 2 + 1] * inverse[i % 2]);
    store_shared_16(scratch + static_cast<std::uint32_t>(256 * j + 16 * lane),
                    make_uint4(words[0], words[1], words[2], words[3]));
#pragma unroll
    for (int i = 0; i < 4; ++i) x[j][i] = x[j + 1][i] = 0;
  }
  __syncwarp();
  const float* matrix = p.layer.value_output + static_cast<std::int64_t>(kv) * D * D + lane % 4 * 2 * D + lane / 4;
#pragma unroll 1
  for (int step = 0; step < D / 16; ++step) {
    const uint4 a = load_shared_16(scratch + static_cast<std::uint32_t>(512 * step + 16 * lane));
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      SplitFragment<D> b;
      b.load(matrix + step * (16 * D) + 8 * j, 1.0F);
      b.multiply(x[j], a);
    }
  }
#pragma unroll
  for (int j = 0; j < D / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[j][i] *= unit[i / 2];
    if (p.layer.value_mean == nullptr) continue;
    const float2 mean = __ldg(reinterpret_cast<const float2*>(p.layer.value_mean + kv * D + 8 * j + lane % 4 * 2));
#pragma unroll
    for (int i = 0; i < 4; ++i) x[j][i] = fmaf(weight[i / 2], i % 2 == 0 ? mean.x : mean.y, x[j][i]);
  }
}

}  // namespace oscar::cuda
