#include "codec/digits.h"

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
// The target is given per function, see row_kernels.cpp.
#define OSCAR_TARGET_AVX2 __attribute__((target("avx2")))
#endif

namespace oscar {
namespace {

void unpack_range(const DigitLayout& layout, const std::uint8_t* digits, float gain, std::size_t begin, float* y) {
  for (std::size_t i = begin; i < layout.count[0]; i += 4) {
    std::array<unsigned, 4> code{};
    for (std::size_t l = 0; l < kMaxDigits && i < layout.count[l]; ++l) {
      const unsigned byte = digits[layout.offset[l] + i / 4];
      for (unsigned j = 0; j < 4; ++j) code[j] |= ((byte >> (2 * j)) & 3U) << (2 * l);
    }
    for (std::size_t j = 0; j < 4; ++j) y[i + j] = gain * (static_cast<float>(code[j]) - layout.centre[i + j]);
  }
}

void unpack_baseline(const DigitLayout& layout, const std::uint8_t* digits, float gain, float* y) {
  unpack_range(layout, digits, gain, 0, y);
}

#if defined(__x86_64__)
// Eight coordinates: two bytes of every level that reaches them.
OSCAR_TARGET_AVX2 __m256i digit_pair(const std::uint8_t* bytes, int shift) {
  std::uint16_t word = 0;
  __builtin_memcpy(&word, bytes, sizeof word);
  const __m256i places = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
  const __m256i digit = _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(word), places), _mm256_set1_epi32(3));
  return _mm256_slli_epi32(digit, shift);
}

OSCAR_TARGET_AVX2 void unpack_avx2(const DigitLayout& layout, const std::uint8_t* digits, float gain, float* y) {
  const __m256 g = _mm256_set1_ps(gain);
  std::size_t i = 0;
  // A level that ends in the middle of eight coordinates stops the fast loop of its depth for one quad.
  for (; i + 8 <= layout.count[0]; i += 8) {
    __m256i code = digit_pair(digits + i / 4, 0);
    bool straddles = false;
    for (std::size_t l = 1; l < kMaxDigits && i < layout.count[l]; ++l) {
      straddles = i + 8 > layout.count[l];
      if (straddles) break;
      code = _mm256_or_si256(code, digit_pair(digits + layout.offset[l] + i / 4, static_cast<int>(2 * l)));
    }
    if (straddles) {
      std::array<unsigned, 8> parts{};
      for (std::size_t l = 0; l < kMaxDigits; ++l) {
        for (std::size_t j = i; j < i + 8 && j < layout.count[l]; ++j) {
          const unsigned byte = digits[layout.offset[l] + j / 4];
          parts[j - i] |= ((byte >> (2 * (j % 4))) & 3U) << (2 * l);
        }
      }
      code = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(parts.data()));
    }
    const __m256 centred = _mm256_sub_ps(_mm256_cvtepi32_ps(code), _mm256_loadu_ps(layout.centre.data() + i));
    _mm256_storeu_ps(y + i, _mm256_mul_ps(g, centred));
  }
  unpack_range(layout, digits, gain, i, y);
}
#endif

}  // namespace

DigitLayout::DigitLayout(std::span<const int> widths) {
  for (const int width : widths) {
    if (width == 0) break;
    for (std::size_t l = 0; l < static_cast<std::size_t>(width) / 2; ++l) ++count[l];
    centre.push_back(static_cast<float>((1 << width) - 1) / 2.0F);
  }
  for (std::size_t l = 0; l < kMaxDigits; ++l) {
    offset[l] = bytes;
    bytes += count[l] / 4;
  }
}

void pack_digits(const DigitLayout& layout, const std::uint8_t* codes, std::uint8_t* out) {
  for (std::size_t l = 0; l < kMaxDigits; ++l) {
    for (std::size_t i = 0; i < layout.count[l]; i += 4) {
      unsigned byte = 0;
      for (std::size_t j = 0; j < 4; ++j) byte |= ((codes[i + j] >> (2 * l)) & 3U) << (2 * j);
      out[layout.offset[l] + i / 4] = static_cast<std::uint8_t>(byte);
    }
  }
}

std::span<const DigitKernels> digit_kernel_sets() {
  static const std::vector<DigitKernels> sets = [] {
    std::vector<DigitKernels> usable;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") != 0) usable.push_back({"avx2", unpack_avx2});
#endif
    usable.push_back({"baseline", unpack_baseline});
    return usable;
  }();
  return sets;
}

}  // namespace oscar
