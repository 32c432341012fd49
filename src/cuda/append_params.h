// What host and kernel of an append share.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/device.h"
#include "cuda/id_words.h"
#include "oscar/cuda/append.h"

namespace oscar::cuda {

inline constexpr float kLeastNorm = 1e-3F;  // kSpectralMinNorm of the codec, whose header drags Eigen along

struct AppendParams {
  LayerView layer;
  EncoderView encoder;
  int batch, n_rows, sink, ring, page_columns;
  int tiles;  // of rows; the grid is tiles * n_head_kv
  std::int64_t k_stride, v_stride;
  const __half* k;
  const __half* v;
  const std::int32_t* row_start;
  const std::int32_t* lengths;
  std::uint8_t* pages;
  IdWords page_table;
  __half* blocks;
  IdWords block_table;
};

// Enqueues the kernel; the tiles are filled in.
cudaError_t launch_append(AppendParams& params, const DeviceLimits& device, cudaStream_t stream);

}  // namespace oscar::cuda
