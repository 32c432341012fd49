// AVX-512 (F, BW, DQ, VL) + VNNI in the vocabulary of code_kernels.h; see avx2.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "attention/kernels.h"

namespace oscar::attention {
namespace {

struct Avx512 {
  using Words = __m512i;
  using Floats = __m512;
  static constexpr int kWords = 16;
  static constexpr int kRegisters = 32;

  static Words load(const std::uint32_t* p) { return _mm512_loadu_si512(p); }
  static void store(std::uint32_t* p, Words v) { _mm512_storeu_si512(p, v); }
  static Words all(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static Words both(Words a, Words b) { return _mm512_and_si512(a, b); }
  static Words either(Words a, Words b) { return _mm512_or_si512(a, b); }
  static Words shift_right(Words v, int n) { return _mm512_srl_epi32(v, _mm_cvtsi32_si128(n)); }
  static Words shift_left(Words v, int n) { return _mm512_sll_epi32(v, _mm_cvtsi32_si128(n)); }

  template <int n>
  static Words left(Words v) {
    return _mm512_slli_epi32(v, n);
  }
  template <int n>
  static Words right(Words v) {
    return _mm512_srli_epi32(v, n);
  }

  static Floats load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
  static Floats all(float x) { return _mm512_set1_ps(x); }
  static Floats zero() { return _mm512_setzero_ps(); }
  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  static Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  static Floats reverse(Floats v) {
    return _mm512_permutexvar_ps(_mm512_setr_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), v);
  }
  static Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
  static Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
  static Floats absolute(Floats v) { return _mm512_abs_ps(v); }
  static Floats with_sign(Floats size, Floats sign) { return _mm512_or_ps(size, _mm512_and_ps(sign, _mm512_set1_ps(-0.0F))); }
  static Floats round(Floats v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static Floats times_power_of_two(Floats v, Floats n) { return _mm512_scalef_ps(v, n); }
  static Floats zero_below(Floats v, Floats x, Floats limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), v);
  }
  static Floats where_equal(Floats a, Floats b, Floats yes, Floats no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), no, yes);
  }
  static float sum(Floats v) { return _mm512_reduce_add_ps(v); }
  static float largest(Floats v) { return _mm512_reduce_max_ps(v); }

  static Floats widen(const std::uint16_t* halves) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
  }
  static float widen_one(std::uint16_t half) { return _cvtsh_ss(half); }
  // The sum of every vector, one after the other.
  static void store_sums(Floats a, Floats b, Floats c, Floats d, float* p) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  }

  // One 32-bit sum per word.
  using Sums = __m512i;
  static constexpr int kHeldWords = 64;
  static constexpr int kLongestSum = 1 << 24;
  static Words key_bytes(Words codes) { return codes; }
  static Sums start(const IntegerQuery& q) { return _mm512_set1_epi32(-(q.even + q.odd)); }
  static Sums no_sums() { return _mm512_setzero_si512(); }
  // Not intrinsics, whose result is a new value: of the sums of six rows GCC 12 then keeps a second copy in memory. Words of a
  // query come from memory, as it would also hoist them into registers.
  static void add_key_products(Sums& sums, Words codes, Words query) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(query));
  }
  static void add_key_products(Sums& sums, Words codes, const std::uint32_t* query) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(codes), "m"(*query));
  }
  static void add_value_products(Sums& sums, Words weights, Words codes) { add_key_products(sums, weights, codes); }
  static Floats key_total(Sums sums) { return _mm512_cvtepi32_ps(sums); }
  static Floats value_total(Sums sums) { return key_total(sums); }

  static Words no_words() { return _mm512_setzero_si512(); }
  static void store_bytes(std::uint8_t* p, Floats v, Words& sums) {
    const __m512i x = _mm512_cvtps_epi32(v);
    sums = _mm512_add_epi32(sums, x);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
  }
  static std::int32_t sum(Words v) { return _mm512_reduce_add_epi32(v); }
};

}  // namespace
}  // namespace oscar::attention
