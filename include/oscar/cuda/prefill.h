// Prefill attention on the paged 2-bit cache (format: oscar/paged/page_format.h): a chunk of query tokens per sequence, on an
// NVIDIA GPU of compute capability 8.0 or later. Raw device pointers and a stream: no framework.
//
//   o = sum_t p_t v_t,  p = softmax over the tokens t up to the query's own of soft_cap(scale * q . k_t)  (+ a sink logit)
//
// What a query sees is what it would see alone (cache/windows.h): at position P exact rows for t < sink and P - t < recent,
// codes for all between, also where they are rows of its own chunk. Exact rows of the chunk come from k and v, older ones from
// blocks.
//
// Order with append(): the codes of a chunk of more than `recent` tokens must be in the pages before, but the exact rows before
// the chunk must not have left the ring. So
//   append, block_table -1 in the ring's columns (codes and sink rows);  prefill;  append, page_table -1 (exact rows only)
// or one append, before, into a ring of paged::ring_blocks(recent + n - 1) for chunks of n. A chunk of up to `recent` tokens
// may as well be appended after.
//
// Lengths and tables are read on the device and the grid depends on the shape alone: no host synchronisation, and a CUDA graph
// stays valid. No workspace. Results are bit-identical from run to run on one kind of GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "oscar/cuda/decode.h"

namespace oscar::cuda {

struct PrefillArgs {
  const LayerView* layer = nullptr;  // host pointer
  int batch = 0;
  int n_tokens = 0;             // query tokens that q has room for; those from query_start[batch] on are not read
  int group = 0;                // query heads per KV head, 1 .. 16; query head h reads KV head h / group
  int sink = 64, recent = 256;  // window of 16-bit rows; sink a multiple of 16
  float scale = 1.0F;           // above 0
  float soft_cap = 0.0F;        // 0: none; else logit = soft_cap * tanh(scale * q . k / soft_cap)
  const void* q = nullptr;      // binary16 [n_tokens, n_head, D], 16-byte aligned
  // binary16 rows of the chunk [n_tokens, n_head_kv, D], K after RoPE; a row begins k_stride (v_stride) values after the one
  // before, a multiple of 8, 0: rows without gaps. 16-byte aligned.
  const void* k = nullptr;
  const void* v = nullptr;
  std::int64_t k_stride = 0, v_stride = 0;
  // [batch + 1], ascending from 0: tokens query_start[b] .. query_start[b + 1] - 1 are the last ones of sequence b.
  const std::int32_t* query_start = nullptr;
  const std::int32_t* lengths = nullptr;  // [batch] tokens of the sequence, the chunk included, up to 64 page_columns
  const void* pages = nullptr;            // [n_pages, page_bytes], 128-byte aligned
  paged::IdTable page_table;              // [batch, page_columns] as in DecodeArgs
  int page_columns = 0;
  const void* blocks = nullptr;  // binary16 [n_blocks, n_head_kv, 2, 16, D], 128-byte aligned
  paged::IdTable block_table;    // [batch, sink / 16 + ring], see paged::block_column
  int ring = 0;                  // at least paged::ring_blocks(recent)
  const float* sinks = nullptr;  // [n_head] or null
  void* out = nullptr;           // binary16 [n_tokens, n_head, D], 4-byte aligned
  float* lse = nullptr;          // [n_tokens, n_head] natural logarithm of the sum of exponentials, or null
};

// Enqueues one kernel: of codec `spectral`, head_dim 64 and 128, on compute capability 9.0 one for its matrix products, else a
// portable one. Throws Error on arguments outside the limits above, on an older GPU, or when the launch fails.
void prefill(const PrefillArgs& args, cudaStream_t stream);

}  // namespace oscar::cuda
