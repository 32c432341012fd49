// Third kernel of a decode: the partial results of a query row become its output. One block per sequence, query and head.
#pragma once

#include <type_traits>

#include "cuda/decode_plan.cuh"
#include "cuda/prepare.cuh"

namespace oscar::cuda {

inline constexpr int kMergeWarps = 8;  // at most

// Sums of coded values in the Hadamard basis of a pattern, kValues neighbours in each lane, back to the model's: butterflies
// within a lane, then across lanes. Without signs and the factor 1 / sqrt(D).
template <int kValues>
__device__ __forceinline__ void turn_back(float (&x)[kValues], int lane) {
#pragma unroll
  for (int d = 1; d < kValues; d *= 2) {
#pragma unroll
    for (int k = 0; k < kValues; ++k) {
      if ((k & d) == 0) {
        const float a = x[k];
        const float b = x[k + d];
        x[k] = a + b;
        x[k + d] = a - b;
      }
    }
  }
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float sign = (lane & d) == 0 ? 1.0F : -1.0F;
#pragma unroll
    for (int k = 0; k < kValues; ++k) x[k] = fmaf(sign, x[k], __shfl_xor_sync(~0U, x[k], d));
  }
}

// kValues neighbours, 8 or 16 bytes at a time.
template <int kValues>
__device__ __forceinline__ void load_vector(float (&x)[kValues], const float* from) {
  if constexpr (kValues == 2) {
    const float2 two = *reinterpret_cast<const float2*>(from);
    x[0] = two.x;
    x[1] = two.y;
  } else {
#pragma unroll
    for (int v = 0; v < kValues; v += 4) {
      const float4 four = *reinterpret_cast<const float4*>(from + v);
      x[v] = four.x;
      x[v + 1] = four.y;
      x[v + 2] = four.z;
      x[v + 3] = four.w;
    }
  }
}

// Where the partial results of a virtual head stand; lane i < kHeadParts knows those of part i.
template <bool kInt2>
struct PartRows {
  int count;             // of all parts
  int end;               // of the lane's part, counted over all parts
  std::uint32_t offset;  // from that count to the row

  // Rows are those of the workers whose piece of the line meets a part.
  __device__ PartRows(const DecodeParams& p, int sequence, int head, int lane) {
    const Shares share = shares(p, lane);
    const Tiers t = tiers(p, sequence);
    const std::uint32_t exact = static_cast<std::uint32_t>(t.exact_blocks()) * p.exact_cost;
    std::uint32_t from = sequence_begin(p, sequence, lane);
    for (int h = 0; h < head; ++h) from += exact + static_cast<std::uint32_t>(t.pages()) * page_cost<kInt2>(p, h);
    std::uint32_t length = lane == 0 ? exact : 0;
    const std::uint32_t cost = page_cost<kInt2>(p, head);
    if (lane > 0) from += exact;
#pragma unroll
    for (int series = 0; series < paged::kPatterns; ++series) {
      const std::uint32_t bytes = static_cast<std::uint32_t>(t.series_pages(series)) * cost;
      if (series + 1 < lane) from += bytes;
      if (series + 1 == lane) length = bytes;
    }
    const std::uint32_t worker = length == 0 ? 0 : from / share.share;
    const int mine = length == 0 ? 0 : static_cast<int>((from + length - 1) / share.share - worker) + 1;
    end = mine;
#pragma unroll
    for (int d = 1; d < 8; d *= 2) {
      const int other = __shfl_up_sync(~0U, end, d);
      if (lane >= d) end += other;
    }
    offset = kHeadParts * static_cast<std::uint32_t>(sequence * p.heads + head) + static_cast<std::uint32_t>(lane) + worker -
             static_cast<std::uint32_t>(end - mine);
    count = __shfl_sync(~0U, end, kHeadParts - 1);
  }
  [[nodiscard]] __device__ int part_of(int i, int lane) const {
    return __popc(__ballot_sync(~0U, lane < kHeadParts && end <= i));
  }
  [[nodiscard]] __device__ std::uint32_t row_of(int i, int part) const {
    return __shfl_sync(~0U, offset, part) + static_cast<std::uint32_t>(i);
  }
};

