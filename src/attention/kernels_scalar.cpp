// Plain C++, built everywhere: what the other tables must reproduce.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention/kernels.h"
#include "oscar/base/half.h"

namespace oscar::attention {
namespace {

constexpr float kInvisible = -std::numeric_limits<float>::infinity();

void widen(const std::uint16_t* in, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = half_to_float(in[i]);
}

int mask_row(const std::uint16_t* mask, float* bias) {
  int flags = 0;
  for (int j = 0; j < kTile; ++j) {
    bias[j] = half_to_float(mask[j]);
    if (bias[j] != kInvisible) flags |= kSomeVisible;
    if (bias[j] != 0.0F) flags |= kSomeBias;
  }
  return flags;
}

void dots(const float* q, std::int64_t ldq, int rows, const float* k, std::int64_t ldk, int dim, float* s) {
  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < kTile; ++j) {
      // Eight partial sums, as a vector unit would keep them: error grows with dim / 8 and compilers may vectorise it.
      float sums[kLane] = {};
      for (int d = 0; d < dim; d += kLane) {
        for (int i = 0; i < kLane; ++i) sums[i] += q[r * ldq + d + i] * k[j * ldk + d + i];
      }
      s[r * kTile + j] = ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
    }
  }
}

void transpose(const float* k, std::int64_t ldk, int dim, float* panels) {
  for (int p = 0; p < kTile / kPanel; ++p) {
    for (int d = 0; d < dim; ++d) {
      for (int c = 0; c < kPanel; ++c) *panels++ = k[(p * kPanel + c) * ldk + d];
    }
  }
}

void multiply(const float* a, std::int64_t lda, int rows, int depth, const float* b, std::int64_t ldb, int cols, float* c,
              std::int64_t ldc, bool accumulate) {
  for (int n = 0; n < cols; n += kPanel) {
    for (int r = 0; r < rows; ++r) {
      float* target = c + r * ldc + n;
      float sums[kPanel] = {};
      for (int i = 0; i < depth; ++i) {
        const float factor = a[r * lda + i];
        for (int x = 0; x < kPanel; ++x) sums[x] += factor * b[i * ldb + n + x];
      }
      for (int x = 0; x < kPanel; ++x) target[x] = (accumulate ? target[x] : 0.0F) + sums[x];
    }
  }
}

void weighted_sum(const float* const* rows, const float* weights, int n, int cols, float* out) {
  std::fill_n(out, cols, 0.0F);
  for (int k = 0; k < n; ++k) {
    for (int i = 0; i < cols; ++i) out[i] += weights[k] * rows[k][i];
  }
}

void project(float* a, std::int64_t lda, std::int64_t part, int rows, int depth, const float* b) {
  for (int r = 0; r < rows; ++r) {
    for (int p = 0; p < 2; ++p) {
      float* row = a + r * lda + p * part;
      float sums[kLane] = {};
      for (int i = 0; i < depth; ++i) {
        for (int n = 0; n < kLane; ++n) sums[n] += row[i] * b[(p * depth + i) * kLane + n];
      }
      std::copy_n(sums, kLane, row);
    }
  }
}

void mirrored_multiply(const float* a, std::int64_t lda, std::int64_t part, int rows, int depth, const float* b, float* s) {
  constexpr int kHalf = kTile / 2;
  for (int r = 0; r < rows; ++r, a += lda, s += kTile) {
    float even[kHalf] = {};
    float odd[kHalf] = {};
    for (int i = 0; i < depth; ++i) {
      for (int j = 0; j < kHalf; ++j) {
        even[j] += a[i] * b[i * kHalf + j];
        odd[j] += a[part + i] * b[(depth + i) * kHalf + j];
      }
    }
    for (int j = 0; j < kHalf; ++j) {
      s[kHalf + j] = even[j] + odd[j];
      s[kHalf - 1 - j] = even[j] - odd[j];
    }
  }
}

float logits(float* s, const float* bias, float slope, float softcap) {
  float max = kInvisible;
  for (int j = 0; j < kTile; ++j) {
    float x = s[j];
    if (softcap != 0.0F) x = softcap * std::tanh(x / softcap);
    if (bias != nullptr) x = (bias[j] == kInvisible) ? kInvisible : x + slope * bias[j];
    s[j] = x;
    max = std::max(max, x);
  }
  return max;
}

float exponentials(float* s, float max) {
  float sum = 0.0F;
  for (int j = 0; j < kTile; ++j) {
    s[j] = std::exp(s[j] - max);
    sum += s[j];
  }
  return sum;
}

void complex_multiply(const float* a, int rows, const float* b, int n, float* out) {
  for (int r = 0; r < rows; ++r, a += 2 * n, out += 2 * n) {
    for (int i = 0; i < n; ++i) {
      const float re = a[i] * b[i] - a[n + i] * b[n + i];
      out[n + i] = a[i] * b[n + i] + a[n + i] * b[i];
      out[i] = re;
    }
  }
}

void transpose_words(const std::uint8_t* rows, std::size_t stride, int words, std::uint32_t* out) {
  for (int w = 0; w < round_up(words, 4); ++w) {
    for (std::size_t j = 0; j < kTile; ++j) std::memcpy(out + w * kTile + j, rows + j * stride + 4 * w, sizeof *out);
  }
}

