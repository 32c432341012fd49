// Attention over both tiers of a KvCache: reference and vectorised path behind one seam.
//
//   o = sum_t p_t v_t,  p = softmax over visible cells of  softcap( scale * q.k_t ) + slope * mask_t   (+ sink logit)
// where k_t, v_t come from the exact row if Windows::exact(position(t), position(q)) and a copy exists, else from the code.
// Fully masked query: zeros. Masked cells are never read (they may hold anything, NaN included).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "oscar/cache/kv_cache.h"

namespace oscar {

// One attention operation over one stream (a contiguous range of cells).
struct AttentionArgs {
  const KvCache* cache = nullptr;
  int layer_index = 0;
  std::int64_t first_cell = 0;  // stream's first cell; mask column j is cell first_cell + j
  std::int64_t n_kv = 0;        // columns looked at

  int n_head = 0;  // query heads; a multiple of n_head_kv; head h reads KV head h / (n_head / n_head_kv)
  std::int64_t n_tokens = 0;
  const std::int32_t* positions = nullptr;  // [n_tokens]
  const float* q = nullptr;                 // q[t * q_token_stride + h * q_head_stride + d], strides in floats
  std::int64_t q_token_stride = 0, q_head_stride = 0;
  float* out = nullptr;  // likewise, [v_dim] per token and head
  std::int64_t out_token_stride = 0, out_head_stride = 0;

  const std::uint16_t* mask = nullptr;  // binary16 [n_tokens, n_kv], additive, -inf = invisible; null: causal by position
  std::int64_t mask_token_stride = 0;   // in elements
  float scale = 1.0F;
  float softcap = 0.0F;           // 0: none; else logit = softcap * tanh(scale * q.k / softcap)
  const float* slopes = nullptr;  // [n_head] ALiBi slopes that multiply the mask; null: 1
  const float* sinks = nullptr;   // [n_head] extra logit in the denominator (attention sinks); null: none
};

// Double precision, scalar, straight from the definition over read_row(): the oracle, for ever.
void attention_reference(const AttentionArgs& args);

// The product path. Usage from a host's thread pool: one AttentionJob per operation and run; every thread calls run(). Work
// is cut by KV head, query block and context in pieces that do not depend on the number of threads, and partial results are
// merged in a fixed order, so results are bit-identical for any thread count and need no barrier.
class AttentionJob {
 public:
  AttentionJob();
  ~AttentionJob();
  // Prepares (cheap, single-threaded; reuses buffers across calls). n_threads is a hint for scratch only.
  void prepare(const AttentionArgs& args, int n_threads);
  void run(int thread);  // returns when no work is left to start; output complete when all threads have returned

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Instruction sets compiled in and usable on this processor, best first: of "avx512", "avxvnni", "avx2"; "neon-i8mm",
// "neon-dotprod", "neon"; and "scalar". OSCAR_CPU forces one (Error when it is not usable).
std::vector<std::string_view> cpu_paths();
std::string_view cpu_path();  // the one in use

}  // namespace oscar
