// The binary32 kernels whose text is the same for all instruction sets; see code_kernels.h for V.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/kernels.h"
#include "attention/row_blocks.h"

namespace oscar::attention {

template <class V>
struct FloatKernels {
  using Floats = typename V::Floats;
  static constexpr int kWidth = V::kWords;
  static constexpr float kInvisible = -__builtin_inff();

  static void widen(const std::uint16_t* in, int n, float* out) {
    int i = 0;
    for (; i + kWidth <= n; i += kWidth) V::store(out + i, V::widen(in + i));
    for (; i < n; ++i) out[i] = V::widen_one(in[i]);
  }

  static int mask_row(const std::uint16_t* mask, float* bias) {
    auto visible = V::no_words();
    auto biased = V::no_words();
    for (int j = 0; j < kTile; j += kWidth) {
      const Floats value = V::widen(mask + j);
      visible = V::either(visible, V::different(value, V::all(kInvisible)));
      biased = V::either(biased, V::different(value, V::zero()));
      V::store(bias + j, value);
    }
    return (V::any(visible) ? kSomeVisible : 0) | (V::any(biased) ? kSomeBias : 0);
  }

  static void dots(const float* q, std::int64_t ldq, int rows, const float* k, std::int64_t ldk, int dim, float* s) {
    int r = 0;
    for (; r + 3 <= rows; r += 3) dots_rows<3>(q + r * ldq, ldq, k, ldk, dim, s + r * kTile);
    if (rows - r == 2) dots_rows<2>(q + r * ldq, ldq, k, ldk, dim, s + r * kTile);
    if (rows - r == 1) dots_rows<1>(q + r * ldq, ldq, k, ldk, dim, s + r * kTile);
  }

  static void transpose(const float* k, std::int64_t ldk, int dim, float* panels) {
    for (int j = 0; j < kTile; j += kWidth) {
      const float* key = k + j * ldk;
      float* out = panels + static_cast<std::int64_t>(j / kPanel) * dim * kPanel + j % kPanel;
      for (int d = 0; d < dim; d += kWidth) {
        constexpr std::size_t kSide = kWidth;
        Floats square[kSide];
#pragma GCC unroll 8
        for (int i = 0; i < kWidth; ++i) square[i] = V::load(key + i * ldk + d);
        V::transpose(square);
#pragma GCC unroll 8
        for (int i = 0; i < kWidth; ++i) V::store(out + (d + i) * kPanel, square[i]);
      }
    }
  }

  // exp(x) for x <= 88: x / ln 2 = n + r, |r| <= 1/2, 2^r of degree 6 (at Chebyshev's nodes; 1e-8 besides rounding); below
  // -87.3 exactly 0.
  static Floats exponential(Floats x) {
    const Floats n = V::round(V::multiply(x, V::all(1.44269502F)));
    Floats r = V::multiply_add(x, V::all(1.44269502F), V::subtract(V::zero(), n));
    r = V::multiply_add(x, V::all(1.92596299e-8F), r);
    Floats p = V::all(1.54531634e-4F);
    p = V::multiply_add(p, r, V::all(1.33908633e-3F));
    p = V::multiply_add(p, r, V::all(9.61808302e-3F));
    p = V::multiply_add(p, r, V::all(5.55035695e-2F));
    p = V::multiply_add(p, r, V::all(2.40226507e-1F));
    p = V::multiply_add(p, r, V::all(6.93147182e-1F));
    p = V::multiply_add(p, r, V::all(1.0F));
    return V::zero_below(V::times_power_of_two(p, n), x, V::all(-87.3F));
  }

  // tanh(|x|) = 1 - 2 / (exp(2 |x|) + 1); the absolute error of about 1e-7 is what matters for a logit of softcap * tanh.
  static Floats hyperbolic_tangent(Floats x) {
    const Floats magnitude = V::smaller(V::all(20.0F), V::absolute(x));
    const Floats e = exponential(V::add(magnitude, magnitude));
    const Floats one = V::all(1.0F);
    return V::with_sign(V::subtract(one, V::divide(V::all(2.0F), V::add(e, one))), x);
  }

  static float logits(float* s, const float* bias, float slope, float softcap) {
    const Floats slopes = V::all(slope);
    const Floats cap = V::all(softcap);
    Floats max = V::all(kInvisible);
    for (int j = 0; j < kTile; j += kWidth) {
      Floats x = V::load(s + j);
      if (softcap != 0.0F) x = V::multiply(cap, hyperbolic_tangent(V::divide(x, cap)));
      if (bias != nullptr) {
        const Floats value = V::load(bias + j);
        x = V::where_equal(value, V::all(kInvisible), V::all(kInvisible), V::multiply_add(slopes, value, x));
      }
      V::store(s + j, x);
      max = V::larger(max, x);
    }
    return V::largest(max);
  }

