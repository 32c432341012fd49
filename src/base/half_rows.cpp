#include "base/half_rows.h"

#include <bit>
#include <cmath>

#include "oscar/base/half.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define OSCAR_TARGET_F16C __attribute__((target("avx2,f16c")))
#endif

namespace oscar {
namespace {

void widen_plain(const std::uint16_t* half, std::size_t n, float* out) {
  for (std::size_t i = 0; i < n; ++i) out[i] = half_to_float(half[i]);
}

std::uint16_t even_half(float value) {
  return static_cast<std::uint16_t>(round_to_even_mantissa(std::fabs(value)) | (std::signbit(value) ? 0x8000U : 0U));
}

template <std::uint16_t (*round)(float)>
bool narrow_plain(const float* value, std::size_t n, float largest, std::uint16_t* out) {
  for (std::size_t i = 0; i < n; ++i) {
    if (!(std::fabs(value[i]) <= largest)) return false;
    out[i] = round(value[i]);
  }
  return true;
}

#if defined(__x86_64__)
bool has_f16c() {
  static const bool has = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0 && __builtin_cpu_supports("avx2") != 0;
  }();
  return has;
}

OSCAR_TARGET_F16C std::size_t widen_f16c(const std::uint16_t* half, std::size_t n, float* out) {
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(half + i))));
  return i;
}

OSCAR_TARGET_F16C bool any_above(__m256 value, __m256 largest) {
  const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0F), value);
  return _mm256_movemask_ps(_mm256_cmp_ps(magnitude, largest, _CMP_NLE_UQ)) != 0;
}

// How many were written; -1: a value is too large.
OSCAR_TARGET_F16C std::ptrdiff_t narrow_f16c(const float* value, std::size_t n, float largest, std::uint16_t* out) {
  const __m256 limit = _mm256_set1_ps(largest);
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 x = _mm256_loadu_ps(value + i);
    if (any_above(x, limit)) return -1;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  return static_cast<std::ptrdiff_t>(i);
}

// As round_to_even_mantissa, eight at a time.
OSCAR_TARGET_F16C std::ptrdiff_t narrow_even_f16c(const float* value, std::size_t n, float largest, std::uint16_t* out) {
  const __m256 limit = _mm256_set1_ps(largest);
  const __m256 sign_bit = _mm256_set1_ps(-0.0F);
  std::size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 x = _mm256_loadu_ps(value + i);
    if (any_above(x, limit)) return -1;
    const __m256 magnitude = _mm256_andnot_ps(sign_bit, x);
    const __m256i bits = _mm256_castps_si256(magnitude);
    const __m256i steps =
        _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(magnitude, _mm256_set1_ps(1.0F))), _mm256_set1_epi32(0x3F800000));
    const __m256i small = _mm256_add_epi32(steps, steps);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 14), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_andnot_si256(_mm256_set1_epi32(0x3FFF),
                                                _mm256_add_epi32(bits, _mm256_add_epi32(_mm256_set1_epi32(0x1FFF), odd)));
    const __m256i normal = _mm256_min_epi32(_mm256_srli_epi32(_mm256_sub_epi32(rounded, _mm256_set1_epi32(0x38000000)), 13),
                                            _mm256_set1_epi32(0x7BFE));
    const __m256i is_small = _mm256_castps_si256(_mm256_cmp_ps(magnitude, _mm256_set1_ps(0x1p-14F), _CMP_LT_OQ));
    const __m256i half = _mm256_or_si256(_mm256_blendv_epi8(normal, small, is_small),
                                         _mm256_srli_epi32(_mm256_castps_si256(_mm256_and_ps(x, sign_bit)), 16));
    const __m128i narrow = _mm_packus_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), narrow);
  }
  return static_cast<std::ptrdiff_t>(i);
}
#endif

}  // namespace

std::uint16_t round_to_even_mantissa(float magnitude) {
  constexpr std::uint16_t kLargestEven = 0x7BFE;  // 65472
  if (magnitude < 0x1p-14F) {
    // Adding 1 aligns the mantissa so that the FPU's own rounding happens at 2^-23, twice the subnormal step of binary16.
    const std::uint32_t steps = std::bit_cast<std::uint32_t>(magnitude + 1.0F) - 0x3F800000U;
    return static_cast<std::uint16_t>(2 * steps);
  }
  if (magnitude >= 65536.0F) return kLargestEven;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(magnitude);
  const std::uint32_t rounded = (bits + 0x1FFFU + ((bits >> 14) & 1U)) & ~0x3FFFU;
  const auto half = static_cast<std::uint16_t>((rounded - 0x38000000U) >> 13);
  return half < kLargestEven ? half : kLargestEven;
}

void half_to_float(const std::uint16_t* half, std::size_t n, float* out) {
  std::size_t done = 0;
#if defined(__x86_64__)
  if (has_f16c()) done = widen_f16c(half, n, out);
#endif
  widen_plain(half + done, n - done, out + done);
}

bool float_to_half(const float* value, std::size_t n, float largest, std::uint16_t* out) {
  std::ptrdiff_t done = 0;
#if defined(__x86_64__)
  if (has_f16c()) done = narrow_f16c(value, n, largest, out);
#endif
  return done >= 0 && narrow_plain<float_to_half>(value + done, n - static_cast<std::size_t>(done), largest, out + done);
}

bool float_to_even_half(const float* value, std::size_t n, float largest, std::uint16_t* out) {
  std::ptrdiff_t done = 0;
#if defined(__x86_64__)
  if (has_f16c()) done = narrow_even_f16c(value, n, largest, out);
#endif
  return done >= 0 && narrow_plain<even_half>(value + done, n - static_cast<std::size_t>(done), largest, out + done);
}

}  // namespace oscar