void interleave(const std::uint8_t* rows, std::size_t stride, int bytes, std::int64_t ldo, std::uint32_t* out) {
  for (std::size_t j = 0; j < kTile; ++j) {
    for (int i = 0; i < round_up(bytes, 16); ++i) {
      std::uint32_t& word = out[static_cast<std::ptrdiff_t>(j / 4) * ldo + i];
      word = (j % 4 == 0 ? 0U : word) | static_cast<std::uint32_t>(rows[j * stride + static_cast<std::size_t>(i)])
                                            << (8 * (j % 4));
    }
  }
}

std::uint32_t look_up(const std::uint8_t* rows, std::size_t stride, const float* table, float* out) {
  std::uint32_t both = 0xFF;
  std::uint32_t either = 0;
  for (std::size_t j = 0; j < kTile; ++j) {
    out[j] = table[rows[j * stride]];
    both &= rows[j * stride];
    either |= rows[j * stride];
  }
  return both | either << 8;
}

void unpack_keys(const std::uint32_t* packed, const Kernels::KeyWord* words, int n_words, std::uint32_t* tile) {
  for (int w = 0; w < n_words; ++w) {
    for (int j = 0; j < kTile; ++j) {
      for (int f = 0; f < 4; ++f) {
        std::uint32_t bytes = 0;
        for (int l = 0; l < words[w].levels; ++l) {
          const auto level = static_cast<std::size_t>(l);
          const std::uint32_t* from = packed + words[w].at[level] * kTile + j;
          const std::uint64_t both = from[0] | (words[w].shift[level] != 0 ? std::uint64_t{from[kTile]} << 32 : 0);
          const auto word = static_cast<std::uint32_t>(both >> words[w].shift[level]);
          bytes |= ((word >> (2 * f)) & 0x03030303U & words[w].keep[level]) << (2 * l);
        }
        tile[(4 * w + f) * kTile + j] = bytes;
      }
    }
  }
}

void spread(const std::uint32_t* in, const Kernels::Spread& how, std::uint32_t* out) {
  const std::uint32_t mask = (how.bits == 2) ? 0x03030303U : 0x01010101U;
  for (int g = 0; g < kTile / 4; ++g) {
    for (int i = 0; i < how.n; ++i) {
      for (int f = 0; f < 4; ++f) {
        std::uint32_t& to = out[g * how.ldo + f * how.field_stride + i];
        to = (how.add ? to : 0U) | ((in[g * how.ldi + i] >> (f * how.bits)) & mask) << how.left;
      }
    }
  }
}

int unsigned_byte(std::uint32_t word, int b) { return static_cast<int>((word >> (8 * b)) & 0xFFU); }
int signed_byte(std::uint32_t word, int b) { return static_cast<std::int8_t>(unsigned_byte(word, b)); }

void key_scores(const std::uint32_t* q, std::int64_t ldq, const IntegerQuery* query, int rows, int words,
                const std::uint32_t* tile, const float* gain, bool add, float* s) {
  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < kTile; ++j) {
      std::int32_t sum = 0;
      for (int w = 0; w < words; ++w) {
        for (int b = 0; b < 4; ++b) sum += signed_byte(q[r * ldq + w], b) * unsigned_byte(tile[w * kTile + j], b);
      }
      const float value = query[r].scale * gain[j] * (static_cast<float>(sum) - query[r].centre);
      float& to = s[r * kTile + j];
      to = add ? to + value : value;
    }
  }
}

float quantise_weights(const float* p, const float* gain, std::uint8_t* w, std::int32_t* total) {
  float largest = 0.0F;
  for (int j = 0; j < kTile; ++j) largest = std::max(largest, p[j] * gain[j]);
  const bool any = largest > 1e-30F;
  const float factor = any ? 255.0F / largest : 0.0F;
  *total = 0;
  for (int j = 0; j < kTile; ++j) {
    w[j] = static_cast<std::uint8_t>(std::nearbyint(p[j] * gain[j] * factor));
    *total += w[j];
  }
  return any ? largest / 255.0F : 0.0F;
}

float weigh(const float* s, float max, const float* gain, std::uint8_t* w, float* scale, std::int32_t* total) {
  float p[kTile];
  std::copy_n(s, kTile, p);
  const float sum = exponentials(p, max);
  *scale = quantise_weights(p, gain, w, total);
  return sum;
}

void value_sums(const std::uint8_t* w, const float* scale, int rows, const std::uint32_t* tile, int cols, int /*largest*/,
                float* out, std::int64_t ldo) {
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < cols; ++c) {
      std::int32_t sum = 0;
      for (int j = 0; j < kTile; ++j) sum += w[r * kTile + j] * unsigned_byte(tile[j / 4 * cols + c], j % 4);
      out[r * ldo + c] += scale[r] * static_cast<float>(sum);
    }
  }
}

}  // namespace

const Kernels& scalar_kernels() {
  static constexpr Kernels kernels = {"scalar",         widen,   mask_row,          dots,    transpose,       multiply,
                                      weighted_sum,     project, mirrored_multiply, logits,  exponentials,    transpose_words,
                                      interleave,       look_up, unpack_keys,       spread,  key_scores,      nullptr,
                                      quantise_weights, weigh,   value_sums,        nullptr, complex_multiply};
  return kernels;
}

}  // namespace oscar::attention
