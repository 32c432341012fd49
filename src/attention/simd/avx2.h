// AVX2 + FMA in the vocabulary of code_kernels.h. Include it only in files compiled for it; everything is internal to the file.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "attention/kernels.h"

namespace oscar::attention {
namespace {

struct Avx2 {
  using Words = __m256i;  // 8 words
  using Floats = __m256;  // 8
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
  static Floats reverse(Floats v) { return _mm256_permutevar8x32_ps(v, _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0)); }
  static Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
  static Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }
  static Floats absolute(Floats v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0F), v); }
  static Floats with_sign(Floats size, Floats sign) { return _mm256_or_ps(size, _mm256_and_ps(sign, _mm256_set1_ps(-0.0F))); }
  static Floats round(Floats v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static Floats times_power_of_two(Floats v, Floats n) {  // n integral, -126 .. 127; below, anything
    return _mm256_mul_ps(
        v, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23)));
  }
  static Floats zero_below(Floats v, Floats x, Floats limit) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ), v);
  }
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

  static Floats widen(const std::uint16_t* halves) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
  }
  static float widen_one(std::uint16_t half) { return _cvtsh_ss(half); }
  static Words different(Floats a, Floats b) { return _mm256_castps_si256(_mm256_cmp_ps(a, b, _CMP_NEQ_UQ)); }
  static bool any(Words v) { return _mm256_testz_si256(v, v) == 0; }
  // The sum of every vector, one after the other.
  static void store_sums(Floats a, Floats b, Floats c, Floats d, float* p) {
    const __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
  }
  // Rows of a square to its columns.
  static void transpose(Floats (&a)[8]) {
    Floats b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
      b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
      a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
      a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xEE);
      a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
      a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xEE);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      b[i] = _mm256_permute2f128_ps(a[i], a[i + 4], 0x20);
      b[i + 4] = _mm256_permute2f128_ps(a[i], a[i + 4], 0x31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) a[i] = b[i];
  }

  // Sums of byte products are two 16-bit lanes per word that wrap: the centred result fits, see IntegerQuery.
  using Sums = __m256i;
  static constexpr int kHeldWords = 64;                  // whose sums are in registers at a time: kTile or a part of it
  static constexpr int kLongestSum = 16 * 2 * 255 * 3;   // of non-negative products: below 2^15
  static Words key_bytes(Words codes) { return codes; }  // as the products take them
  static Sums start(const IntegerQuery& q) {             // a key's sum less its centre
    const std::uint32_t word =
        static_cast<std::uint16_t>(-q.even) | static_cast<std::uint32_t>(static_cast<std::uint16_t>(-q.odd)) << 16;
    return _mm256_set1_epi32(static_cast<int>(word));
  }
  static Sums no_sums() { return _mm256_setzero_si256(); }
  static void add_key_products(Sums& sums, Words codes, Words query) {
    sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, query));
  }
  static void add_value_products(Sums& sums, Words weights, Words codes) {
    sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, codes));
  }
  static Floats key_total(Sums sums) { return _mm256_cvtepi32_ps(_mm256_madd_epi16(sums, _mm256_set1_epi16(1))); }
  static Floats value_total(Sums sums) { return key_total(sums); }

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
