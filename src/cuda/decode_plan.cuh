// The plan that shares the work of a decode out over the warps.
//
// Work is a line of bytes: for each sequence, for each virtual KV head (a KV head and up to 8 of its query rows), first the
// exact blocks, then the coded pages, series by series (see paged::Tiers): values of one pattern of signs are summed in one
// basis. It is cut into equal pieces, one per warp of the grid, rounded to whole blocks and pages: a unit belongs to the warp
// in whose piece its first byte lies. So heads with more slots get more warps, ragged batches are balanced, and every warp
// walks pages that follow each other in their series. Neighbours on the line are warps of one block. Every warp finds its piece
// by itself, from the lengths: no plan is stored, nothing is sent back to the host.
#pragma once

#include "cuda/decode_params.h"

namespace oscar::cuda {

using paged::kBlockTokens;
using paged::kPageTokens;
using paged::Tiers;

inline constexpr float kLog2E = 1.4426950408889634F;
inline constexpr float kLn2 = 0.6931471805599453F;

template <bool kInt2>
__device__ __forceinline__ std::uint32_t page_cost(const DecodeParams& p, int kv) {
  constexpr auto kCodec = kInt2 ? paged::PageCodec::int2 : paged::PageCodec::spectral;
  return paged::head_bytes(p.layer.slots[kv], p.layer.head_dim, kCodec) / kCostUnit;
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
// Which of things that follow each other from `begin` on contains `at`, and where it begins; cost(i): its length. One of them
// does. Called by whole warps, 32 things at a time.
struct LinePlace {
  int index;
  std::uint32_t begin;
};
template <class Cost>
__device__ __forceinline__ LinePlace find_on_line(std::uint32_t begin, std::uint32_t at, int lane, Cost&& cost) {
  for (int base = 0;; base += 32) {
    const std::uint32_t mine = cost(base + lane);
    std::uint32_t end = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const std::uint32_t other = __shfl_up_sync(~0U, end, d);
      if (lane >= d) end += other;
    }
    const unsigned past = __ballot_sync(~0U, begin + end > at);
    if (past != 0) {
      const int first = __ffs(static_cast<int>(past)) - 1;
      return {base + first, begin + __shfl_sync(~0U, end - mine, first)};
    }
    begin += __shfl_sync(~0U, end, 31);
  }
}

// A virtual head on the line: exact blocks in [begin, coded), pages in [coded, end).
struct HeadSpan {
  int sequence, head;
  int kv, first_row;  // KV head, and the first of its query rows
  std::uint32_t begin, coded, end;
};
// Walks over the heads that have work, from the one that contains `at` on; at < total. Called by whole warps.
template <bool kInt2>
class LineWalk {
 public:
  __device__ __forceinline__ LineWalk(const DecodeParams& p, std::uint32_t at, int lane) : p_(p) {
    const LinePlace sequence = find_on_line(0, at, lane, [&](int i) { return sequence_cost(p, i); });
    span_.sequence = sequence.index;
    tiers_ = cuda::tiers(p, sequence.index);
    const LinePlace head = find_on_line(sequence.begin, at, lane, [&](int i) {
      return i < p.heads ? exact_cost() + coded_cost(p.subgroups > 1 ? i / p.subgroups : i) : 0U;
    });
    span_.head = head.index;
    span_.begin = head.begin;
    span_.kv = p.subgroups > 1 ? span_.head / p.subgroups : span_.head;
    span_.first_row = (span_.head - span_.kv * p.subgroups) * kHeadsPerTile;
    measure();
  }
  // After the last head its begin is the line's end.
  [[nodiscard]] __device__ const HeadSpan& span() const { return span_; }
  [[nodiscard]] __device__ const Tiers& tiers() const { return tiers_; }
  __device__ __forceinline__ void next() {
    span_.begin = span_.end;
    ++span_.head;
    span_.first_row += kHeadsPerTile;
    if (span_.first_row >= p_.columns) {
      span_.first_row = 0;
      ++span_.kv;
    }
    if (span_.head == p_.heads) {
      int sequence = span_.sequence + 1;
      while (sequence < p_.batch && __ldg(p_.lengths + sequence) <= 0) ++sequence;
      if (sequence == p_.batch) return;
      span_.sequence = sequence;
      span_.head = span_.kv = 0;
      tiers_ = cuda::tiers(p_, sequence);
    }
    measure();
  }

 private:
  [[nodiscard]] __device__ std::uint32_t exact_cost() const {
    return static_cast<std::uint32_t>(tiers_.exact_blocks()) * p_.exact_cost;
  }
  [[nodiscard]] __device__ std::uint32_t coded_cost(int kv) const {
    return static_cast<std::uint32_t>(tiers_.pages()) * page_cost<kInt2>(p_, kv);
  }
  __device__ __forceinline__ void measure() {
    span_.coded = span_.begin + exact_cost();
    span_.end = span_.coded + coded_cost(span_.kv);
  }
  const DecodeParams& p_;
  HeadSpan span_{};
  Tiers tiers_{};
};

// Of `units` of a tier that starts at `from`, those whose first byte is before `limit`.
[[nodiscard]] __device__ __forceinline__ int units_before(std::uint32_t limit, std::uint32_t from, int units,
                                                          std::uint32_t cost) {
  return limit <= from ? 0 : static_cast<int>(min((limit - from + cost - 1) / cost, static_cast<std::uint32_t>(units)));
}

}  // namespace oscar::cuda
