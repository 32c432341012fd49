// Inner loops of attention: one table of functions per instruction set, chosen once per job.
//
// Everything is binary32 unless it says otherwise. Matrices are row-major with a leading dimension `ld*` in elements; rows
// need no alignment (64 bytes is fastest). Sums run in an order that depends on the shapes only.
#pragma once

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

  // In place, j < kTile: x = s[j] + shift; x = softcap * tanh(x / softcap) if softcap != 0; s[j] = x + slope * bias[j], or
  // -inf where bias[j] is -inf. bias == nullptr: all 0. Returns the maximum.
  float (*logits)(float* s, const float* bias, float slope, float shift, float softcap);

  // In place, j < kTile: s[j] = exp(s[j] - max), exactly 0 for -inf; max is finite and not below any s[j]. Returns the sum.
  float (*exponentials)(float* s, float max);

  // out = a * b for complex rows stored as n real parts, then n imaginary parts; n is a multiple of kLane.
  void (*complex_multiply)(const float* a, const float* b, int n, float* out);
};

const Kernels& scalar_kernels();
const Kernels* avx2_kernels();  // nullptr: not built in

// The table of cpu_path(). Throws like cpu_path().
const Kernels& active_kernels();

}  // namespace oscar::attention