// Of `int2`: sums of coded values, rotated, and of their weights, of each warp.
template <int D>
struct RotatedSums {
  float out[kMergeWarps][D];
  float weight[kMergeWarps];
  float all[D];
  float turned[D];  // in the model's basis

  // By all threads; factor(w): what the sums of warp w are multiplied by.
  template <class Factor>
  __device__ void finish(const LayerView& layer, int kv, int warps, Factor&& factor) {
    const int thread = static_cast<int>(threadIdx.x);
    const int threads = 32 * warps;
    float total = 0;
    for (int w = 0; w < warps; ++w) total += factor(w) * weight[w];
    for (int d = thread; d < D; d += threads) {
      all[d] = 0;
      for (int w = 0; w < warps; ++w) all[d] = fmaf(factor(w), out[w][d], all[d]);
    }
    __syncthreads();
    const float* matrix = layer.value_output + static_cast<std::int64_t>(kv) * D * D;
    for (int d = thread; d < D; d += threads) {
      float sum = layer.value_mean != nullptr ? total * layer.value_mean[kv * D + d] : 0.0F;
#pragma unroll 16
      for (int i = 0; i < D; ++i) sum = fmaf(all[i], __ldg(matrix + i * D + d), sum);
      turned[d] = sum;
    }
    __syncthreads();
  }
};

template <int D, bool kInt2>
__global__ void __launch_bounds__(32 * kMergeWarps, 4) merge_kernel(const __grid_constant__ DecodeParams p) {
  const int warps = static_cast<int>(blockDim.x) / 32;
  constexpr int kValues = D / 32;  // of a lane
  __shared__ float outs[kMergeWarps][D];
  __shared__ float2 sums[kMergeWarps];
  __shared__ std::conditional_t<kInt2, RotatedSums<D>, char> rotated_sums;

  const int n_head = p.layer.n_head_kv * p.group;
  const int sequence = static_cast<int>(blockIdx.x) / n_head / p.queries;
  const int query_head = static_cast<int>(blockIdx.x) % n_head;
  const int kv = query_head / p.group;
  const int query_row = static_cast<int>(blockIdx.x) / n_head % p.queries * p.group + query_head % p.group;
  const int head = kv * p.subgroups + query_row / kHeadsPerTile;
  const int column = query_row % kHeadsPerTile;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;

  const PartRows<kInt2> rows(p, sequence, head, lane);
  const int first_pattern = tiers(p, sequence).first_page() % paged::kPatterns;  // of the first series
  std::uint32_t negative = 0;  // bit kValues * pattern + v: sign of the lane's value v
#pragma unroll
  for (int pattern = 0; !kInt2 && pattern < paged::kPatterns; ++pattern) {
    const float* signs = p.layer.value_signs + (pattern * p.layer.n_head_kv + kv) * D + lane * kValues;
#pragma unroll
    for (int v = 0; v < kValues; ++v) negative |= (__float_as_uint(signs[v]) >> 31) << (kValues * pattern + v);
  }
  const float unit = kInt2 ? 1.0F : p.layer.value_unit[kv] * rsqrtf(static_cast<float>(D));
  wait_for_predecessor();

  // Each warp merges rows that follow each other, several on their way at once.
  const int begin = rows.count * warp / warps;
  const int end = rows.count * (warp + 1) / warps;
  float most = -INFINITY;
  float total = 0;
  float out[kValues] = {};       // in the model's basis
  float part_sum[kValues] = {};  // in that of the part
  float rotated[kInt2 ? kValues : 1] = {};
  float coded_total = 0;
  int part = 0;
  const auto finish_part = [&] {
    if constexpr (kInt2) {
#pragma unroll
      for (int v = 0; v < kValues; ++v) {
        (part > 0 ? rotated[v] : out[v]) += part_sum[v];
        part_sum[v] = 0;
      }
      return;
    }
    if (part > 0) {
      turn_back(part_sum, lane);
      const std::uint32_t bits = negative >> ((first_pattern + part - 1) % paged::kPatterns * kValues);
#pragma unroll
      for (int v = 0; v < kValues; ++v) part_sum[v] *= (bits >> v & 1U) != 0 ? -unit : unit;
    }
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      out[v] += part_sum[v];
      part_sum[v] = 0;
    }
  };
  constexpr int kAtOnce = 16 / kValues;
  for (int first = begin; first < end; first += kAtOnce) {
    float2 sum[kAtOnce];
    float values[kAtOnce][kValues];
    int parts[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int i = min(first + k, end - 1);
      parts[k] = rows.part_of(i, lane);
      const std::int64_t row = static_cast<std::int64_t>(rows.row_of(i, parts[k])) * p.stride_heads + column;
      sum[k] = p.partial_sum[row];
      if (first + k >= end) sum[k].y = 0.0F;
      load_vector(values[k], p.partial_out + row * D + lane * kValues);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (!(sum[k].y > 0.0F)) continue;  // without work, and then not written
      if (parts[k] != part) {
        finish_part();
        part = parts[k];
      }
      if (sum[k].x > most) {
        const float factor = exp2f(most - sum[k].x);
        most = sum[k].x;
        total *= factor;
#pragma unroll
        for (int v = 0; v < kValues; ++v) {
          out[v] *= factor;
          part_sum[v] *= factor;
          if constexpr (kInt2) rotated[v] *= factor;
        }
        if constexpr (kInt2) coded_total *= factor;
      }
      const float weight = exp2f(sum[k].x - most);
      total += weight * sum[k].y;
      if constexpr (kInt2) coded_total += part > 0 ? weight * sum[k].y : 0.0F;
#pragma unroll
      for (int v = 0; v < kValues; ++v) part_sum[v] = fmaf(weight, values[k][v], part_sum[v]);
    }
  }
  finish_part();
  const float sink = p.sinks != nullptr ? p.sinks[query_head] * kLog2E : -INFINITY;
