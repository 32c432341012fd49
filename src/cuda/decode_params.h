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
inline constexpr int kMostBlocks = 192;          // of its grid: multiprocessors, or fewer

struct DecodeParams {
  LayerView layer;
  int batch, group, queries, sink, recent, ring, page_columns;
  int columns;               // query rows of a KV head and sequence: queries * group, row query * group + head
  int subgroups;             // virtual heads per KV head: ceil(columns / 8)
  int heads;                 // virtual heads per sequence: n_head_kv * subgroups
  int lanes;                 // lanes whose query fragments differ: 16 when at most 4 query rows share a tile, else 32
  int tile_rows;             // query rows of a tile: 4 or 8
  std::uint32_t pages_cost;  // of one page column of a sequence, all virtual heads
  std::uint32_t exact_cost;  // of an exact block and virtual head
  std::uint32_t workers;     // warps of the grid
  int stages;
  std::uint32_t stage_bytes, query_bytes, warp_bytes;
  bool early;   // see DecodeArgs
  bool inside;  // queries are prepared by the attention kernel's own blocks
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
  std::uint32_t* coded_query;  // [batch * heads][query_bytes / 4] see coded_query_bytes()
  std::uint32_t* exact_query;  // [batch * heads][D / 16 * lanes * 2] B fragments of q
  float4* mean_query;          // [batch * heads][n_pairs / 16][2 lanes] complex weights of the mean's sinusoids
  float4* aside;               // [workers][vectors of a partial result * tile_rows * D / 4] see head_sums.cuh
  std::uint8_t* partials;      // [workers + 3 * blocks][partial_bytes()] see partial_results.cuh
  // Zero between decodes. See prepare_inside().
  std::uint32_t* claimed;  // [1]
  std::uint32_t* ready;    // [kMostBlocks] 1: the queries of the virtual head are prepared; only where `inside`
  std::uint32_t*
      arrived;  // [kMostBlocks] blocks that have left their part of the head that begins in this one and ends in another
};
// Bounds of exact_cost and of the length of the line: shares that are rounded up stay within 32 bits.
[[nodiscard]] constexpr int most_exact_cost(const DecodeParams& p) { return p.layer.head_dim / 2; }
inline constexpr std::uint64_t kMostCost = 0xFFFF0000U;

// Per virtual head, base-2 logits: [h] unit of the coded query, [8 + h] constant, [16 + h] sum of the inner query's coordinates
// (of `int2`).
inline constexpr int kHeaderFloats = 24;

// A coordinate of a coded query is query_base() times a signed upper byte plus a signed lower one. Sums of the products of
// codes * 4^e, e below 4, with either start at the bits of kSumZero and stay within 2^22 of them; `spectral` counts codes from
// their centre 1.5.
inline constexpr float kSumZero = 12582912.0F;  // 1.5 * 2^23
inline constexpr std::uint32_t kSumZeroBits = 0x4B400000U;
inline constexpr int kMostSum = 1 << 22;
[[nodiscard]] constexpr int largest_code(paged::PageCodec codec) { return codec == paged::PageCodec::int2 ? 3 * 64 : 3 * 32; }
[[nodiscard]] constexpr int query_base(int slots, paged::PageCodec codec) {
  return slots * 128 * largest_code(codec) + 256 < kMostSum ? 256 : 128;
}
// Of lower bytes; scales keep those of upper ones (prepare.cuh). Weights of values are two unsigned bytes.
[[nodiscard]] constexpr bool sums_fit(paged::PageCodec codec, int most_slots) {
  for (int slots = 16; slots <= most_slots; slots += 16) {
    const int base = query_base(slots, codec);
    if (slots * (base / 2) * largest_code(codec) + base >= kMostSum || slots >= kMostSum / largest_code(codec)) return false;
  }
  return paged::kPageTokens * 255 * 3 * 64 < kMostSum;
}
static_assert(sums_fit(paged::PageCodec::spectral, kMostSlots) && sums_fit(paged::PageCodec::int2, 256));
// Of a virtual head of up to 4 (blocks = 1) or 8 query rows: where sums start, [4 fields][query rows] upper, lower, upper,
// lower, then B fragments of bytes, [slots / 32][blocks][32 lanes] two words, of the last 16 slots of an odd number one.
[[nodiscard]] constexpr std::uint32_t coded_query_bytes(int slots, int blocks) {
  return static_cast<std::uint32_t>(blocks) * (128U + 8U * static_cast<std::uint32_t>(slots));
}

// Of one partial result: 64 bytes, then vectors of dim + 8 floats.
[[nodiscard]] constexpr std::uint32_t partial_bytes(int dim, int tile_rows, int vectors) {
  return 64U + 4U * static_cast<std::uint32_t>(vectors * tile_rows * (dim + 8));
}

// Enqueues the kernels. What follows from the device (stages, warps) is filled in. *fits: whether the layer's tiles fit
// the device's shared memory; nothing is launched where they do not.
cudaError_t launch_decode_spectral(DecodeParams& params, const DeviceLimits& device, cudaStream_t stream, bool* fits);
cudaError_t launch_decode_int2(DecodeParams& params, const DeviceLimits& device, cudaStream_t stream, bool* fits);

}  // namespace oscar::cuda
