// What a method does to the rows of some consecutive tokens: quantise and dequantise them in place.
#pragma once

#include <functional>
#include <span>

#include "oscar/base/matrix.h"

namespace oscar::rival {

struct Shape {
  int n_head_kv = 0, head_dim = 0;
};

// rows: [tokens, n_head_kv * head_dim], finite. Called by several threads at once.
using QuantizeRows = std::function<void(MatrixF& rows)>;

struct Simulation {
  int tokens = 1;         // that are quantised together
  bool pre_rope = false;  // K: rows come without their rotary embedding
  QuantizeRows quantize;
};

// Runs `quantize` on each run of `width` values of each token. With a `rotation` [width, width], in its basis x R.
Simulation per_token(int width, MatrixF rotation, std::function<void(std::span<float>)> quantize);
// Normalised Hadamard matrix of [dim, dim], block-diagonal with the largest power of two that divides dim, at most `block`.
MatrixF hadamard_blocks(int dim, int block);

// --- per_token.cpp: methods of one token at a time
Simulation llama_cache(bool is_k, Shape shape, bool rotated, void (*block)(std::span<float>));
Simulation fp8(Shape shape);
Simulation naive(Shape shape, int bits);
Simulation quarot(Shape shape);
Simulation rotatekv(bool is_k, Shape shape);
Simulation turboquant(bool is_k, Shape shape, int bits);
Simulation saw_int4(bool is_k, Shape shape);

// --- per_channel.cpp: methods that look at several tokens
Simulation kivi(bool is_k, Shape shape, int group);
Simulation ott(bool is_k, Shape shape);
Simulation kitty(bool is_k, Shape shape);
Simulation kvarn(bool is_k, Shape shape, int k_bits);

inline constexpr int kPage = 128;          // tokens of a group of OTT, Kitty, KVarN
inline constexpr int kOttOutliers = 2;     // tokens per page and head that OTT's simulation keeps at 16 bit
int kitty_boosted_channels(int head_dim);  // 12.5 %, at least one

}  // namespace oscar::rival
