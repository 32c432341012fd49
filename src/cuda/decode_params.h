// What host and kernels of a decode share: constants, parameters, the workspace's parts.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/device.h"
#include "cuda/id_words.h"
#include "oscar/cuda/decode.h"

namespace oscar::cuda {

inline constexpr int kHeadsPerTile = 8;          // query rows of a virtual KV head, at most
inline constexpr std::uint32_t kCostUnit = 128;  // bytes
inline constexpr int kMostSlots = 512;           // of a head
inline constexpr int kMostWarps = 16;            // of a block of the attention kernel
// Of a virtual head: the exact tier, and the four series of coded pages.
inline constexpr int kHeadParts = 1 + paged::kPatterns;

struct DecodeParams {
  LayerView layer;
  int batch, group, queries, sink, recent, ring, page_columns;
  int columns;               // query rows of a KV head and sequence: queries * group, row query * group + head
  int subgroups;             // virtual heads per KV head: ceil(columns / 8)
  int heads;                 // virtual heads per sequence: n_head_kv * subgroups
  int lanes;                 // lanes whose query fragments differ: 16 when at most 4 query rows share a tile, else 32
  int stride_heads;          // query rows of a partial result's row: 4 or 8
  std::uint32_t pages_cost;  // of one page column of a sequence, all virtual heads
  std::uint32_t workers;     // warps of the grid
  int stages;
  std::uint32_t stage_bytes, query_bytes, warp_bytes;
  bool early;  // see DecodeArgs
  float scale, soft_cap;
  const __half* q;
  const std::int32_t* lengths;
  const std::uint8_t* pages;
  IdWords page_table;
  const std::uint8_t* blocks;
  IdWords block_table;
  const float* sinks;
  __half* out;
  float* lse;
  // Workspace.
  float* headers;              // [batch * heads][kHeaderFloats]
  std::uint32_t* coded_query;  // [batch * heads][query_bytes / 4] B fragments of slots
  std::uint32_t* exact_query;  // [batch * heads][D / 16 * lanes * 2] B fragments of q
  float4* mean_query;          // [batch * heads][n_pairs / 16][2 lanes] complex weights of the mean's sinusoids
  float* partial_out;          // [parts + workers][stride_heads][D]
  float2* partial_sum;         // [parts + workers][stride_heads] (maximum, sum) in the base-2 logarithm
};

// Per virtual head: [0] factor of key gains or steps, [8 + h] start of the accumulators, [16 + h] constant logit, [24 + h] sum
// of the inner query's coordinates (of `int2`).
inline constexpr int kHeaderFloats = 32;

// Enqueues the three kernels. What follows from the device (stages, warps) is filled in. *fits: whether the layer's tiles fit
// the device's shared memory; nothing is launched where they do not.
cudaError_t launch_decode_spectral(DecodeParams& params, const DeviceLimits& device, cudaStream_t stream, bool* fits);
cudaError_t launch_decode_int2(DecodeParams& params, const DeviceLimits& device, cudaStream_t stream, bool* fits);

}  // namespace oscar::cuda
