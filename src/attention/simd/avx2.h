// AVX2 + FMA in the vocabulary of code_kernels.h. Include it only in files compiled for it; everything is internal to the file.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace oscar::attention {
namespace {

struct Avx2 {
  using Words = __m256i;   // 8 words
  using Floats = __m256;   // 8
  using Sums = __m256i;    // of byte products, per word
  static constexpr int kWords = 8;
  static constexpr int kRegisters = 16;

  static Words load(const std::uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store(std::uint32_t* p, Words v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  static Words all(std::uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
  static Words both(Words a, Words b) { return _mm256_and_si256(a, b); }
  static Words either(Words a, Words b) { return _mm256_or_si256(a, b); }
  static Words shift_right(Words v, int n) { return _mm256_srl_epi32(v, _mm_cvtsi32_si128(n)); }
  static Words shift_left(Words v, int n) { return _mm256_sll_epi32(v, _mm_cvtsi32_si128(n)); }

  template <int n>
  static Words left(Words v) {
    return _mm256_slli_epi32(v, n);
  }
  template <int n>
  static Words right(Words v) {
    return _mm256_srli_epi32(v, n);
  }

  static Floats load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
  static Floats all(float x) { return _mm256_set1_ps(x); }
  static Floats zero() { return _mm256_setzero_ps(); }
  static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
  static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
  static Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
  static Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }
  static Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
  static Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }
  static Floats absolute(Floats v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0F), v); }
  static Floats with_sign(Floats size, Floats sign) { return _mm256_or_ps(size, _mm256_and_ps(sign, _mm256_set1_ps(-0.0F))); }
  static Floats round(Floats v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static Floats power_of_two(Floats n) {  // n integral, -126 .. 127
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
  }
  static Floats zero_below(Floats v, Floats x, Floats limit) { return _mm256_andnot_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ), v); }
  static Floats where_equal(Floats a, Floats b, Floats yes, Floats no) {
    return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_EQ_OQ));
  }
  static float sum(Floats v) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }
  static float largest(Floats v) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }

  // Sums are two 16-bit lanes per word that wrap: the centred result fits, see IntegerQuery.
  static constexpr int kLongestSum = 16 * 2 * 255 * 3;  // of non-negative products: below 2^15
  static Sums start(std::int16_t even, std::int16_t odd, std::int32_t /*sum*/) {
    const std::uint32_t word = static_cast<std::uint16_t>(-even) | static_cast<std::uint32_t>(static_cast<std::uint16_t>(-odd)) << 16;
    return _mm256_set1_epi32(static_cast<int>(word));
  }
  static Sums no_sums() { return _mm256_setzero_si256(); }
  // += products of a's unsigned and b's signed bytes.
  static void add_products(Sums& sums, Words a, Words b) { sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(a, b)); }
  static Floats total(Sums sums) { return _mm256_cvtepi32_ps(_mm256_madd_epi16(sums, _mm256_set1_epi16(1))); }

  // Rounds to bytes (0 .. 255), stores them, adds them to `sums`.
  static Words no_words() { return _mm256_setzero_si256(); }
  static void store_bytes(std::uint8_t* p, Floats v, Words& sums) {
    const __m256i x = _mm256_cvtps_epi32(v);
    sums = _mm256_add_epi32(sums, x);
    const __m128i narrow = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(narrow, narrow));
  }
  static std::int32_t sum(Words v) {
    __m128i x = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xB1)));
  }
};

// 16 bytes at a time, for every x86 path.
struct Sse {
  using Bytes = __m128i;
  static Bytes load(const std::uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  static void store(std::uint32_t* p, Bytes v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v); }
  static Bytes low_bytes(Bytes a, Bytes b) { return _mm_unpacklo_epi8(a, b); }
  static Bytes high_bytes(Bytes a, Bytes b) { return _mm_unpackhi_epi8(a, b); }
  static Bytes low_halves(Bytes a, Bytes b) { return _mm_unpacklo_epi16(a, b); }
  static Bytes high_halves(Bytes a, Bytes b) { return _mm_unpackhi_epi16(a, b); }
  static Bytes low_words(Bytes a, Bytes b) { return _mm_unpacklo_epi32(a, b); }
  static Bytes high_words(Bytes a, Bytes b) { return _mm_unpackhi_epi32(a, b); }
  static Bytes low_doubles(Bytes a, Bytes b) { return _mm_unpacklo_epi64(a, b); }
  static Bytes high_doubles(Bytes a, Bytes b) { return _mm_unpackhi_epi64(a, b); }
};

}  // namespace
}  // namespace oscar::attention
