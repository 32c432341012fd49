// The products of the portable prefill kernel, of one warp's 16 query rows, all m16n8k16 of binary16.
//
// Digits of a page are operands as they lie there (oscar/paged/page_format.h): of a word, an AND with 0x00030003 4^e makes two
// binary16 subnormals digit 4^e 2^-24, exact; bytes 0 and 2 are columns 2 t and 2 t + 1 of the summed index, bytes 1 and 3, by
// a shift, 2 t + 8 and 2 t + 9. So tokens are summed over in the order of columns that logits have, and slots in an order that
// the coded query follows. The field e belongs to 16 tokens (keys) or 16 dimensions (values): the factor 4^e is undone in the
// results. No tile of keys or values is made, and lanes read a page as it was copied.
#pragma once

#include "cuda/warp_reduce.cuh"
#include "oscar/paged/page_format.h"

namespace oscar::cuda {

inline constexpr std::uint32_t kTwoOnes = 0x3C003C00U;  // of binary16

// Slot of 16 that stands in column k of a step.
__device__ __forceinline__ int slot_of_column(int k) { return k % 8 / 2 * 4 + k % 2 * 2 + k / 8; }
// What undoes field e of a digit.
[[nodiscard]] __host__ __device__ constexpr float field_unit(int e) { return 0x1p24F / static_cast<float>(1 << (2 * e)); }

// Binary exponent of x, kept away from the ends of binary32; 0 of what is not positive and finite.
__device__ __forceinline__ int exponent_of(float x) { return x > 0.0F && x < 3e38F ? min(max(ilogbf(x), -100), 100) : 0; }

__device__ __forceinline__ void mma(float (&d)[4], const uint4& a, std::uint32_t b0, std::uint32_t b1) {
  mma(d, a.x, a.y, a.z, a.w, b0, b1);
}

// A B fragment of a matrix of binary32 with rows of D in device memory, as the sum of two of binary16.
template <int D>
struct SplitFragment {
  std::uint32_t high[2], low[2];

  // from: entry (2 t, g). The columns of lanes may lie anywhere.
  __device__ __forceinline__ void load(const float* from, float factor) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float x = __ldg(from + 8 * half * D) * factor;
      const float y = __ldg(from + (8 * half + 1) * D) * factor;
      high[half] = pack_half2(x, y);
      const float2 rounded = __half22float2(*reinterpret_cast<const __half2*>(&high[half]));
      low[half] = pack_half2(x - rounded.x, y - rounded.y);
    }
  }
  // d += a b.
  __device__ __forceinline__ void multiply(float (&d)[4], const uint4& a) const {
    mma(d, a, low[0], low[1]);
    mma(d, a, high[0], high[1]);
  }
};

// One step of 16 slots; words: of rows 0 .. 7 and 8 .. 15 of the page's groups of tokens.
__device__ __forceinline__ void key_step(float (&s)[8][4], const uint4& a, std::uint32_t low, std::uint32_t high) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const std::uint32_t field = 0x00030003U << (2 * e);
    mma(s[2 * e], a, low & field, low >> 8 & field);
    mma(s[2 * e + 1], a, high & field, high >> 8 & field);
  }
}

// s = queries (digits - 1.5), of group e of 16 tokens in units of 1 / field_unit(e). queries: the warp's A fragments, sums: of
// its rows. keys: a head's digits in a page.
__device__ __forceinline__ void key_product(std::uint32_t queries, const float (&sums)[2], std::uint32_t keys, int slots,
                                            int lane, float (&s)[8][4]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[j][i] = sums[i / 2] * (-1.5F / field_unit(j / 2));
  }
  const std::uint32_t words = keys + 16U * static_cast<std::uint32_t>(lane);
  std::uint32_t fragments = queries + 16U * static_cast<std::uint32_t>(lane);
#pragma unroll 1
  for (int pair = 0; pair < slots / 32; ++pair) {
    const uint4 w = load_shared_16(words + 512U * static_cast<std::uint32_t>(pair));
    key_step(s, load_shared_16(fragments), w.x, w.y);
    key_step(s, load_shared_16(fragments + 512U), w.z, w.w);
    fragments += 1024U;
  }
  if (slots % 32 != 0) {
    const uint2 w = load_shared_8(keys + 512U * static_cast<std::uint32_t>(slots / 32) + 8U * static_cast<std::uint32_t>(lane));
    key_step(s, load_shared_16(fragments), w.x, w.y);
  }
}

// out += p digits, of dimension d in units of 1 / field_unit(d / 16 mod 4); weight += sums of p. p: A fragments of 16 tokens.
template <int D>
__device__ __forceinline__ void value_product(const uint4 (&p)[4], std::uint32_t values, int lane, float (&out)[D / 8][4],
                                              float (&weight)[4]) {
#pragma unroll
  for (const uint4& group : p) mma(weight, group, kTwoOnes, kTwoOnes);
#pragma unroll
  for (int u = 0; u < D / 64; ++u) {
    const std::uint32_t at = values + 512U * static_cast<std::uint32_t>(u) + 16U * static_cast<std::uint32_t>(lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 w = load_shared_16(at + static_cast<std::uint32_t>(half * 8 * D));
#pragma unroll
      for (int f = 0; f < 4; ++f) {
        const std::uint32_t field = 0x00030003U << (2 * f);
        const int j = 8 * u + 2 * f;
        mma(out[j], p[2 * half], w.x & field, w.x >> 8 & field);
        mma(out[j + 1], p[2 * half], w.y & field, w.y >> 8 & field);
        mma(out[j], p[2 * half + 1], w.z & field, w.z >> 8 & field);
        mma(out[j + 1], p[2 * half + 1], w.w & field, w.w >> 8 & field);
      }
    }
  }
}

