// Which query rows a block of a prefill has, and which tiles of 64 positions they meet in which order.
#pragma once

#include "cuda/decode_plan.cuh"
#include "cuda/prefill_params.h"
#include "oscar/paged/page_format.h"

namespace oscar::cuda {

using paged::kBlockTokens;
using paged::kPageTokens;

// Token in column n of a tile: the order of a page's rows (paged::token_row), also for exact tiles.
__device__ __forceinline__ int tile_token(int n) { return n < kPageTokens / 2 ? n ^ 15 : n; }

// Of pages first .. last - 1, those of one pattern of signs after the other, the one after `page`; last: there is none.
__device__ __forceinline__ int page_after(int page, int first, int last) {
  if (page + paged::kPatterns < last) return page + paged::kPatterns;
  // The next series begins one page further than this one.
  const int series = static_cast<int>(static_cast<unsigned>(page - first) % paged::kPatterns) + 1;
  return series < paged::kPatterns ? min(first + series, last) : last;
}

// Pages first .. last - 1 of the coded tier in that order.
class PageWalk {
 public:
  __device__ PageWalk(int first, int last) : first_(first), last_(last), page_(first) {}
  [[nodiscard]] __device__ bool done() const { return page_ >= last_; }
  [[nodiscard]] __device__ int page() const { return page_; }
  __device__ void next() { page_ = page_after(page_, first_, last_); }

 private:
  int first_, last_, page_;
};

// Positions [low, high] that a query row reads of a tier.
struct Range {
  int low, high;
};

struct PrefillUnit {
  int sequence = -1, kv = 0;
  int first_token = 0;                // of the sequence's chunk, in q and k
  int start = 0;                      // its position
  int first_row = 0;                  // of the block, in the sequence
  int rows = 0;                       // of the block; 0: it only helps the other one of its cluster
  int oldest = 0, newest = -1;        // positions of the block's queries
  int first_page = 0, last_page = 0;  // coded pages of the cluster
  int sink_tiles = 0;                 // exact tiles of the block: of sinks, then those from recent_tile on
  int recent_tile = 0, exact_tiles = 0;

  // kBlocks: blocks per cluster, of kBlockRows query rows each. Every lane of every warp computes the same.
  template <int kBlocks, int kBlockRows = kPrefillRows>
  __device__ static PrefillUnit find(const PrefillParams& p, int unit, int rank) {
    constexpr int kRows = kBlockRows * kBlocks;
    PrefillUnit u;
    u.kv = unit / p.units;
    int left = unit % p.units;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int base = 0; base < p.batch; base += 32) {
      const int b = base + lane;
      const int begin = b < p.batch ? p.query_start[b] : 0;
      const int tokens = b < p.batch ? min(p.query_start[b + 1], p.n_tokens) - begin : 0;
      const int count = (max(tokens, 0) * p.group + kRows - 1) / kRows;
      int sum = count;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0U, sum, d);
        if (lane >= d) sum += other;
      }
      const unsigned beyond = __ballot_sync(~0U, sum > left);
      if (beyond == 0) {
        left -= __shfl_sync(~0U, sum, 31);
        continue;
      }
      const int at = __ffs(static_cast<int>(beyond)) - 1;
      const int n = __shfl_sync(~0U, tokens, at);
      const int piece = __shfl_sync(~0U, sum, at) - 1 - left;  // the last ones, which see most, come first
      u.sequence = base + at;
      u.first_token = __shfl_sync(~0U, begin, at);
      u.start = p.lengths[u.sequence] - n;
      const int all = n * p.group;
      const int cluster_row = piece * kRows;
      const int cluster_newest = u.start + (min(cluster_row + kRows, all) - 1) / p.group;
      u.first_row = cluster_row + rank * kBlockRows;
      u.rows = min(max(all - u.first_row, 0), kBlockRows);
      if (u.rows > 0) {
        u.oldest = u.start + u.first_row / p.group;
        u.newest = u.start + (u.first_row + u.rows - 1) / p.group;
      }
      u.first_page = p.sink / kPageTokens;
      u.last_page = cluster_newest - p.recent >= p.sink ? (cluster_newest - p.recent) / kPageTokens + 1 : u.first_page;
      if (u.rows > 0) {
        u.sink_tiles = (min(p.sink, u.newest + 1) + kPageTokens - 1) / kPageTokens;
        u.recent_tile = max(p.sink, u.oldest - p.recent + 1) / kPageTokens;
        u.exact_tiles = u.sink_tiles + max(0, u.newest / kPageTokens - u.recent_tile + 1);
      }
      break;
    }
    return u;
  }

  // Of a query row of the block: its query head, and its place in [n_tokens, n_head].
  [[nodiscard]] __device__ int query_head(const PrefillParams& p, int row) const {
    return kv * p.group + (first_row + row) % p.group;
  }
  [[nodiscard]] __device__ std::int64_t row_index(const PrefillParams& p, int row) const {
    const std::int64_t token = first_token + (first_row + row) / p.group;
    return token * (p.layer.n_head_kv * p.group) + query_head(p, row);
  }
  [[nodiscard]] __device__ int row_position(int row, int group) const {
    return row < rows ? start + (first_row + row) / group : -1;
  }
  [[nodiscard]] __device__ int exact_position(int tile) const {
    return kPageTokens * (tile < sink_tiles ? tile : recent_tile + tile - sink_tiles);
  }
  // Exact rows of a tile that some query reads.
  [[nodiscard]] __device__ Range exact_rows(const PrefillParams& p, int tile) const {
    return tile < sink_tiles ? Range{0, min(newest, p.sink - 1)} : Range{max(p.sink, oldest - p.recent + 1), newest};
  }
  // What the query at `position` (-1: none) reads of it.
  [[nodiscard]] __device__ Range exact_seen(const PrefillParams& p, int tile, int position) const {
    return tile < sink_tiles ? Range{0, min(position, p.sink - 1)} : Range{max(p.sink, position - p.recent + 1), position};
  }
  [[nodiscard]] __device__ static Range coded_seen(const PrefillParams& p, int position) {
    return Range{p.sink, position - p.recent};
  }
  // Whether every query reads all of a tile.
  [[nodiscard]] __device__ bool exact_whole(const PrefillParams& p, int tile) const {
    const int first = exact_position(tile);
    const int last = first + kPageTokens - 1;
    return tile < sink_tiles ? last <= min(oldest, p.sink - 1) : first >= max(p.sink, newest - p.recent + 1) && last <= oldest;
  }
};

}  // namespace oscar::cuda