  static float exponentials(float* s, float max) {
    const Floats maximum = V::all(max);
    Floats sum = V::zero();
    for (int j = 0; j < kTile; j += kWidth) {
      const Floats p = exponential(V::subtract(V::load(s + j), maximum));
      V::store(s + j, p);
      sum = V::add(sum, p);
    }
    return V::sum(sum);
  }

  static void complex_multiply(const float* a, int rows, const float* b, int n, float* out) {
    static_assert(kPanel % kWidth == 0);
    for (int i = 0; i < n; i += kWidth) {
      const Floats br = V::load(b + i);
      const Floats bi = V::load(b + n + i);
      for (std::ptrdiff_t r = i; r < std::ptrdiff_t{rows} * 2 * n; r += 2 * n) {
        const Floats ar = V::load(a + r);
        const Floats ai = V::load(a + r + n);
        V::store(out + r, V::subtract(V::multiply(ar, br), V::multiply(ai, bi)));
        V::store(out + r + n, V::multiply_add(ar, bi, V::multiply(ai, br)));
      }
    }
  }

  // R rows x C vectors of the product, in registers over the whole depth.
  template <int R, int C>
  static void multiply_block(const float* a, std::int64_t lda, int depth, const float* b, std::int64_t ldb, float* c,
                             std::int64_t ldc, bool accumulate) {
    constexpr std::size_t kRows = R;
    constexpr std::size_t kVectors = C;
    Floats sums[kRows][kVectors];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < C; ++v) sums[r][v] = V::zero();
    }
    int i = 0;
    if constexpr (R * C <= 4) {
      // Few sums wait for each other: two of each, over the even and the odd steps.
      Floats odd[kRows][kVectors];
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < C; ++v) odd[r][v] = V::zero();
      }
      for (; i + 2 <= depth; i += 2, b += 2 * ldb) {
#pragma GCC unroll 4
        for (int v = 0; v < C; ++v) {
          const Floats first = V::load(b + v * kWidth);
          const Floats second = V::load(b + ldb + v * kWidth);
#pragma GCC unroll 6
          for (int r = 0; r < R; ++r) {
            sums[r][v] = V::multiply_add(V::all(a[r * lda + i]), first, sums[r][v]);
            odd[r][v] = V::multiply_add(V::all(a[r * lda + i + 1]), second, odd[r][v]);
          }
        }
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < C; ++v) sums[r][v] = V::add(sums[r][v], odd[r][v]);
      }
    }
    for (; i < depth; ++i, b += ldb) {
      Floats row[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < C; ++v) row[v] = V::load(b + v * kWidth);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const Floats factor = V::all(a[r * lda + i]);
#pragma GCC unroll 4
        for (int v = 0; v < C; ++v) sums[r][v] = V::multiply_add(factor, row[v], sums[r][v]);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < C; ++v) {
        float* to = c + r * ldc + v * kWidth;
        V::store(to, accumulate ? V::add(V::load(to), sums[r][v]) : sums[r][v]);
      }
    }
  }

  template <int C>
  static void multiply_columns(const float* a, std::int64_t lda, int rows, int depth, const float* b, std::int64_t ldb,
                               float* c, std::int64_t ldc, bool accumulate) {
    in_row_blocks<V::kRegisters / (C + 1)>(rows, [&](int r, auto height) {
      multiply_block<decltype(height)::value, C>(a + r * lda, lda, depth, b, ldb, c + r * ldc, ldc, accumulate);
    });
  }

  static void multiply(const float* a, std::int64_t lda, int rows, int depth, const float* b, std::int64_t ldb, int cols,
                       float* c, std::int64_t ldc, bool accumulate) {
    // Wide blocks suit few rows; many rows want height, and no less than a panel's width.
    const int wide = (rows <= V::kRegisters / 5 || 2 * kWidth < kPanel) ? 4 : 2;
    int n = 0;
    for (; n + wide * kWidth <= cols; n += wide * kWidth) {
      if (wide == 4) {
        multiply_columns<4>(a, lda, rows, depth, b + n, ldb, c + n, ldc, accumulate);
      } else {
        multiply_columns<2>(a, lda, rows, depth, b + n, ldb, c + n, ldc, accumulate);
      }
    }
    for (; n + 2 * kWidth <= cols; n += 2 * kWidth)
      multiply_columns<2>(a, lda, rows, depth, b + n, ldb, c + n, ldc, accumulate);
    for (; n < cols; n += kWidth) multiply_columns<1>(a, lda, rows, depth, b + n, ldb, c + n, ldc, accumulate);
  }

  static void weighted_sum(const float* const* rows, const float* weights, int n, int cols, float* out) {
    for (int i = 0; i < cols; i += kWidth) {
      Floats sum = V::zero();
      for (int k = 0; k < n; ++k) sum = V::multiply_add(V::all(weights[k]), V::load(rows[k] + i), sum);
      V::store(out + i, sum);
    }
  }

  static void project(float* a, std::int64_t lda, std::int64_t part, int rows, int depth, const float* b) {
    in_row_blocks<V::kRegisters / (2 * kLane / kWidth) - 2>(
        rows, [&](int r, auto height) { project_rows<decltype(height)::value>(a + r * lda, lda, part, depth, b); });
  }

  static void mirrored_multiply(const float* a, std::int64_t lda, std::int64_t part, int rows, int depth, const float* b,
                                float* s) {
    // Two vectors of either kind at a time.
    constexpr int kStep = 2 * kWidth;
    static_assert(kTile / 2 % kStep == 0);
    for (int j = 0; j < kTile / 2; j += kStep) {
      in_row_blocks<V::kRegisters / 5>(rows, [&](int r, auto height) {
        mirrored_rows<decltype(height)::value>(a + r * lda, lda, part, depth, b + j, s + r * kTile + kTile / 2 + j,
                                               s + r * kTile + kTile / 2 - j - kWidth);
      });
    }
  }

 private:
  template <int R>
  static void project_rows(float* a, std::int64_t lda, std::int64_t part, int depth, const float* b) {
    constexpr std::size_t kRows = R;
    constexpr int kVectors = kLane / kWidth;
    constexpr std::size_t kSums = 2 * kVectors;
    Floats sums[kRows][kSums];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < 2 * kVectors; ++v) sums[r][v] = V::zero();
    }
    const float* odd = b + depth * kLane;
    for (int i = 0; i < depth; ++i, b += kLane, odd += kLane) {
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const Floats re = V::all(a[r * lda + i]);
        const Floats im = V::all(a[r * lda + part + i]);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          sums[r][v] = V::multiply_add(re, V::load(b + v * kWidth), sums[r][v]);
          sums[r][kVectors + v] = V::multiply_add(im, V::load(odd + v * kWidth), sums[r][kVectors + v]);
        }
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        V::store(a + r * lda + v * kWidth, sums[r][v]);
        V::store(a + r * lda + part + v * kWidth, sums[r][kVectors + v]);
      }
    }
  }

  template <int R>
  static void mirrored_rows(const float* a, std::int64_t lda, std::int64_t part, int depth, const float* b, float* upper,
                            float* lower) {
    constexpr std::size_t kRows = R;
    constexpr int kHalf = kTile / 2;
    Floats even[kRows][2];
    Floats odd[kRows][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) even[r][0] = even[r][1] = odd[r][0] = odd[r][1] = V::zero();
    const float* c = b + depth * kHalf;
    for (int i = 0; i < depth; ++i, b += kHalf, c += kHalf) {
      const Floats b0 = V::load(b);
      const Floats b1 = V::load(b + kWidth);
      const Floats c0 = V::load(c);
      const Floats c1 = V::load(c + kWidth);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const Floats re = V::all(a[r * lda + i]);
        const Floats im = V::all(a[r * lda + part + i]);
        even[r][0] = V::multiply_add(re, b0, even[r][0]);
        even[r][1] = V::multiply_add(re, b1, even[r][1]);
        odd[r][0] = V::multiply_add(im, c0, odd[r][0]);
        odd[r][1] = V::multiply_add(im, c1, odd[r][1]);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        V::store(upper + r * kTile + v * kWidth, V::add(even[r][v], odd[r][v]));
        V::store(lower + r * kTile - v * kWidth, V::reverse(V::subtract(even[r][v], odd[r][v])));
      }
    }
  }

  // R query rows against 4 keys: accumulators are lanes of the dot product, summed over lanes once per 4 keys.
  template <int R>
  static void dots_rows(const float* q, std::int64_t ldq, const float* k, std::int64_t ldk, int dim, float* s) {
    constexpr std::size_t kRows = R;
    for (int j = 0; j < kTile; j += 4) {
      const float* key = k + j * ldk;
      Floats sums[kRows][4];
#pragma GCC unroll 3
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) sums[r][c] = V::zero();
      }
      for (int d = 0; d < dim; d += kWidth) {
        Floats row[kRows];
#pragma GCC unroll 3
        for (int r = 0; r < R; ++r) row[r] = V::load(q + r * ldq + d);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
          const Floats value = V::load(key + c * ldk + d);
#pragma GCC unroll 3
          for (int r = 0; r < R; ++r) sums[r][c] = V::multiply_add(row[r], value, sums[r][c]);
        }
      }
#pragma GCC unroll 3
      for (int r = 0; r < R; ++r) V::store_sums(sums[r][0], sums[r][1], sums[r][2], sums[r][3], s + r * kTile + j);
    }
  }
};

}  // namespace oscar::attention