// Address of 16-byte piece 8 eight + piece, piece below 8, of a row of an exact tile; rows come after `first`, a multiple of 8.
// Constants `first` and `eight` are a constant distance.
template <int D>
__device__ __forceinline__ std::uint32_t exact_piece(std::uint32_t tile, int first, int row, int eight, int piece) {
  return tile + static_cast<std::uint32_t>(row * (D * 2) + ((piece ^ row) & 7) * 16) +
         static_cast<std::uint32_t>(first * (D * 2) + eight * 128);
}

// s = queries K^T of an exact tile.
template <int D>
__device__ __forceinline__ void exact_key_product(std::uint32_t queries, std::uint32_t keys, int lane, float (&s)[8][4]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[j][i] = 0;
  }
#pragma unroll 1
  for (int step = 0; step < D / 16; ++step) {
    const uint4 a = load_shared_16(queries + 512U * static_cast<std::uint32_t>(step) + 16U * static_cast<std::uint32_t>(lane));
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      // Matrices: (tokens 8 j .., dimensions 0 .. 7 of the step), (the same, 8 .. 15), (tokens 8 (j + 1) .., ...).
      std::uint32_t b[4];
      load_matrix(b, exact_piece<D>(keys, 8 * j, lane / 16 * 8 + lane % 8, step / 4, step % 4 * 2 + lane / 8 % 2));
      mma(s[j], a, b[0], b[1]);
      mma(s[j + 1], a, b[2], b[3]);
    }
  }
}

// out += p V of an exact tile.
template <int D>
__device__ __forceinline__ void exact_value_product(const uint4 (&p)[4], std::uint32_t values, int lane,
                                                    float (&out)[D / 8][4]) {
#pragma unroll
  for (int group = 0; group < 4; ++group) {
#pragma unroll
    for (int j = 0; j < D / 8; j += 2) {
      // Matrices: (tokens 0 .. 7 of the group, dimensions 8 j ..), (tokens 8 .. 15, the same), (0 .. 7, 8 (j + 1) ..), ...
      std::uint32_t b[4];
      load_matrix_transposed(b, exact_piece<D>(values, 16 * group, lane % 16, j / 8, j % 8 + lane / 16));
      mma(out[j], p[group], b[0], b[1]);
      mma(out[j + 1], p[group], b[2], b[3]);
    }
  }
}

// RoPE means of a page's keys: x[j] = 2 x[j] + Re(sum over pairs of c e^(i theta t)), c = (q1 - i q2)(m1 + i m2). About the
// page's middle that is an even and an odd sum of 32 tokens, as in rope_means.cuh, here with tokens as columns: sums and
// differences of mirrored tokens, which lanes hold both, are what products are added to.
// queries: the warp's, in the order of pairs; means: the page's m e^(i theta middle), scaled; table: LayerView::mean_table.
__device__ __forceinline__ void add_means(std::uint32_t queries, std::uint32_t means, const uint4* table, int steps,
                                          int fast_steps, int lane, float (&x)[8][4]) {
  const auto mirror = [&] {  // of 16 tokens each: groups 2 and 1, groups 3 and 0
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& later = x[4 + j][i];
        float& earlier = x[(2 - j / 2 * 2) + j % 2][i];
        const float sum = later + earlier;
        earlier = later - earlier;
        later = sum;
      }
    }
  };
  mirror();
  float still[2] = {};  // slow pairs: their table holds cos - 1, so that binary16 rounds the small difference only
  queries += 16U * static_cast<std::uint32_t>(lane);
  means += 16U * static_cast<std::uint32_t>(lane % 4);
  int place = lane;
  const auto add_step = [&](bool is_slow) {
    const uint4 q[2] = {load_shared_16(queries), load_shared_16(queries + 512U)};
    uint2 a[2][2];  // [pairs 2 t .., 2 t + 8 ..][r]: real, imaginary
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const float4 m = load_shared_float4(means + static_cast<std::uint32_t>(64 * part));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const std::uint32_t words[2] = {part == 0 ? q[r].x : q[r].z, part == 0 ? q[r].y : q[r].w};
        const float2 first = __half22float2(*reinterpret_cast<const __half2*>(&words[0]));
        const float2 second = __half22float2(*reinterpret_cast<const __half2*>(&words[1]));
        const float real[2] = {first.x * m.x + second.x * m.z, first.y * m.y + second.y * m.w};
        if (is_slow) still[r] += real[0] + real[1];
        a[part][r] = make_uint2(pack_half2(real[0], real[1]),
                                pack_half2(first.x * m.z - second.x * m.x, first.y * m.w - second.y * m.y));
      }
    }
    const uint4 real = make_uint4(a[0][0].x, a[0][1].x, a[1][0].x, a[1][1].x);
    const uint4 imaginary = make_uint4(a[0][0].y, a[0][1].y, a[1][0].y, a[1][1].y);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 cosines = __ldg(table + place + 32 * h);
      mma(x[4 + 2 * h], real, cosines.x, cosines.z);
      mma(x[5 + 2 * h], real, cosines.y, cosines.w);
      const uint4 sines = __ldg(table + place + 32 * (2 + h));
      mma(x[2 - 2 * h], imaginary, sines.x, sines.z);
      mma(x[3 - 2 * h], imaginary, sines.y, sines.w);
    }
    queries += 1024U;
    means += 128U;
    place += 128;
  };
#pragma unroll 1
  for (int step = 0; step < fast_steps; ++step) add_step(false);
#pragma unroll 1
  for (int step = fast_steps; step < steps; ++step) add_step(true);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    still[r] = quad_sum(still[r]);
  }
#pragma unroll
  for (int j = 4; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[j][i] += still[i / 2];
  }
  mirror();
}

}  // namespace oscar::cuda
