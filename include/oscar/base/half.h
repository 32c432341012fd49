// IEEE binary16 <-> binary32, bit-exact with round-to-nearest-even (the same results as F16C), without needing F16C.
#pragma once

#include <bit>
#include <cstdint>

namespace oscar {

[[nodiscard]] constexpr float half_to_float(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000U) << 16;
  const std::uint32_t exponent = (h >> 10) & 0x1FU;
  const std::uint32_t mantissa = h & 0x3FFU;
  if (exponent == 0x1FU) return std::bit_cast<float>(sign | 0x7F800000U | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112U) << 23) | (mantissa << 13));
  // Subnormal: value = mantissa * 2^-24, exact in binary32.
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
  return (sign != 0) ? -magnitude : magnitude;
}

[[nodiscard]] constexpr std::uint16_t float_to_half(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude >= 0x7F800000U) {  // inf, NaN (quiet, payload's high bits kept as F16C does)
    const std::uint32_t mantissa = (magnitude > 0x7F800000U) ? (0x200U | ((magnitude >> 13) & 0x3FFU)) : 0U;
    return static_cast<std::uint16_t>(sign | 0x7C00U | mantissa);
  }
  if (magnitude >= 0x477FF000U) return static_cast<std::uint16_t>(sign | 0x7C00U);  // rounds to inf
  if (magnitude < 0x38800000U) {                                                    // subnormal half or zero
    // Adding 0.5 aligns the mantissa so that the FPU's own rounding yields round-to-nearest-even at 2^-24.
    const float aligned = std::bit_cast<float>(magnitude) + 0.5F;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(aligned) - 0x3F000000U));
  }
  const std::uint32_t rounded = magnitude + 0xFFFU + ((magnitude >> 13) & 1U);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000U) >> 13));
}

}  // namespace oscar
