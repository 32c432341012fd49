// What host and kernel of a prefill share.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "cuda/device.h"
#include "cuda/id_words.h"
#include "oscar/cuda/prefill.h"

namespace oscar::cuda {

// Query rows of a block of the kernel of compute capability 9.0: tokens times query heads of one KV head.
inline constexpr int kPrefillRows = 128;

struct PrefillParams {
  LayerView layer;
  int batch, group, n_tokens, sink, recent, ring, page_columns;
  int units;         // pieces of as many rows as a block has, or the blocks of a cluster have, per KV head, at most
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

// Pieces of so many query rows that a KV head has at most, however long each chunk is.
inline int most_units(const PrefillParams& p, int rows) {
  return static_cast<int>((std::int64_t{p.n_tokens} * p.group + rows - 1) / rows) + std::min(p.batch, p.n_tokens) - 1;
}

// Enqueues the kernel on the current device; units is filled in. *fits: whether the layer's slots fit shared_bytes; nothing is
// launched where they do not.
cudaError_t launch_prefill_64(PrefillParams& params, int device, cudaStream_t stream, bool* fits);
cudaError_t launch_prefill_128(PrefillParams& params, int device, cudaStream_t stream, bool* fits);
cudaError_t launch_portable_prefill_64(PrefillParams& params, int device, cudaStream_t stream, bool* fits);
cudaError_t launch_portable_prefill_128(PrefillParams& params, int device, cudaStream_t stream, bool* fits);
cudaError_t launch_portable_prefill_256(PrefillParams& params, int device, cudaStream_t stream, bool* fits);

// wgmma: of compute capability 9.0, `spectral`, head_dim 64 and 128. portable: all else, and heads of more slots than wgmma's
// shared memory holds.
enum class PrefillKernel { wgmma, portable };
// Which one prefill() tries first on a GPU of compute capability `major`.x. Throws Error where none serves.
PrefillKernel choose_prefill_kernel(const LayerView& layer, int major, bool wgmma_built);
// prefill() with a kernel of choice among those that serve, for checks and benchmarks; none: choose_prefill_kernel()'s.
void prefill_with(std::optional<PrefillKernel> kernel, const PrefillArgs& args, cudaStream_t stream);

}  // namespace oscar::cuda
