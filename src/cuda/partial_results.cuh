// Partial results of virtual heads, and how a complete one becomes an output.
//
// A partial result is, per query row, (maximum, sum) of the softmax in the base-2 logarithm and the sums of values in the
// model's basis; of `int2` also a second vector, of values as they are coded. Where it stands:
//   slot   shared memory, one per warp: of the head in which the warp's piece of the line ends
//   row    workspace: [worker] of the head in which its piece begins, where that head ends before the piece does;
//          [workers + 3 block + k] of all warps of a block: k = 0 of the head that began in another block, k = 1 of one that
//          begins in this block and ends in another, k = 2 of a complete one (`int2`)
// A head that lies in one warp's piece has none of them: the warp writes its output.
#pragma once

#include "cuda/decode_plan.cuh"
#include "cuda/primitives.cuh"

namespace oscar::cuda {

// Which head it is of.
struct alignas(16) PartialHead {
  int sequence;  // negative: none
  int kv, first_row;
  std::uint32_t begin, end;  // on the line
  int item;                  // sequence * heads + head
};
// In shared memory, of a warp.
struct WarpHeads {
  PartialHead open;   // of its slot
  PartialHead aside;  // of its row
};

template <int D, bool kWide, bool kInt2>
struct PartialLayout {
  static constexpr int kRows = kWide ? 8 : 4;  // of queries
  static constexpr int kVectors = kInt2 ? 2 : 1;
  static constexpr int kStride = D + 8;  // of a vector: lanes that write different rows of a slot meet different banks
  static constexpr std::uint32_t kBytes = partial_bytes(D, kRows, kVectors);

  // From the start of a partial result, in bytes.
  [[nodiscard]] __device__ static std::uint32_t sum_at(int row) { return 8U * static_cast<std::uint32_t>(row); }
  [[nodiscard]] __device__ static std::uint32_t value_at(int vector, int row, int dim) {
    return 64U + 4U * static_cast<std::uint32_t>((vector * kRows + row) * kStride + dim);
  }
  [[nodiscard]] __device__ static std::uint8_t* row(const DecodeParams& p, std::uint32_t at) {
    return p.partials + static_cast<std::uint64_t>(at) * kBytes;
  }
};

// Query rows of a virtual head.
[[nodiscard]] __device__ __forceinline__ int rows_of(const DecodeParams& p, int first_row) {
  return min(kHeadsPerTile, p.columns - first_row);
}
// Where the output of a query row stands, and its query head. row: of the KV head.
struct OutputRow {
  std::int64_t index;  // [batch, queries, n_head]
  int query_head;
  __device__ OutputRow(const DecodeParams& p, int sequence, int kv, int row) {
    const int query = p.queries > 1 ? row / p.group : 0;
    query_head = kv * p.group + row - query * p.group;
    index = static_cast<std::int64_t>(sequence * p.queries + query) * (p.layer.n_head_kv * p.group) + query_head;
  }
};
// What the sums of values of a complete head are to be multiplied by, and the logarithm of its sum of exponentials.
struct Closing {
  float most, all, factor;
  __device__ Closing(const DecodeParams& p, const OutputRow& row, float max, float sum) {
    const float sink = p.sinks != nullptr ? p.sinks[row.query_head] * kLog2E : -INFINITY;
    const bool sees = sum != 0.0F;  // NaN, too
    most = fmaxf(sees ? max : -INFINITY, sink);
    const float scale = sees ? exp2_fast(max - most) : 0.0F;
    all = (sees ? sum * scale : 0.0F) + (sink != -INFINITY ? exp2_fast(sink - most) : 0.0F);
    factor = sees ? __fdividef(scale, all) : 0.0F;
  }
  [[nodiscard]] __device__ float lse() const { return all != 0.0F ? (most + log2f(all)) * kLn2 : -INFINITY; }
};

// Of `int2`: values as they are coded, rows of D at a distance of `stride`, turned to the model's basis, f(row, dimension,
// value). A warp's share are the tasks first, first + step, ...; kParts lanes share a sum, so there are D kParts / 32 tasks.
template <int D, int kRows, int kParts, class F>
__device__ __forceinline__ void turn_rows(const DecodeParams& p, int kv, const float* coded, int stride, int rows, int lane,
                                          int first, int step, F&& f) {
  constexpr int kDims = 32 / kParts;
  const int part = lane / kDims;
#pragma unroll 1
  for (int task = first; task < D / kDims; task += step) {
    const int dim = task * kDims + lane % kDims;
    const float* matrix = p.layer.value_output + static_cast<std::int64_t>(kv) * D * D + dim;
    float sum[kRows] = {};
#pragma unroll(kRows == 4 ? 4 : 2)
    for (int k = 0; k < D / (4 * kParts); ++k) {
      const int i = 4 * (k * kParts + part);
      float m[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) m[j] = __ldg(matrix + (i + j) * D);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4 x =
            r < rows ? *reinterpret_cast<const float4*>(coded + r * stride + i) : make_float4(0.0F, 0.0F, 0.0F, 0.0F);
        sum[r] = fmaf(x.x, m[0], fmaf(x.y, m[1], fmaf(x.z, m[2], fmaf(x.w, m[3], sum[r]))));
      }
    }
#pragma unroll
    for (int first_row = 0; first_row < kRows; first_row += kParts) {
      float mine = 0;  // the lane's row is first_row + part
#pragma unroll
      for (int r = 0; r < kParts; ++r) {
        float all = sum[first_row + r];
#pragma unroll
        for (int d = kDims; d < 32; d *= 2) all += __shfl_xor_sync(~0U, all, d);
        if (r == part) mine = all;
      }
      if (first_row + part < rows) f(first_row + part, dim, mine);
    }
  }
}

}  // namespace oscar::cuda