#pragma unroll
  for (int v = 0; v < kValues; ++v) outs[warp][lane * kValues + v] = out[v];
  if (lane == 0) sums[warp] = make_float2(most, total);
  if constexpr (kInt2) {
#pragma unroll
    for (int v = 0; v < kValues; ++v) rotated_sums.out[warp][lane * kValues + v] = rotated[v];
    if (lane == 0) rotated_sums.weight[warp] = coded_total;
  }
  __syncthreads();
  most = sink;
  for (int w = 0; w < warps; ++w) most = fmaxf(most, sums[w].x);
  const auto factor_of = [&](int w) { return sums[w].y > 0.0F ? exp2f(sums[w].x - most) : 0.0F; };
  if constexpr (kInt2) rotated_sums.finish(p.layer, kv, warps, factor_of);
  if (warp != 0) return;

  total = most > -INFINITY ? exp2f(sink - most) : 0.0F;
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    out[v] = 0.0F;
    if constexpr (kInt2) out[v] = rotated_sums.turned[lane * kValues + v];
  }
  for (int w = 0; w < warps; ++w) {
    const float weight = factor_of(w);
    total += weight * sums[w].y;
#pragma unroll
    for (int v = 0; v < kValues; ++v) out[v] = fmaf(weight, outs[w][lane * kValues + v], out[v]);
  }
  const float inverse = total > 0.0F ? 1.0F / total : 0.0F;
  __half* to = p.out + static_cast<std::int64_t>(blockIdx.x) * D;
#pragma unroll
  for (int v = 0; v < kValues; ++v) to[lane * kValues + v] = __float2half_rn(out[v] * inverse);
  if (lane == 0 && p.lse != nullptr) p.lse[blockIdx.x] = total > 0.0F ? (most + log2f(total)) * kLn2 : -INFINITY;
}

}  // namespace oscar::cuda
