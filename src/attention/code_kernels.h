// The integer kernels of attention, once for all instruction sets. V names vectors of words and floats of one set
// (simd/*.h), B its 16-byte shuffles. Instantiated with types of an unnamed namespace only, so that every copy belongs to the
// file compiled for it.
//
// Where the dot products are: key_scores and value_sums.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/float_kernels.h"
#include "attention/kernels.h"
#include "attention/row_blocks.h"

namespace oscar::attention {

template <class V, class B>
struct CodeKernels {
  using Words = typename V::Words;
  using Floats = typename V::Floats;
  using Sums = typename V::Sums;
  static constexpr int kHeld = V::kHeldWords;  // tokens or columns whose sums are in registers at a time
  static constexpr int kVectors = kHeld / V::kWords;
  static constexpr std::size_t kHeldVectors = kVectors;

  static void transpose_words(const std::uint8_t* rows, std::size_t stride, int words, std::uint32_t* out) {
    for (int j = 0; j < kTile; j += 4, rows += 4 * stride) {
      for (int w = 0; w < words; w += 4) {
        const std::uint8_t* from = rows + 4 * w;
        const auto a = B::load(from);
        const auto b = B::load(from + stride);
        const auto c = B::load(from + 2 * stride);
        const auto d = B::load(from + 3 * stride);
        const auto ab = B::low_words(a, b), AB = B::high_words(a, b);
        const auto cd = B::low_words(c, d), CD = B::high_words(c, d);
        std::uint32_t* to = out + w * kTile + j;
        B::store(to, B::low_doubles(ab, cd));
        B::store(to + kTile, B::high_doubles(ab, cd));
        B::store(to + 2 * kTile, B::low_doubles(AB, CD));
        B::store(to + 3 * kTile, B::high_doubles(AB, CD));
      }
    }
  }

  static void interleave(const std::uint8_t* rows, std::size_t stride, int bytes, std::int64_t ldo, std::uint32_t* out) {
    for (int t = 0; t < kTile / 4; ++t, rows += 4 * stride, out += ldo) {
      for (int i = 0; i < bytes; i += 16) {
        const std::uint8_t* from = rows + i;
        const auto a = B::load(from);
        const auto b = B::load(from + stride);
        const auto c = B::load(from + 2 * stride);
        const auto d = B::load(from + 3 * stride);
        const auto ab = B::low_bytes(a, b), AB = B::high_bytes(a, b);
        const auto cd = B::low_bytes(c, d), CD = B::high_bytes(c, d);
        B::store(out + i, B::low_halves(ab, cd));
        B::store(out + i + 4, B::high_halves(ab, cd));
        B::store(out + i + 8, B::low_halves(AB, CD));
        B::store(out + i + 12, B::high_halves(AB, CD));
      }
    }
  }

  static std::uint32_t look_up(const std::uint8_t* rows, std::size_t stride, const float* table, float* out) {
    std::uint32_t both = 0xFF;
    std::uint32_t either = 0;
#pragma GCC unroll 8
    for (int j = 0; j < kTile; ++j) {
      const std::uint32_t byte = rows[static_cast<std::size_t>(j) * stride];
      out[j] = table[byte];
      both &= byte;
      either |= byte;
    }
    return both | either << 8;
  }

  // (x >> right, or << left) without the shift by 0.
  template <int kLeft>
  static Words moved(Words x) {
    if constexpr (kLeft > 0) return V::template left<kLeft>(x);
    if constexpr (kLeft < 0) return V::template right<-kLeft>(x);
    return x;
  }

  template <int kLevel, int kField>
  static void add_field(Words word, Words keep, Words& to) {
    const Words field = V::both(moved<2 * (kLevel - kField)>(word), keep);
    if constexpr (kLevel == 0) {
      to = field;
    } else {
      to = V::either(to, field);
    }
  }

