#include "codec/row_kernels.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "codec/row_mean.h"

#if defined(__x86_64__)
#include <immintrin.h>
// Functions for AVX2 carry the target themselves instead of living in a *_avx2.cpp: those are compiled with FMA, which would
// let the compiler fuse multiply and add and so change codes.
#define OSCAR_TARGET_AVX2 __attribute__((target("avx2")))
#endif

namespace oscar {
namespace {

// One block of kWidth result columns held in registers while the rows of m stream by.
template <std::size_t kWidth>
[[gnu::always_inline]] inline void column_block(const float* x, const float* m, int dim, float* y) {
  float sum[kWidth] = {};
  for (int i = 0; i < dim; ++i) {
    const float xi = x[i];
    const float* row = m + static_cast<std::ptrdiff_t>(i) * dim;
    for (std::size_t j = 0; j < kWidth; ++j) sum[j] += xi * row[j];
  }
  for (std::size_t j = 0; j < kWidth; ++j) y[j] = sum[j];
}

template <std::size_t kWidth>
[[gnu::always_inline]] inline void multiply(const float* x, const float* m, int dim, float* y) {
  constexpr int kStep = static_cast<int>(kWidth);
  int j = 0;
  for (; j + kStep <= dim; j += kStep) column_block<kWidth>(x, m + j, dim, y + j);
  for (; j < dim; j += 4) column_block<4>(x, m + j, dim, y + j);
}

[[gnu::always_inline]] inline std::size_t pack(const float* y, std::size_t n, Int2Grid grid, std::uint8_t* codes) {
  constexpr std::size_t kBlock = 64;
  std::size_t outside = 0;
  for (std::size_t begin = 0; begin < n; begin += kBlock) {
    const std::size_t count = std::min(kBlock, n - begin);
    std::int32_t code[kBlock];
    std::int32_t out_of_range = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const float t = (y[begin + i] - grid.lo) / grid.step + 0.5F;
      out_of_range += static_cast<std::int32_t>(t < 0.0F) + static_cast<std::int32_t>(t >= 4.0F);
      const float clamped = t < 0.0F ? 0.0F : (t > 3.0F ? 3.0F : t);
      code[i] = static_cast<std::int32_t>(clamped);  // never negative: truncation is floor
    }
    outside += static_cast<std::size_t>(out_of_range);
    for (std::size_t i = 0; i < count; i += 4) {
      codes[(begin + i) / 4] =
          static_cast<std::uint8_t>(code[i] | (code[i + 1] << 2) | (code[i + 2] << 4) | (code[i + 3] << 6));
    }
  }
  return outside;
}

// mid_rise(): the code of t = y + levels / 2.
[[gnu::always_inline]] inline std::int32_t grid_code(float t, float levels) {
  const float at_least = (t > 0.0F) ? t : 0.0F;  // NaN: 0
  const float top = levels - 1.0F;
  return static_cast<std::int32_t>((at_least < top) ? at_least : top);  // not negative: truncation is floor
}

[[gnu::always_inline]] inline std::size_t quantise(const float* x, float scale, MidRiseRow grid, std::size_t n,
                                                   std::uint8_t* code) {
  std::int32_t saturated = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const float levels = 2.0F * grid.half_levels[i];
    const float t = x[i] * scale * grid.inverse_step[i] + grid.half_levels[i];
    saturated += static_cast<std::int32_t>(!(t >= 0.0F)) + static_cast<std::int32_t>(t >= levels);
    code[i] = static_cast<std::uint8_t>(grid_code(t, levels));
  }
  return static_cast<std::size_t>(saturated);
}

// The fixed order of GainError: the first n of quads to their sum. There must be room for a power of two of them.
[[gnu::always_inline]] inline float fold(float* quads, std::size_t n) {
  std::size_t width = std::bit_ceil(n);
  std::fill(quads + n, quads + width, 0.0F);
  for (; width > 1; width /= 2) {
    for (std::size_t i = 0; i < width / 2; ++i) quads[i] += quads[i + width / 2];
  }
  return quads[0];
}

