// Plain C++, built everywhere: what the other tables must reproduce.
#include <algorithm>
#include <cmath>
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

float logits(float* s, const float* bias, float slope, float shift, float softcap) {
  float max = kInvisible;
  for (int j = 0; j < kTile; ++j) {
    float x = s[j] + shift;
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

void complex_multiply(const float* a, const float* b, int n, float* out) {
  for (int i = 0; i < n; ++i) {
    const float re = a[i] * b[i] - a[n + i] * b[n + i];
    out[n + i] = a[i] * b[n + i] + a[n + i] * b[i];
    out[i] = re;
  }
}

}  // namespace

const Kernels& scalar_kernels() {
  static constexpr Kernels kernels = {"scalar", widen,        mask_row,        dots, transpose, multiply,
                                      logits,   exponentials, complex_multiply};
  return kernels;
}

}  // namespace oscar::attention
