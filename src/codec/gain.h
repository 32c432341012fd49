// Gains of the spectral codec as small integers n: 0 = zero, n > 0: 2^((n - kOne) / kPerOctave). No library logarithm: they
// must not depend on where they were computed.
#pragma once

#include <algorithm>
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

template <int kPerOctave, int kOne, int kMost>
class GainCode {
  static constexpr std::size_t kParts = kPerOctave;

 public:
  static constexpr std::size_t kSize = kMost + 1;
  static const GainCode& table() {
    static const GainCode instance;
    return instance;
  }
  // The nearest gain in the logarithm; g <= 0 or NaN: 0. `clamped` is set when g lies outside the range.
  [[nodiscard]] std::uint8_t encode(float g, bool& clamped) const {
    if (!(g > 0.0F)) return 0;
    int exponent = 0;
    const float mantissa = std::frexp(g, &exponent);  // g = mantissa * 2^exponent, mantissa in [0.5, 1)
    int part = 0;
    while (part < kPerOctave && mantissa >= edge_[static_cast<std::size_t>(part)]) ++part;
    const int n = kOne + kPerOctave * (exponent - 1) + part;
    clamped = n < 1 || n > kMost || !std::isfinite(g);
    return static_cast<std::uint8_t>(std::isfinite(g) ? std::clamp(n, 1, kMost) : kMost);
  }
  [[nodiscard]] float decode(int n) const { return value_[static_cast<std::size_t>(n)]; }
  // Mantissas in [0.5, 1) from which on the next part of an octave is nearer.
  [[nodiscard]] const std::array<float, kParts>& edges() const { return edge_; }

 private:
  // Edges lie half a step above 0.5 * 2^(i / kPerOctave); values are rounded from double, in which exp2 is exact enough
  // everywhere.
  GainCode() {
    for (std::size_t i = 0; i < edge_.size(); ++i) {
      edge_[i] = static_cast<float>(0.5 * std::exp2((static_cast<double>(i) + 0.5) / kPerOctave));
    }
    for (std::size_t n = 1; n < value_.size(); ++n) {
      value_[n] = static_cast<float>(std::exp2((static_cast<double>(n) - kOne) / kPerOctave));
    }
  }
  std::array<float, kParts> edge_{};
  std::array<float, kSize> value_{};
};
using KeyGain = GainCode<16, 128, 255>;
using ValueGain = GainCode<8, 40, 63>;

}  // namespace oscar
