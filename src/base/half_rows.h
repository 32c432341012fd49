// Rows of binary16, with the processor's own conversions where it has them. Results are those of base/half.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace oscar {

void half_to_float(const std::uint16_t* half, std::size_t n, float* out);

// out[i] = float_to_half(value[i]), i < n. False, and out is not written completely: some |value| is above `largest`, or NaN.
bool float_to_half(const float* value, std::size_t n, float largest, std::uint16_t* out);

// The same rounded to the nearest binary16 whose lowest mantissa bit is 0, ties to a mantissa divisible by 4.
bool float_to_even_half(const float* value, std::size_t n, float largest, std::uint16_t* out);

// Finite, up to 65535: the plain form of float_to_even_half for a magnitude.
[[nodiscard]] std::uint16_t round_to_even_mantissa(float magnitude);

}  // namespace oscar