GainError gain_error_baseline(const float* x, float scale, MidRiseRow grid, const float* weight, std::size_t n) {
  float error[kMaxHeadDim / 4];
  float radial[kMaxHeadDim / 4];
  for (std::size_t begin = 0; begin < n; begin += 4) {
    float e[4];
    float r[4];
    for (std::size_t j = 0; j < 4; ++j) {
      const std::size_t i = begin + j;
      const float half = grid.half_levels[i];
      const float y = x[i] * scale * grid.inverse_step[i];
      const float off = static_cast<float>(grid_code(y + half, 2.0F * half)) - (half - 0.5F) - y;
      e[j] = off * off * weight[i];
      r[j] = y * off * weight[i];
    }
    error[begin / 4] = (e[0] + e[1]) + (e[2] + e[3]);
    radial[begin / 4] = (r[0] + r[1]) + (r[2] + r[3]);
  }
  return {fold(error, n / 4), fold(radial, n / 4)};
}

void multiply_baseline(const float* x, const float* m, int dim, float* y) { multiply<32>(x, m, dim, y); }

std::size_t pack_baseline(const float* y, std::size_t n, Int2Grid grid, std::uint8_t* codes) { return pack(y, n, grid, codes); }

std::size_t quantise_baseline(const float* x, float scale, MidRiseRow grid, std::size_t n, std::uint8_t* code) {
  return quantise(x, scale, grid, n, code);
}

void unpack_baseline(const std::uint8_t* codes, std::size_t n_bytes, Int2Grid grid, float* y) {
  const float lo = grid.lo;
  const float step = grid.step;
  const float level[4] = {lo, lo + step, lo + step * 2.0F, lo + step * 3.0F};
  for (std::size_t i = 0; i < n_bytes; ++i) {
    const unsigned byte = codes[i];
    y[4 * i] = level[byte & 3U];
    y[4 * i + 1] = level[(byte >> 2) & 3U];
    y[4 * i + 2] = level[(byte >> 4) & 3U];
    y[4 * i + 3] = level[byte >> 6];
  }
}

#if defined(__x86_64__)
OSCAR_TARGET_AVX2 void multiply_avx2(const float* x, const float* m, int dim, float* y) { multiply<64>(x, m, dim, y); }

OSCAR_TARGET_AVX2 std::size_t pack_avx2(const float* y, std::size_t n, Int2Grid grid, std::uint8_t* codes) {
  return pack(y, n, grid, codes);
}

OSCAR_TARGET_AVX2 std::size_t quantise_avx2(const float* x, float scale, MidRiseRow grid, std::size_t n, std::uint8_t* code) {
  return quantise(x, scale, grid, n, code);
}

// The terms of 32 coordinates to eight quads: 0, 2, 4, 6 in the lower lane, 1, 3, 5, 7 in the upper.
OSCAR_TARGET_AVX2 inline __m256 quads_of(const __m256 (&t)[4]) {
  return _mm256_hadd_ps(_mm256_hadd_ps(t[0], t[1]), _mm256_hadd_ps(t[2], t[3]));
}

OSCAR_TARGET_AVX2 inline float fold_avx2(__m256* blocks, std::size_t n) {
  for (; n > 1; n /= 2) {
    for (std::size_t i = 0; i < n / 2; ++i) blocks[i] = _mm256_add_ps(blocks[i], blocks[i + n / 2]);
  }
  __m256 sum = _mm256_add_ps(blocks[0], _mm256_permute_ps(blocks[0], 0x0E));  // quads i and i + 4
  sum = _mm256_add_ps(sum, _mm256_permute_ps(sum, 0x01));                     // i and i + 2
  return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1)));
}

