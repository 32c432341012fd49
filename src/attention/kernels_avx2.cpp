// AVX2 + FMA + F16C. Only compiler intrinsics and raw pointers here: an inline function of a shared header could be emitted
// with these instructions and then be the copy that the linker keeps for everybody.
#include "attention/kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

#include <cstddef>

#include "attention/code_kernels.h"
#include "attention/float_kernels.h"
#include "attention/simd/avx2.h"

namespace oscar::attention {
namespace {

__m256 widen8(const std::uint16_t* in) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in))); }

__m256 invisible8() { return _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xFF800000U))); }

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

}  // namespace

const Kernels* avx2_kernels() {
  using Code = CodeKernels<Avx2, Sse>;
  using Float = FloatKernels<Avx2>;
  static constexpr Kernels kernels = {"avx2",
                                      widen,
                                      mask_row,
                                      dots,
                                      transpose,
                                      Float::multiply,
                                      Float::logits,
                                      Float::exponentials,
                                      Code::transpose_words,
                                      Code::interleave,
                                      Code::look_up,
                                      Code::unpack_keys,
                                      Code::spread,
                                      Code::key_scores,
                                      Code::quantise_weights,
                                      Code::value_sums,
                                      Float::complex_multiply};
  return &kernels;
}

}  // namespace oscar::attention

#else

namespace oscar::attention {

const Kernels* avx2_kernels() { return nullptr; }

}  // namespace oscar::attention

#endif
