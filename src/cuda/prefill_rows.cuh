// Rows of a prefill: where exact ones stand, in the chunk's own k and v, or in blocks, and the end of a query's.
#pragma once

#include "cuda/prefill_plan.cuh"

namespace oscar::cuda {

// Row of a token in an exact tile, in 16-byte pieces, and what is xored to their numbers; null where no query reads it.
template <int D>
__device__ __forceinline__ const uint4* exact_row(const PrefillParams& p, const PrefillUnit& u, int tile, int token, bool value,
                                                  int& flip) {
  const Range read = u.exact_rows(p, tile);
  const int position = u.exact_position(tile) + token;
  if (position < read.low || position > read.high) return nullptr;
  const __half* row = nullptr;
  if (position >= u.start) {
    const std::int64_t at = u.first_token + position - u.start;
    row = (value ? p.v + at * p.v_stride : p.k + at * p.k_stride) + u.kv * D;
  } else {
    const std::int32_t block =
        __ldg(p.block_table.at(u.sequence, p.sink / kBlockTokens + p.ring, paged::block_column(position, p.sink, p.ring)));
    flip = position % 8;
    row = p.blocks + (static_cast<std::int64_t>(block) * p.layer.n_head_kv + u.kv) * paged::exact_head_values(D) +
          (value ? kBlockTokens * D : 0) + position % kBlockTokens * D;
  }
  return reinterpret_cast<const uint4*>(row);
}

// Of a query row whose sums are complete: what they are to be multiplied by, and the logarithm of its sum of exponentials.
struct RowEnd {
  float factor, lse;
  // most: base-2 logarithm that sum is relative to.
  __device__ __forceinline__ RowEnd(const PrefillParams& p, int query_head, float most, float sum) {
    float shrink = 1.0F;
    const float sink = p.sinks != nullptr ? p.sinks[query_head] * kLog2E : -INFINITY;
    if (sink != -INFINITY) {
      const float now = fmaxf(most, sink);
      shrink = exp2f(most - now);
      sum = sum * shrink + exp2f(sink - now);
      most = now;
    }
    factor = sum != 0.0F ? shrink / sum : 0.0F;  // NaN of a query stays
    lse = sum != 0.0F ? (most + log2f(sum)) * kLn2 : -INFINITY;
  }
};

}  // namespace oscar::cuda
