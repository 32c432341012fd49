// What host and kernel of a prefill share.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/device.h"
#include "cuda/id_words.h"
#include "oscar/cuda/prefill.h"

namespace oscar::cuda {

inline constexpr int kPrefillRows = 128;  // query rows of a block: tokens times query heads of one KV head

struct PrefillParams {
  LayerView layer;
  int batch, group, n_tokens, sink, recent, ring, page_columns;
  int units;         // pieces of 128 rows, or of as many as the blocks of a cluster have, per KV head, at most
  int shared_bytes;  // of a block
  float scale, soft_cap;
  const __half* q;
  const __half* k;
  const __half* v;
  std::int64_t k_stride, v_stride;
  const std::int32_t* query_start;
  const std::int32_t* lengths;
  const std::uint8_t* pages;
  IdWords page_table;
  const __half* blocks;
  IdWords block_table;
  const float* sinks;
  __half* out;
  float* lse;
};

// Enqueues the kernel on the current device; units is filled in. *fits: whether the layer's slots fit shared_bytes; nothing is
// launched where they do not.
cudaError_t launch_prefill_64(PrefillParams& params, int device, cudaStream_t stream, bool* fits);
cudaError_t launch_prefill_128(PrefillParams& params, int device, cudaStream_t stream, bool* fits);

}  // namespace oscar::cuda