  template <int kLevel>
  static void add_level(const std::uint32_t* packed, const Kernels::KeyWord& word, Words (&fields)[4]) {
    constexpr std::size_t kAt = kLevel;
    const std::uint32_t* from = packed + word.at[kAt] * kTile;
    Words x = V::load(from);
    if (word.shift[kAt] != 0) {
      x = V::either(V::shift_right(x, word.shift[kAt]), V::shift_left(V::load(from + kTile), 32 - word.shift[kAt]));
    }
    const Words keep = V::all((0x03030303U & word.keep[kAt]) << (2 * kLevel));
    add_field<kLevel, 0>(x, keep, fields[0]);
    add_field<kLevel, 1>(x, keep, fields[1]);
    add_field<kLevel, 2>(x, keep, fields[2]);
    add_field<kLevel, 3>(x, keep, fields[3]);
  }

  static void unpack_keys(const std::uint32_t* packed, const Kernels::KeyWord* words, int n_words, std::uint32_t* tile) {
    for (int w = 0; w < n_words; ++w, tile += 4 * kTile) {
      for (int j = 0; j < kTile; j += V::kWords) {
        Words fields[4];
        add_level<0>(packed + j, words[w], fields);
        if (words[w].levels > 1) add_level<1>(packed + j, words[w], fields);
        if (words[w].levels > 2) add_level<2>(packed + j, words[w], fields);
        if (words[w].levels > 3) add_level<3>(packed + j, words[w], fields);
        for (int f = 0; f < 4; ++f) V::store(tile + f * kTile + j, V::key_bytes(fields[f]));
      }
    }
  }

  template <int kBits, int kLeft>
  static void spread_fields(const std::uint32_t* in, const Kernels::Spread& how, std::uint32_t* out) {
    constexpr std::uint32_t kMask = (kBits == 2 ? 0x03030303U : 0x01010101U) << kLeft;
    const Words keep = V::all(kMask);
    for (int g = 0; g < kTile / 4; ++g, in += how.ldi, out += how.ldo) {
      int i = 0;
      for (; i + V::kWords <= how.n; i += V::kWords) {
        const Words x = V::load(in + i);
        const auto put = [&](Words field, std::uint32_t* to) { V::store(to, how.add ? V::either(field, V::load(to)) : field); };
        std::uint32_t* to = out + i;
        put(V::both(moved<kLeft>(x), keep), to);
        put(V::both(moved<kLeft - kBits>(x), keep), to + how.field_stride);
        put(V::both(moved<kLeft - 2 * kBits>(x), keep), to + 2 * how.field_stride);
        put(V::both(moved<kLeft - 3 * kBits>(x), keep), to + 3 * how.field_stride);
      }
      for (; i < how.n; ++i) {
        for (int f = 0; f < 4; ++f) {
          std::uint32_t& to = out[f * how.field_stride + i];
          to = (how.add ? to : 0U) | (((in[i] >> (f * kBits)) << kLeft) & kMask);
        }
      }
    }
  }

  static void spread(const std::uint32_t* in, const Kernels::Spread& how, std::uint32_t* out) {
    if (how.bits == 2) {
      spread_fields<2, 0>(in, how, out);
    } else if (how.left == 0) {
      spread_fields<1, 0>(in, how, out);
    } else {
      spread_fields<1, 2>(in, how, out);
    }
  }

