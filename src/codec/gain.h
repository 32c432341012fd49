// The gain byte of the spectral codec: 0 = zero, n > 0: 2^((n - 128) / 16). No library logarithm: bytes must not depend on
// where they were computed.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

namespace oscar {

// The gains that the encoder of keys tries, as distances of bytes: every kGainStride-th from the first to the last, and then
// the kGainFine nearest on both sides of the best. See oscar/codec/spectral.h.
inline constexpr int kGainFirst = -16;
inline constexpr int kGainLast = 12;
inline constexpr int kGainStride = 4;
inline constexpr int kGainFine = 2;
inline constexpr float kRadialCost = 4.0F;  // of the error along the row, beside that across it

class GainCode {
 public:
  static const GainCode& table() {
    static const GainCode instance;
    return instance;
  }
  // The nearest gain in the logarithm; g <= 0 or NaN: 0. `clamped` is set when g lies outside the range.
  [[nodiscard]] std::uint8_t encode(float g, bool& clamped) const {
    if (!(g > 0.0F)) return 0;
    int exponent = 0;
    const float mantissa = std::frexp(g, &exponent);  // g = mantissa * 2^exponent, mantissa in [0.5, 1)
    int sixteenth = 0;
    while (sixteenth < 16 && mantissa >= edge_[static_cast<std::size_t>(sixteenth)]) ++sixteenth;
    const int n = 128 + 16 * (exponent - 1) + sixteenth;
    clamped = n < 1 || n > 255 || !std::isfinite(g);
    return static_cast<std::uint8_t>(std::isfinite(g) ? (n < 1 ? 1 : (n > 255 ? 255 : n)) : 255);
  }
  [[nodiscard]] float decode(std::uint8_t n) const { return value_[n]; }
  // [16] mantissas in [0.5, 1) from which on the next sixteenth is nearer.
  [[nodiscard]] const std::array<float, 16>& edges() const { return edge_; }

 private:
  // Edges lie half a step above 0.5 * 2^(i / 16); values are rounded from double, in which exp2 is exact enough everywhere.
  GainCode() {
    for (std::size_t i = 0; i < edge_.size(); ++i) {
      edge_[i] = static_cast<float>(0.5 * std::exp2((static_cast<double>(i) + 0.5) / 16.0));
    }
    for (std::size_t n = 1; n < value_.size(); ++n) {
      value_[n] = static_cast<float>(std::exp2((static_cast<double>(n) - 128.0) / 16.0));
    }
  }
  std::array<float, 16> edge_{};
  std::array<float, 256> value_{};
};

}  // namespace oscar
