// Inner loops of attention: one table of functions per instruction set, chosen once per job.
//
// Everything is binary32 unless it says otherwise. Matrices are row-major with a leading dimension `ld*` in elements; rows
// need no alignment (64 bytes is fastest). Sums run in an order that depends on the shapes only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace oscar::attention {

inline constexpr int kTile = 64;     // cells per tile
inline constexpr int kPanel = 16;    // columns of one register block; V rows are padded to it
inline constexpr int kLane = 8;      // K rows are padded to it
inline constexpr int kFewRows = 16;  // up to here dots() beats transpose() + multiply()

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// Results of mask_row().
inline constexpr int kSomeVisible = 1;  // at least one value above -inf
inline constexpr int kSomeBias = 2;     // at least one value that is not 0

// A query row as integers: q_d ~ scale * (signed byte d), see key_scores and integer_query().
struct IntegerQuery {
  float scale = 0.0F;
  float centre = 0.0F;                     // sum of byte_d * (half of d's largest code), a multiple of 1/2
  std::int16_t even = 0, odd = 0;          // the same over bytes 0, 1 and over bytes 2, 3 of all words, rounded
  std::int32_t even_sum = 0, odd_sum = 0;  // of those bytes themselves
};

struct Kernels {
  const char* name;

  // out[i] = in[i] widened from binary16, i < n.
  void (*widen)(const std::uint16_t* in, int n, float* out);

  // One token's mask over a tile: bias[j] = mask[j] widened, j < kTile. Returns kSomeVisible | kSomeBias.
  int (*mask_row)(const std::uint16_t* mask, float* bias);

  // s[r * kTile + j] = sum over d < dim of q[r * ldq + d] * k[j * ldk + d]; dim is a multiple of kLane.
  void (*dots)(const float* q, std::int64_t ldq, int rows, const float* k, std::int64_t ldk, int dim, float* s);

  // panels[(p * dim + d) * kPanel + c] = k[(p * kPanel + c) * ldk + d], p < kTile / kPanel; dim is a multiple of kLane.
  void (*transpose)(const float* k, std::int64_t ldk, int dim, float* panels);

  // c[r * ldc + n] = (accumulate ? c[...] : 0) + sum over i < depth of a[r * lda + i] * b[i * ldb + n], n < cols; cols is a
  // multiple of kPanel.
  void (*multiply)(const float* a, std::int64_t lda, int rows, int depth, const float* b, std::int64_t ldb, int cols, float* c,
                   std::int64_t ldc, bool accumulate);

  // out[i] = sum over k < n of weights[k] * rows[k][i], i < cols, a multiple of kPanel.
  void (*weighted_sum)(const float* const* rows, const float* weights, int n, int cols, float* out);

  // In place, of parts p = 0 and 1: a[r * lda + p * part + n] = sum over i < depth of a[r * lda + p * part + i] *
  // b[(p * depth + i) * kLane + n], n < kLane.
  void (*project)(float* a, std::int64_t lda, std::int64_t part, int rows, int depth, const float* b);

  // Even and odd functions about the middle of a tile: for j < kTile / 2, with e and o (p = 0 and 1) = sum over i < depth of
  // a[r * lda + p * part + i] * b[(p * depth + i) * kTile / 2 + j],
  //   s[r * kTile + kTile / 2 + j] = e + o,  s[r * kTile + kTile / 2 - 1 - j] = e - o.
  void (*mirrored_multiply)(const float* a, std::int64_t lda, std::int64_t part, int rows, int depth, const float* b, float* s);

  // In place, j < kTile: x = softcap * tanh(s[j] / softcap) if softcap != 0, else s[j]; s[j] = x + slope * bias[j], or -inf
  // where bias[j] is -inf. bias == nullptr: all 0. Returns the maximum.
  float (*logits)(float* s, const float* bias, float slope, float softcap);

  // In place, j < kTile: s[j] = exp(s[j] - max), exactly 0 for -inf; max is finite, no s[j] exceeds it by more than 80.
  // Returns the sum.
  float (*exponentials)(float* s, float max);

  // --- integer arithmetic on codes. A word is four bytes, lowest first; row j of a tile's kTile is at rows + j * stride.

  // out[w * kTile + j] = bytes 4 w .. 4 w + 3 of row j, w < words rounded up to 4.
  void (*transpose_words)(const std::uint8_t* rows, std::size_t stride, int words, std::uint32_t* out);

  // Byte b of out[t * ldo + i] = byte i of row 4 t + b, i < bytes rounded up to 16, t < kTile / 4.
  void (*interleave)(const std::uint8_t* rows, std::size_t stride, int bytes, std::int64_t ldo, std::uint32_t* out);

