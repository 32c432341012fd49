// The two products of decode with the digits of a page, on tensor cores, in bytes, with tokens respectively dimensions as rows
// and a query row's number as two columns, its upper and its lower byte:
//   S [64 tokens, 4 x 2] = digits [64, slots] * coded query [slots, 4 x 2]
//   O [D, 4]            += unit * digits [D, 64] * (P * gain / unit) [64, 4 x 2]
// One AND makes four operands (page_format.h). A coded query has 16 bits per coordinate, of a unit of its head; P times gain
// has 16 bits of a unit of its head and page. Sums are exact in 32 bits. They start at the bits of 1.5 * 2^23, so that as
// binary32 they are that plus the sum. P goes from accumulator to operand by movmatrix: a lane's rows g and g + 8 are
// neighbours there.
#pragma once

#include "cuda/decode_params.h"
#include "cuda/softmax.cuh"

namespace oscar::cuda {

// Sums of values over tokens: of dimensions 16 i + g + 8 r and the columns of lane 4 g + t.
template <int D, int kColumns>
struct ValueSums {
  float of[D / 16][2][kColumns] = {};
  float weight[kColumns] = {};  // of P times gain; `int2`: of P times lo
  __device__ __forceinline__ void multiply(const float (&factor)[kColumns]) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      weight[c] *= factor[c];
#pragma unroll
      for (int i = 0; i < D / 16; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) of[i][r][c] *= factor[c];
      }
    }
  }
};

// Of groups first .. first + kFields - 1 of 16 tokens, [group][column]: upper and lower sum of row g, then of row g + 8, from
// their start on. keys, query: shared addresses of a head's digits and of its coded query.
template <int kFields, int kColumns>
__device__ __forceinline__ void key_product(std::uint32_t keys, std::uint32_t query, int steps, int first, int lane,
                                            std::uint32_t (&acc)[kFields][kColumns][4]) {
#pragma unroll
  for (int f = 0; f < kFields; ++f) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const uint2 start = load_shared_8(query + 8U * static_cast<std::uint32_t>((first + f) * 4 * kColumns + lane % 4 + 4 * c));
      acc[f][c][0] = acc[f][c][2] = start.x;
      acc[f][c][1] = acc[f][c][3] = start.y;
    }
  }
  const std::uint32_t queries = query + coded_query_bytes(0, kColumns);
  const std::uint32_t lane_keys = keys + 16U * static_cast<std::uint32_t>(lane);
  const std::uint32_t lane_queries = queries + 8U * static_cast<std::uint32_t>(lane);
#pragma unroll 2
  for (int pair = 0; pair < steps / 2; ++pair) {
    const uint4 a = load_shared_16(lane_keys + 512U * static_cast<std::uint32_t>(pair));
    uint2 b[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      b[c] = load_shared_8(lane_queries + 256U * static_cast<std::uint32_t>(pair * kColumns + c));
#pragma unroll
    for (int f = 0; f < kFields; ++f) {
      const std::uint32_t mask = 0x03030303U << (2 * (first + f));
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        mma_bytes<true>(acc[f][c], a.x & mask, a.y & mask, a.z & mask, a.w & mask, b[c].x, b[c].y, acc[f][c]);
    }
  }
  if ((steps & 1) != 0) {
    const auto last = static_cast<std::uint32_t>(steps - 1);
    const uint2 a = load_shared_8(keys + last * 256U + 8U * static_cast<std::uint32_t>(lane));
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const std::uint32_t b = load_shared_4(queries + last * 128U * kColumns + 128U * static_cast<std::uint32_t>(c) +
                                            4U * static_cast<std::uint32_t>(lane));
#pragma unroll
      for (int f = 0; f < kFields; ++f) {
        const std::uint32_t mask = 0x03030303U << (2 * (first + f));
        mma_bytes_16(acc[f][c], a.x & mask, a.y & mask, b);
      }
    }
  }
}

// sums += w V, w [groups of 16 tokens][rows g, g + 8][columns]: P times gain. values: shared address of a head's digits.
template <int D, int kColumns>
__device__ __forceinline__ void value_product(std::uint32_t values, const float (&w)[4][2][kColumns], int lane,
                                              ValueSums<D, kColumns>& sums) {
  std::uint32_t b[kColumns][4];
  float unit[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    float most = 0x1p-100F;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) most = fmaxf(most, w[j][r][c]);
    }
    most = SoftmaxState<(kColumns > 1)>::max_over_rows(most);
    // The largest comes to less than 65535: times 2^(15 - e) (1 - 2^-16), e its exponent.
    const std::uint32_t exponent = __float_as_uint(most) & 0x7F800000U;
    const float scale = __uint_as_float(0x867FFF00U - exponent);
    unit[c] = __uint_as_float(exponent - 0x07800000U + 0x80U);  // 1 / scale
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // Added to 2^23, a number stands in the lowest bits. Upper bytes of rows g and g + 8, then the lower ones.
      const std::uint32_t low = __float_as_uint(fmaf(w[j][0][c], scale, 8388608.0F));
      const std::uint32_t high = __float_as_uint(fmaf(w[j][1][c], scale, 8388608.0F));
      b[c][j] = transpose(permute_bytes(low, high, 0x4051U));
    }
  }
  constexpr std::uint32_t kStart[4] = {kSumZeroBits, kSumZeroBits, kSumZeroBits, kSumZeroBits};
  constexpr float kUpperZero = kSumZero + kSumZero / 256.0F;
#pragma unroll
  for (int u = 0; u < D / 64; ++u) {
    const std::uint32_t at = values + 512U * static_cast<std::uint32_t>(u) + 16U * static_cast<std::uint32_t>(lane);
    const uint4 a = load_shared_16(at);
    const uint4 a2 = load_shared_16(at + 8U * D);
#pragma unroll
    for (int f = 0; f < 4; ++f) {
      const std::uint32_t mask = 0x03030303U << (2 * f);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        std::uint32_t acc[4];
        mma_bytes<false>(acc, a.x & mask, a.y & mask, a.z & mask, a.w & mask, b[c][0], b[c][1], kStart);
        mma_bytes<false>(acc, a2.x & mask, a2.y & mask, a2.z & mask, a2.w & mask, b[c][2], b[c][3], acc);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float sum = fmaf(__uint_as_float(acc[2 * r]) - kUpperZero, 256.0F, __uint_as_float(acc[2 * r + 1]));
          float& to = sums.of[4 * u + f][r][c];
          to = fmaf(sum, unit[c], to);
        }
      }
    }
  }
}

}  // namespace oscar::cuda
