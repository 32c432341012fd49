// The quantisers of the `spectral` codec: the same results as mid_rise() and codec/gain.h on the CPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace oscar::cuda {

// mid_rise() of the codec: the code of t = y + levels / 2.
__device__ __forceinline__ int grid_code(float t, float levels) {
  if (!(t >= 0.0F)) return 0;
  if (t >= levels) return static_cast<int>(levels) - 1;
  return static_cast<int>(t);
}

// GainCode::encode() of the codec.
__device__ __forceinline__ std::uint8_t gain_code(float g, const float (&edge)[16]) {
  if (!(g > 0.0F)) return 0;
  const std::uint32_t bits = __float_as_uint(g);
  if (bits >= 0x7F800000U) return 255;
  if (bits < 0x00800000U) return 1;
  const float mantissa = __uint_as_float((bits & 0x007FFFFFU) | 0x3F000000U);  // [0.5, 1)
  int sixteenth = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) sixteenth += mantissa >= edge[i] ? 1 : 0;
  const int n = 128 + 16 * (static_cast<int>(bits >> 23) - 127) + sixteenth;
  return static_cast<std::uint8_t>(min(max(n, 1), 255));
}

}  // namespace oscar::cuda