  // out[j] = table[byte 0 of row j]. Returns the AND of those bytes, and their OR times 256.
  std::uint32_t (*look_up)(const std::uint8_t* rows, std::size_t stride, const float* table, float* out);

  // Codes of keys as bytes. Word w of the result is made of two-bit fields of `packed` [words][kTile]: level l of it lies in
  // the 32 bits that begin at bit shift[l] of word at[l] (of each token), keep[l] says which bytes belong to it.
  //   tile[(4 w + f) * kTile + j] = OR over levels of ((word_l >> (2 f)) & 0x03030303 & keep[l]) << (2 l),  f < 4
  // The tile is for key_scores of the same table, which may want every byte less 128.
  struct KeyWord {
    int levels = 0;
    std::array<int, 4> at{}, shift{};
    std::array<std::uint32_t, 4> keep{};
  };
  void (*unpack_keys)(const std::uint32_t* packed, const KeyWord* words, int n_words, std::uint32_t* tile);

  // Codes of values as bytes: for g < kTile / 4, i < n, f < 4
  //   out[g * ldo + f * field_stride + i] = (add ? same : 0) | ((in[g * ldi + i] >> (f * bits)) & mask) << left
  // with mask = 2^bits - 1 in every byte, bits 1 or 2, left 0, 1 or 2.
  struct Spread {
    int n = 0;
    std::int64_t ldi = 0, ldo = 0, field_stride = 0;
    int bits = 2, left = 0;
    bool add = false;
  };
  void (*spread)(const std::uint32_t* in, const Spread& how, std::uint32_t* out);

  // s[r * kTile + j] = (add ? s[...] : 0) + gain[j] * query[r].scale * (sum over bytes of q[r]'s word * tile's word - centre):
  // q[r * ldq + w] holds signed bytes, tile[w * kTile + j] codes from unpack_keys, w < words. The sums over the even and over
  // the odd pairs must stay in 16 bits once centred, and a pair's product below 2^15 (integer_query() sees to both).
  void (*key_scores)(const std::uint32_t* q, std::int64_t ldq, const IntegerQuery* query, int rows, int words,
                     const std::uint32_t* tile, const float* gain, bool add, float* s);

  // For few rows, null where registers do not suffice: unpack_keys of n_words and key_scores in one, from `packed`.
  void (*packed_key_scores)(const std::uint32_t* q, std::int64_t ldq, const IntegerQuery* query, int rows,
                            const std::uint32_t* packed, const KeyWord* words, int n_words, const float* gain, bool add,
                            float* s);

  // w[j] = p[j] * gain[j] / scale rounded, at most 255, j < kTile; p and gain are >= 0. Returns scale, 0 if all are 0;
  // *total = sum of w.
  float (*quantise_weights)(const float* p, const float* gain, std::uint8_t* w, std::int32_t* total);

  // exponentials() of s and quantise_weights() of them in one; s stays. Returns the sum of exponentials.
  float (*weigh)(const float* s, float max, const float* gain, std::uint8_t* w, float* scale, std::int32_t* total);

  // out[r * ldo + c] += scale[r] * sum over j < kTile of w[r * kTile + j] * byte (j mod 4) of tile[(j / 4) * cols + c], c <
  // cols, a multiple of 64. Bytes of the tile are at most `largest` <= 15.
  void (*value_sums)(const std::uint8_t* w, const float* scale, int rows, const std::uint32_t* tile, int cols, int largest,
                     float* out, std::int64_t ldo);

  // Likewise: spread of two bits (ldi = n = lanes = field_stride, a multiple of 16; ldo = 4 lanes) and value_sums in one.
  void (*packed_value_sums)(const std::uint8_t* w, const float* scale, int rows, const std::uint32_t* packed, int lanes,
                            float* out, std::int64_t ldo);

  // out[r] = a[r] * b, r < rows, for complex rows [2 n] stored as n real parts, then n imaginary parts; n is a multiple of
  // kPanel. out may be a.
  void (*complex_multiply)(const float* a, int rows, const float* b, int n, float* out);
};

const Kernels& scalar_kernels();
const Kernels* avx2_kernels();  // nullptr: not built in
const Kernels* avxvnni_kernels();
const Kernels* avx512_kernels();
const Kernels* neon_kernels();
const Kernels* neon_dotprod_kernels();
const Kernels* neon_i8mm_kernels();

// The table of cpu_path(). Throws like cpu_path().
const Kernels& active_kernels();

}  // namespace oscar::attention
