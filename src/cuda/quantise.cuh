// The quantisers of the `spectral` codec: the same results as mid_rise() and codec/gain.h on the CPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "oscar/paged/page_format.h"

namespace oscar::cuda {

// mid_rise() of the codec: the code of t = y + levels / 2.
__device__ __forceinline__ int grid_code(float t, float levels) {
  if (!(t >= 0.0F)) return 0;
  if (t >= levels) return static_cast<int>(levels) - 1;
  return static_cast<int>(t);
}

// GainCode::encode() of the codec, kOne and kMost as there.
template <int kOne, int kMost, int kPerOctave>
__device__ __forceinline__ int gain_code(float g, const float (&edge)[kPerOctave]) {
  if (!(g > 0.0F)) return 0;
  const std::uint32_t bits = __float_as_uint(g);
  if (bits >= 0x7F800000U) return kMost;
  if (bits < 0x00800000U) return 1;
  const float mantissa = __uint_as_float((bits & 0x007FFFFFU) | 0x3F000000U);  // [0.5, 1)
  int part = 0;
#pragma unroll
  for (int i = 0; i < kPerOctave; ++i) part += mantissa >= edge[i] ? 1 : 0;
  const int n = kOne + kPerOctave * (static_cast<int>(bits >> 23) - 127) + part;
  return min(max(n, 1), kMost);
}
__device__ __forceinline__ int key_gain_code(float g, const float (&edge)[16]) { return gain_code<128, 255>(g, edge); }
// Pattern of signs; where there is no position, any.
__device__ __forceinline__ int pattern_at(int position) {
  return static_cast<int>(static_cast<unsigned>(position) / paged::kPageTokens % paged::kPatterns);
}
// Of a value at `position`, whose pattern of signs the byte carries.
__device__ __forceinline__ int value_gain_code(float g, const float (&edge)[8], int position) {
  const int n = gain_code<40, paged::kValueGains - 1>(g, edge);
  return n == 0 ? 0 : n + paged::kValueGains * pattern_at(position);
}

}  // namespace oscar::cuda
