// AVX-512 (F, BW, DQ, VL) + VNNI in the vocabulary of code_kernels.h; see avx2.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace oscar::attention {
namespace {

struct Avx512 {
  using Words = __m512i;
  using Floats = __m512;
  using Sums = __m512i;
  static constexpr int kWords = 16;

  static Words load(const std::uint32_t* p) { return _mm512_loadu_si512(p); }
  static void store(std::uint32_t* p, Words v) { _mm512_storeu_si512(p, v); }
  static Words all(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static Words both(Words a, Words b) { return _mm512_and_si512(a, b); }
  static Words either(Words a, Words b) { return _mm512_or_si512(a, b); }
  static Words shift_right(Words v, int n) { return _mm512_srl_epi32(v, _mm_cvtsi32_si128(n)); }
  static Words shift_left(Words v, int n) { return _mm512_sll_epi32(v, _mm_cvtsi32_si128(n)); }

  static Floats load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
  static Floats all(float x) { return _mm512_set1_ps(x); }
  static Floats zero() { return _mm512_setzero_ps(); }
  static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
  static Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
  static float largest(Floats v) { return _mm512_reduce_max_ps(v); }

  // One 32-bit sum per word.
  static constexpr int kLongestSum = 1 << 24;
  static Sums start(std::int16_t even, std::int16_t odd, std::int32_t /*sum*/) { return _mm512_set1_epi32(-(even + odd)); }
  static Sums no_sums() { return _mm512_setzero_si512(); }
  static void add_products(Sums& sums, Words a, Words b) { sums = _mm512_dpbusd_epi32(sums, a, b); }
  static Floats total(Sums sums) { return _mm512_cvtepi32_ps(sums); }

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
