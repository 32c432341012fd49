// AVX2 + FMA + F16C. Only compiler intrinsics and raw pointers here: an inline function of a shared header could be emitted
// with these instructions and then be the copy that the linker keeps for everybody.
#include "attention/kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

#include <cstddef>

#include "attention/code_kernels.h"
#include "attention/simd/avx2.h"

namespace oscar::attention {
namespace {

__m256 widen8(const std::uint16_t* in) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in))); }

__m256 invisible8() { return _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xFF800000U))); }

float horizontal_max(__m256 v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

float horizontal_sum(__m256 v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

// exp(x) for x <= 88: x = n ln 2 + r, |r| <= ln 2 / 2, degree 6 in r (Cephes coefficients, 2 ulp); below -87.3 exactly 0.
__m256 exp8(__m256 x) {
  const __m256 tiny = _mm256_cmp_ps(x, _mm256_set1_ps(-87.3F), _CMP_LT_OQ);
  const __m256 n =
      _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504F)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375F), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4F), r);
  __m256 p = _mm256_set1_ps(1.9875691500e-4F);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3F));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3F));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2F));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1F));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1F));
  p = _mm256_fmadd_ps(_mm256_mul_ps(p, r), r, _mm256_add_ps(r, _mm256_set1_ps(1.0F)));
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_andnot_ps(tiny, _mm256_mul_ps(p, _mm256_castsi256_ps(exponent)));
}

// tanh(|x|) = 1 - 2 / (exp(2 |x|) + 1); the absolute error of about 1e-7 is what matters for a logit of softcap * tanh.
__m256 tanh8(__m256 x) {
  const __m256 sign = _mm256_and_ps(x, _mm256_set1_ps(-0.0F));
  const __m256 magnitude = _mm256_min_ps(_mm256_set1_ps(20.0F), _mm256_andnot_ps(_mm256_set1_ps(-0.0F), x));
  const __m256 e = exp8(_mm256_add_ps(magnitude, magnitude));
  const __m256 one = _mm256_set1_ps(1.0F);
  const __m256 t = _mm256_sub_ps(one, _mm256_div_ps(_mm256_set1_ps(2.0F), _mm256_add_ps(e, one)));
  return _mm256_or_ps(t, sign);
}

void widen(const std::uint16_t* in, int n, float* out) {
  int i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, widen8(in + i));
  for (; i < n; ++i) out[i] = _cvtsh_ss(in[i]);
}

int mask_row(const std::uint16_t* mask, float* bias) {
  __m256 visible = _mm256_setzero_ps();
  __m256 biased = _mm256_setzero_ps();
  for (int j = 0; j < kTile; j += 8) {
    const __m256 value = widen8(mask + j);
    visible = _mm256_or_ps(visible, _mm256_cmp_ps(value, invisible8(), _CMP_NEQ_UQ));
    biased = _mm256_or_ps(biased, _mm256_cmp_ps(value, _mm256_setzero_ps(), _CMP_NEQ_UQ));
    _mm256_storeu_ps(bias + j, value);
  }
  return (_mm256_movemask_ps(visible) != 0 ? kSomeVisible : 0) | (_mm256_movemask_ps(biased) != 0 ? kSomeBias : 0);
}

// R query rows against 4 keys: accumulators are lanes of the dot product, summed over lanes once per 4 keys.
template <int R>
void dots_rows(const float* q, std::int64_t ldq, const float* k, std::int64_t ldk, int dim, float* s) {
  constexpr std::size_t kRows = R;
  for (int j = 0; j < kTile; j += 4) {
    const float* key = k + j * ldk;
    __m256 sums[kRows][4];
#pragma GCC unroll 3
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) sums[r][c] = _mm256_setzero_ps();
    }
    for (int d = 0; d < dim; d += 8) {
      __m256 row[kRows];
#pragma GCC unroll 3
      for (int r = 0; r < R; ++r) row[r] = _mm256_loadu_ps(q + r * ldq + d);
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) {
        const __m256 value = _mm256_loadu_ps(key + c * ldk + d);
#pragma GCC unroll 3
        for (int r = 0; r < R; ++r) sums[r][c] = _mm256_fmadd_ps(row[r], value, sums[r][c]);
      }
    }
#pragma GCC unroll 3
    for (int r = 0; r < R; ++r) {
      const __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(sums[r][0], sums[r][1]), _mm256_hadd_ps(sums[r][2], sums[r][3]));
      _mm_storeu_ps(s + r * kTile + j, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
    }
  }
}

void dots(const float* q, std::int64_t ldq, int rows, const float* k, std::int64_t ldk, int dim, float* s) {
  int r = 0;
  for (; r + 3 <= rows; r += 3) dots_rows<3>(q + r * ldq, ldq, k, ldk, dim, s + r * kTile);
  if (rows - r == 2) dots_rows<2>(q + r * ldq, ldq, k, ldk, dim, s + r * kTile);
  if (rows - r == 1) dots_rows<1>(q + r * ldq, ldq, k, ldk, dim, s + r * kTile);
}

void transpose(const float* k, std::int64_t ldk, int dim, float* panels) {
  for (int j = 0; j < kTile; j += 8) {
    const float* key = k + j * ldk;
    float* out = panels + static_cast<std::int64_t>(j / kPanel) * dim * kPanel + j % kPanel;
    for (int d = 0; d < dim; d += 8) {
      __m256 a[8];
      __m256 b[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(key + i * ldk + d);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        b[2 * i] = _mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]);
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
        _mm256_storeu_ps(out + (d + i) * kPanel, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
        _mm256_storeu_ps(out + (d + i + 4) * kPanel, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
      }
    }
  }
}