  // One query row against kHeld tokens: its sums are registers from the first word to the last.
  static void key_scores(const std::uint32_t* q, std::int64_t ldq, const IntegerQuery* query, int rows, int words,
                         const std::uint32_t* tile, const float* gain, bool add, float* s) {
    for (int r = 0; r < rows; ++r, q += ldq, s += kTile) {
      const IntegerQuery& about = query[r];
      for (int j = 0; j < kTile; j += kHeld) {
        Sums sums[kHeldVectors];
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) sums[v] = V::start(about);
        const std::uint32_t* codes = tile + j;
        for (int w = 0; w < words; ++w, codes += kTile) {
          const Words bytes = V::all(q[w]);
#pragma GCC unroll 16
          for (int v = 0; v < kVectors; ++v) V::add_key_products(sums[v], V::load(codes + v * V::kWords), bytes);
        }
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v)
          store_key_scores(about, sums[v], gain + j + v * V::kWords, add, s + j + v * V::kWords);
      }
    }
  }

  // The fields of a word and its products at once: unpacking hides behind them, and no tile is stored and loaded.
  static void packed_key_scores(const std::uint32_t* q, std::int64_t ldq, const IntegerQuery* query, int rows,
                                const std::uint32_t* packed, const Kernels::KeyWord* words, int n_words, const float* gain,
                                bool add, float* s) {
    static_assert(kTile % (2 * V::kWords) == 0);
    in_row_blocks<6>(rows, [&](int r, auto height) {
      for (int j = 0; j < kTile; j += 2 * V::kWords) {
        packed_key_rows<decltype(height)::value>(q + r * ldq, ldq, query + r, packed + j, words, n_words, gain + j, add,
                                                 s + r * kTile + j);
      }
    });
  }

  template <int R>
  static void packed_key_rows(const std::uint32_t* q, std::int64_t ldq, const IntegerQuery* query, const std::uint32_t* packed,
                              const Kernels::KeyWord* words, int n_words, const float* gain, bool add, float* s) {
    constexpr std::size_t kRows = R;
    Sums sums[kRows][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = V::start(query[r]);
    for (int w = 0; w < n_words; ++w) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const std::uint32_t* from = packed + v * V::kWords;
        Words fields[4];
        add_level<0>(from, words[w], fields);
        if (words[w].levels > 1) add_level<1>(from, words[w], fields);
        if (words[w].levels > 2) add_level<2>(from, words[w], fields);
        if (words[w].levels > 3) add_level<3>(from, words[w], fields);
#pragma GCC unroll 4
        for (int f = 0; f < 4; ++f) {
          const Words codes = V::key_bytes(fields[f]);
#pragma GCC unroll 6
          for (int r = 0; r < R; ++r) V::add_key_products(sums[r][v], codes, q + r * ldq + 4 * w + f);
        }
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        store_key_scores(query[r], sums[r][v], gain + v * V::kWords, add, s + r * kTile + v * V::kWords);
      }
    }
  }

  static void store_key_scores(const IntegerQuery& about, const Sums& sums, const float* gain, bool add, float* to) {
    const Floats rest = V::all(static_cast<float>(about.even + about.odd) - about.centre);
    const Floats factor = V::multiply(V::all(about.scale), V::load(gain));
    const Floats sum = V::add(V::key_total(sums), rest);
    V::store(to, add ? V::multiply_add(factor, sum, V::load(to)) : V::multiply(factor, sum));
  }

  static constexpr int kAll = kTile / V::kWords;
  static constexpr std::size_t kAllVectors = kAll;

  // Weights of products x of probabilities and gains.
  static float round_weights(const Floats (&x)[kAllVectors], std::uint8_t* w, std::int32_t* total) {
    Floats most = V::zero();
#pragma GCC unroll 16
    for (int v = 0; v < kAll; ++v) most = V::larger(most, x[v]);
    const float largest = V::largest(most);
    const bool any = largest > 1e-30F;  // below, the factor would overflow
    const Floats factor = V::all(any ? 255.0F / largest : 0.0F);
    Words sums = V::no_words();
#pragma GCC unroll 16
    for (int v = 0; v < kAll; ++v) V::store_bytes(w + v * V::kWords, V::multiply(x[v], factor), sums);
    *total = V::sum(sums);
    return any ? largest / 255.0F : 0.0F;
  }

  static float quantise_weights(const float* p, const float* gain, std::uint8_t* w, std::int32_t* total) {
    Floats x[kAllVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kAll; ++v) x[v] = V::multiply(V::load(p + v * V::kWords), V::load(gain + v * V::kWords));
    return round_weights(x, w, total);
  }

  static float weigh(const float* s, float max, const float* gain, std::uint8_t* w, float* scale, std::int32_t* total) {
    const Floats maximum = V::all(max);
    Floats sum = V::zero();
    Floats x[kAllVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kAll; ++v) {
      const Floats p = FloatKernels<V>::exponential(V::subtract(V::load(s + v * V::kWords), maximum));
      sum = V::add(sum, p);
      x[v] = V::multiply(p, V::load(gain + v * V::kWords));
    }
    *scale = round_weights(x, w, total);
    return V::sum(sum);
  }

  static void value_sums(const std::uint8_t* w, const float* scale, int rows, const std::uint32_t* tile, int cols, int largest,
                         float* out, std::int64_t ldo) {
    // Groups of four tokens until the sums must be widened.
    const int run = (kTile / 4) * 2 * 255 * largest <= V::kLongestSum ? kTile / 4 : kTile / 16;
    for (int c = 0; c < cols; c += kHeld) {
      for (int r = 0; r < rows; ++r) {
        if (scale[r] == 0.0F) continue;
        float* to = out + r * ldo + c;
        const Floats factor = V::all(scale[r]);
        for (int first = 0; first < kTile / 4; first += run) {
          Sums sums[kHeldVectors];
#pragma GCC unroll 16
          for (int v = 0; v < kVectors; ++v) sums[v] = V::no_sums();
          for (int t = first; t < first + run; ++t) {
            std::uint32_t four = 0;
            __builtin_memcpy(&four, w + r * kTile + 4 * t, sizeof four);
            const Words weights = V::all(four);
            const std::uint32_t* codes = tile + t * cols + c;
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v) V::add_value_products(sums[v], weights, V::load(codes + v * V::kWords));
          }
#pragma GCC unroll 16
          for (int v = 0; v < kVectors; ++v) {
            float* at = to + v * V::kWords;
            V::store(at, V::multiply_add(factor, V::value_total(sums[v]), V::load(at)));
          }
        }
      }
    }
  }

  static void packed_value_sums(const std::uint8_t* w, const float* scale, int rows, const std::uint32_t* packed, int lanes,
                                float* out, std::int64_t ldo) {
    in_row_blocks<6>(rows, [&](int r, auto height) {
      for (int i = 0; i < lanes; i += V::kWords) {
        packed_value_rows<decltype(height)::value>(w + r * kTile, scale + r, packed + i, lanes, out + r * ldo + i, ldo);
      }
    });
  }

  template <int R>
  static void packed_value_rows(const std::uint8_t* w, const float* scale, const std::uint32_t* packed, int lanes, float* out,
                                std::int64_t ldo) {
    constexpr std::size_t kRows = R;
    static_assert((kTile / 4) * 2 * 255 * 3 <= V::kLongestSum);
    const Words keep = V::all(0x03030303U);
    Sums sums[kRows][4];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = sums[r][2] = sums[r][3] = V::no_sums();
    for (int t = 0; t < kTile / 4; ++t, packed += lanes) {
      const Words x = V::load(packed);
      const Words fields[4] = {V::both(x, keep), V::both(V::template right<2>(x), keep), V::both(V::template right<4>(x), keep),
                               V::both(V::template right<6>(x), keep)};
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        std::uint32_t four = 0;
        __builtin_memcpy(&four, w + r * kTile + 4 * t, sizeof four);
        const Words weights = V::all(four);
#pragma GCC unroll 4
        for (int f = 0; f < 4; ++f) V::add_value_products(sums[r][f], weights, fields[f]);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const Floats factor = V::all(scale[r]);
#pragma GCC unroll 4
      for (int f = 0; f < 4; ++f) {
        float* at = out + r * ldo + f * lanes;
        V::store(at, V::multiply_add(factor, V::value_total(sums[r][f]), V::load(at)));
      }
    }
  }
};

}  // namespace oscar::attention
