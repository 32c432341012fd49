// Packing and unpacking of base-4 digits by level, the byte layout of spectral keys (see spectral.h). Results are the same bits
// for every instruction set.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace oscar {

inline constexpr std::size_t kMaxDigits = 4;

// Where the digits of one head lie: level l holds the l-th digits of the first count[l] coordinates; counts do not increase
// and are multiples of 4.
struct DigitLayout {
  std::array<std::size_t, kMaxDigits> count{};
  std::array<std::size_t, kMaxDigits> offset{};  // bytes
  std::size_t bytes = 0;
  std::vector<float> centre;  // [count[0]]: (2^b - 1) / 2

  DigitLayout() = default;
  explicit DigitLayout(std::span<const int> widths);  // non-increasing, even, 0 .. 8, equal within quads
};

void pack_digits(const DigitLayout& layout, const std::uint8_t* codes, std::uint8_t* out);  // codes [count[0]]

struct DigitKernels {
  const char* name;
  // y[i] = gain * (code_i - centre_i), i < count[0].
  void (*unpack)(const DigitLayout& layout, const std::uint8_t* digits, float gain, float* y);
};
std::span<const DigitKernels> digit_kernel_sets();  // all that this processor can run, best first

}  // namespace oscar