OSCAR_TARGET_AVX2 GainError gain_error_avx2(const float* x, float scale, MidRiseRow grid, const float* weight, std::size_t n) {
  constexpr std::size_t kBlocks = kMaxHeadDim / kGainBlock;
  __m256 error[kBlocks];
  __m256 radial[kBlocks];
  const std::size_t blocks = std::bit_ceil(n / kGainBlock);
  for (std::size_t b = 0; b < blocks; ++b) error[b] = radial[b] = _mm256_setzero_ps();
  const __m256 scales = _mm256_set1_ps(scale);
  const __m256 half_step = _mm256_set1_ps(0.5F);
  for (std::size_t begin = 0; begin < n; begin += kGainBlock) {
    __m256 e[4];
    __m256 r[4];
    for (std::size_t k = 0; k < 4; ++k) {
      const std::size_t i = begin + 8 * k;
      const __m256 half = _mm256_loadu_ps(grid.half_levels + i);
      const __m256 w = _mm256_loadu_ps(weight + i);
      const __m256 y = _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), scales), _mm256_loadu_ps(grid.inverse_step + i));
      const __m256 at_least = _mm256_max_ps(_mm256_add_ps(y, half), _mm256_setzero_ps());
      const __m256 top = _mm256_sub_ps(_mm256_add_ps(half, half), _mm256_set1_ps(1.0F));
      const __m256 code = _mm256_cvtepi32_ps(_mm256_cvttps_epi32(_mm256_min_ps(at_least, top)));
      const __m256 off = _mm256_sub_ps(_mm256_sub_ps(code, _mm256_sub_ps(half, half_step)), y);
      e[k] = _mm256_mul_ps(_mm256_mul_ps(off, off), w);
      r[k] = _mm256_mul_ps(_mm256_mul_ps(y, off), w);
    }
    error[begin / kGainBlock] = quads_of(e);
    radial[begin / kGainBlock] = quads_of(r);
  }
  return {fold_avx2(error, blocks), fold_avx2(radial, blocks)};
}

OSCAR_TARGET_AVX2 void unpack_avx2(const std::uint8_t* codes, std::size_t n_bytes, Int2Grid grid, float* y) {
  // vpermps looks at three index bits; the four levels stand twice in the table, so the next code's low bit does no harm.
  const float l0 = grid.lo;
  const float l1 = grid.lo + grid.step;
  const float l2 = grid.lo + grid.step * 2.0F;
  const float l3 = grid.lo + grid.step * 3.0F;
  const __m256 levels = _mm256_setr_ps(l0, l1, l2, l3, l0, l1, l2, l3);
  const __m256i low = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
  const __m256i high = _mm256_setr_epi32(16, 18, 20, 22, 24, 26, 28, 30);
  std::size_t i = 0;
  for (; i + 4 <= n_bytes; i += 4) {
    std::int32_t word = 0;
    __builtin_memcpy(&word, codes + i, sizeof word);
    const __m256i bits = _mm256_set1_epi32(word);
    _mm256_storeu_ps(y + 4 * i, _mm256_permutevar8x32_ps(levels, _mm256_srlv_epi32(bits, low)));
    _mm256_storeu_ps(y + 4 * i + 8, _mm256_permutevar8x32_ps(levels, _mm256_srlv_epi32(bits, high)));
  }
  unpack_baseline(codes + i, n_bytes - i, grid, y + 4 * i);
}
#endif

}  // namespace

float sum_of_squares(const float* x, std::size_t n) {
  float quads[kMaxHeadDim / 4];
  for (std::size_t i = 0; i < n; i += 4)
    quads[i / 4] = (x[i] * x[i] + x[i + 1] * x[i + 1]) + (x[i + 2] * x[i + 2] + x[i + 3] * x[i + 3]);
  return fold(quads, n / 4);
}

std::span<const RowKernels> row_kernel_sets() {
  static const std::vector<RowKernels> sets = [] {
    std::vector<RowKernels> usable;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") != 0)
      usable.push_back({"avx2", multiply_avx2, unpack_avx2, pack_avx2, quantise_avx2, gain_error_avx2});
#endif
    usable.push_back({"baseline", multiply_baseline, unpack_baseline, pack_baseline, quantise_baseline, gain_error_baseline});
    return usable;
  }();
  return sets;
}

}  // namespace oscar
