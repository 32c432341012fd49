// Shared memory of a block of the portable prefill kernel.
#pragma once

#include "cuda/prefill_plan.cuh"
#include "cuda/primitives.cuh"

namespace oscar::cuda {

inline constexpr int kPortableThreads = 128;
inline constexpr int kPortableWarps = kPortableThreads / 32;
inline constexpr int kPortableRows = 16 * kPortableWarps;  // query rows of a block
inline constexpr int kPortablePages = 3;                   // one in use, one that is made ready, one on its way

// Offsets in bytes. From kTiers on the coded tier comes first, the exact tier after it in the same place.
template <int D, bool kInt2>
struct PortableMemory {
  static constexpr paged::PageCodec kCodec = kInt2 ? paged::PageCodec::int2 : paged::PageCodec::spectral;
  static_assert(sizeof(PrefillUnit) <= 96);
  static constexpr std::uint32_t kUnit = 0;         // PrefillUnit
  static constexpr std::uint32_t kNorms = 96;       // float [warps] largest squared norm of a warp's queries
  static constexpr std::uint32_t kCodedUnit = 112;  // float: of logits of codes, as a page's table has them
  // float2 [rows] of codes: what all logits of a query row start from, and the sum of its coded query.
  static constexpr std::uint32_t kRows = 128;
  // Queries as A fragments, [16 rows of a warp][steps of 16][32 lanes] 16 bytes; while codes of a layer with means are read, in
  // the order of pairs, see prefill_portable_queries.cuh.
  static constexpr std::uint32_t kQueries = kRows + kPortableRows * 8;
  static constexpr std::uint32_t kWarpQueries = 16 * D * 2;  // of one warp
  static constexpr std::uint32_t kTiers = kQueries + kPortableWarps * kWarpQueries;

  // Exact tier: [64, D] binary16 each, 16-byte piece c of row r stored as piece c xor (r mod 8).
  static constexpr std::uint32_t kTile = kPageTokens * D * 2;
  static constexpr std::uint32_t kKeys = kTiers;
  static constexpr std::uint32_t kValues = kKeys + kTile;

  // Coded tier: two tables of a page each, queries in the basis of the codes as A fragments, pages.
  // A table, floats: [64] factors of the digits of keys, [64] of values, `int2`: [64] offsets of keys, [64] of values, [4]
  // largest step by warp, the last two the values'; then the page's RoPE means, [pairs / 2] float4.
  static constexpr std::uint32_t kOffsets = 512;
  static constexpr std::uint32_t kSteps = 1024;
  static constexpr std::uint32_t kMeans = kInt2 ? 1040 : 512;
  static constexpr std::uint32_t kTable = kMeans + D / 2 * 8;
  static constexpr std::uint32_t kCoded = kTiers + 2 * kTable;

  __host__ __device__ static constexpr std::uint32_t warp_coded(int slots) { return static_cast<std::uint32_t>(slots) * 32U; }
  __host__ __device__ static constexpr std::uint32_t pages(int slots) { return kCoded + kPortableWarps * warp_coded(slots); }
  __host__ __device__ static constexpr std::uint32_t page_bytes(int slots) { return paged::head_bytes(slots, D, kCodec); }
  __host__ __device__ static constexpr std::uint32_t bytes(int slots) {
    const std::uint32_t coded = pages(slots) + kPortablePages * page_bytes(slots);
    return coded > kValues + kTile ? coded : kValues + kTile;
  }
};

}  // namespace oscar::cuda
