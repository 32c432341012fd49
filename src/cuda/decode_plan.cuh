// The plan that shares the work of a decode out over the warps.
//
// Work is a line of bytes: for each sequence, for each virtual KV head (a KV head and up to 8 of its query rows), first the
// exact blocks, then the coded pages, series by series (see paged::Tiers): values of one pattern of signs are summed in one
// basis. It is cut into equal pieces, one per warp of the grid, rounded to whole blocks and pages. So heads with more slots get
// more warps, ragged batches are balanced, and every warp walks pages that follow each other in their series. Part 5 v is the
// exact tier of virtual head v = sequence * heads + head, part 5 v + 1 + s series s of its coded tier. A warp leaves one
// partial result per part it touches, in row part + warp: along the line either the part or the warp advances by one, so rows
// never collide. Every warp finds its piece by itself, from the lengths: no plan is stored, nothing is sent back to the host.
#pragma once

#include "cuda/decode_params.h"

namespace oscar::cuda {

using paged::kBlockTokens;
using paged::kPageTokens;
using paged::Tiers;

inline constexpr float kLog2E = 1.4426950408889634F;
inline constexpr float kLn2 = 0.6931471805599453F;

template <bool kInt2>
__device__ __forceinline__ std::uint32_t page_cost(const DecodeParams& p, int head) {
  constexpr auto kCodec = kInt2 ? paged::PageCodec::int2 : paged::PageCodec::spectral;
  return paged::head_bytes(p.layer.slots[head / p.subgroups], p.layer.head_dim, kCodec) / kCostUnit;
}
__device__ __forceinline__ Tiers tiers(const DecodeParams& p, int sequence) {
  return paged::tiers_of(__ldg(p.lengths + sequence), p.sink, p.recent, p.queries);
}
__device__ __forceinline__ std::uint32_t sequence_cost(const DecodeParams& p, int sequence) {
  if (sequence >= p.batch) return 0;
  const Tiers t = tiers(p, sequence);
  return static_cast<std::uint32_t>(t.exact_blocks() * p.heads) * p.exact_cost +
         static_cast<std::uint32_t>(t.pages()) * p.pages_cost;
}

struct Shares {
  std::uint32_t total, share;  // of all warps, of one
};
// Called by whole warps.
__device__ __forceinline__ Shares shares(const DecodeParams& p, int lane) {
  std::uint32_t total = 0;
  for (int base = 0; base < p.batch; base += 32) total += __reduce_add_sync(~0U, sequence_cost(p, base + lane));
  return {total, (total + p.workers - 1) / p.workers};
}
// Sequence that contains `at` on the line, and where it begins. at < total.
struct SequenceStart {
  int sequence;
  std::uint32_t begin;
};
__device__ __forceinline__ SequenceStart find_sequence(const DecodeParams& p, std::uint32_t at, int lane) {
  std::uint32_t before = 0;
  for (int base = 0;; base += 32) {
    const std::uint32_t cost = sequence_cost(p, base + lane);
    std::uint32_t end = cost;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const std::uint32_t other = __shfl_up_sync(~0U, end, d);
      if (lane >= d) end += other;
    }
    const unsigned past = __ballot_sync(~0U, before + end > at);
    if (past != 0) {
      const int first = __ffs(static_cast<int>(past)) - 1;
      return {base + first, before + __shfl_sync(~0U, end - cost, first)};
    }
    before += __shfl_sync(~0U, end, 31);
  }
}
// Where a sequence begins on the line.
__device__ __forceinline__ std::uint32_t sequence_begin(const DecodeParams& p, int sequence, int lane) {
  std::uint32_t before = 0;
  for (int base = 0; base < sequence; base += 32) {
    before += __reduce_add_sync(~0U, base + lane < sequence ? sequence_cost(p, base + lane) : 0U);
  }
  return before;
}

}  // namespace oscar::cuda