// R x 16 block of the product: 2 R accumulators, 2 loads of b and R broadcasts per step. R = 6 keeps both FMA pipes full.
template <int R>
void multiply_block(const float* a, std::int64_t lda, int depth, const float* b, std::int64_t ldb, float* c, std::int64_t ldc,
                    bool accumulate) {
  constexpr std::size_t kRows = R;
  __m256 sums[kRows][2];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_ps();
#pragma GCC unroll 2
  for (int i = 0; i < depth; ++i) {
    const __m256 b0 = _mm256_loadu_ps(b);
    const __m256 b1 = _mm256_loadu_ps(b + 8);
    b += ldb;
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m256 factor = _mm256_broadcast_ss(a + r * lda + i);
      sums[r][0] = _mm256_fmadd_ps(factor, b0, sums[r][0]);
      sums[r][1] = _mm256_fmadd_ps(factor, b1, sums[r][1]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    float* target = c + r * ldc;
    if (accumulate) {
      sums[r][0] = _mm256_add_ps(_mm256_loadu_ps(target), sums[r][0]);
      sums[r][1] = _mm256_add_ps(_mm256_loadu_ps(target + 8), sums[r][1]);
    }
    _mm256_storeu_ps(target, sums[r][0]);
    _mm256_storeu_ps(target + 8, sums[r][1]);
  }
}

void multiply(const float* a, std::int64_t lda, int rows, int depth, const float* b, std::int64_t ldb, int cols, float* c,
              std::int64_t ldc, bool accumulate) {
  for (int n = 0; n < cols; n += kPanel, b += kPanel, c += kPanel) {
    int r = 0;
    for (; r + 6 <= rows; r += 6) multiply_block<6>(a + r * lda, lda, depth, b, ldb, c + r * ldc, ldc, accumulate);
    const float* rest = a + r * lda;
    float* target = c + r * ldc;
    switch (rows - r) {
      case 5:
        multiply_block<5>(rest, lda, depth, b, ldb, target, ldc, accumulate);
        break;
      case 4:
        multiply_block<4>(rest, lda, depth, b, ldb, target, ldc, accumulate);
        break;
      case 3:
        multiply_block<3>(rest, lda, depth, b, ldb, target, ldc, accumulate);
        break;
      case 2:
        multiply_block<2>(rest, lda, depth, b, ldb, target, ldc, accumulate);
        break;
      case 1:
        multiply_block<1>(rest, lda, depth, b, ldb, target, ldc, accumulate);
        break;
      default:
        break;
    }
  }
}

float logits(float* s, const float* bias, float slope, float softcap) {
  const __m256 slopes = _mm256_set1_ps(slope);
  const __m256 cap = _mm256_set1_ps(softcap);
  __m256 max = invisible8();
  for (int j = 0; j < kTile; j += 8) {
    __m256 x = _mm256_loadu_ps(s + j);
    if (softcap != 0.0F) x = _mm256_mul_ps(cap, tanh8(_mm256_div_ps(x, cap)));
    if (bias != nullptr) {
      const __m256 value = _mm256_loadu_ps(bias + j);
      const __m256 hidden = _mm256_cmp_ps(value, invisible8(), _CMP_EQ_OQ);
      x = _mm256_blendv_ps(_mm256_fmadd_ps(slopes, value, x), invisible8(), hidden);
    }
    _mm256_storeu_ps(s + j, x);
    max = _mm256_max_ps(max, x);
  }
  return horizontal_max(max);
}

float exponentials(float* s, float max) {
  const __m256 maximum = _mm256_set1_ps(max);
  __m256 sum = _mm256_setzero_ps();
  for (int j = 0; j < kTile; j += 8) {
    const __m256 p = exp8(_mm256_sub_ps(_mm256_loadu_ps(s + j), maximum));
    _mm256_storeu_ps(s + j, p);
    sum = _mm256_add_ps(sum, p);
  }
  return horizontal_sum(sum);
}

void complex_multiply(const float* a, const float* b, int n, float* out) {
  for (int i = 0; i < n; i += 8) {
    const __m256 ar = _mm256_loadu_ps(a + i);
    const __m256 ai = _mm256_loadu_ps(a + n + i);
    const __m256 br = _mm256_loadu_ps(b + i);
    const __m256 bi = _mm256_loadu_ps(b + n + i);
    _mm256_storeu_ps(out + i, _mm256_fmsub_ps(ar, br, _mm256_mul_ps(ai, bi)));
    _mm256_storeu_ps(out + n + i, _mm256_fmadd_ps(ar, bi, _mm256_mul_ps(ai, br)));
  }
}

}  // namespace

const Kernels* avx2_kernels() {
  using Code = CodeKernels<Avx2, Sse>;
  static constexpr Kernels kernels = {"avx2",       widen,        mask_row,
                                      dots,         transpose,    multiply,
                                      logits,       exponentials, Code::transpose_words,
                                      Code::interleave, Code::spread, Code::key_scores,
                                      Code::quantise_weights, Code::value_sums, complex_multiply};
  return &kernels;
}

}  // namespace oscar::attention

#else

namespace oscar::attention {

const Kernels* avx2_kernels() { return nullptr; }

}  // namespace oscar::attention

#endif
