// Third kernel of a decode: the partial results of a query row become its output. One block per sequence, query and head.
#pragma once

#include "cuda/decode_plan.cuh"
#include "cuda/prepare.cuh"

namespace oscar::cuda {

inline constexpr int kMergeWarps = 16;  // at most

template <int D>
__global__ void __launch_bounds__(32 * kMergeWarps, 2) merge_kernel(const __grid_constant__ DecodeParams p) {
  const int warps = static_cast<int>(blockDim.x) / 32;
  constexpr int kValues = D / 32;  // of a lane
  __shared__ float outs[2][kMergeWarps][D];
  __shared__ float2 sums[kMergeWarps];

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

  // Rows of both parts: the workers whose piece of the line meets them.
  const Shares share = shares(p, lane);
  const Tiers t = tiers(p, sequence);
  const std::uint32_t exact = static_cast<std::uint32_t>(t.exact_blocks()) * exact_cost(p);
  std::uint32_t begin = sequence_begin(p, sequence, lane);
  for (int h = 0; h < head; ++h) begin += exact + static_cast<std::uint32_t>(t.pages()) * page_cost(p, h);
  const std::uint32_t coded = static_cast<std::uint32_t>(t.pages()) * page_cost(p, head);
  const std::uint32_t part = 2U * static_cast<std::uint32_t>(sequence * p.heads + head);
  const auto rows_of = [&](std::uint32_t from, std::uint32_t length, std::uint32_t number, std::uint32_t& first) {
    if (length == 0) return 0;
    first = number + from / share.share;
    return static_cast<int>((from + length - 1) / share.share - from / share.share) + 1;
  };
  std::uint32_t first[2] = {0, 0};
  const int n_exact = rows_of(begin, exact, part, first[0]);
  const int n_rows = n_exact + rows_of(begin + exact, coded, part + 1, first[1]);
  const auto index = [&](int i) {
    const std::uint32_t row =
        i < n_exact ? first[0] + static_cast<std::uint32_t>(i) : first[1] + static_cast<std::uint32_t>(i - n_exact);
    return static_cast<std::int64_t>(row) * p.stride_heads + column;
  };
  wait_for_predecessor();

  // Each warp merges its rows, several on their way at once.
  float most = -INFINITY;
  float total = 0;
  float out[2][kValues] = {};
  constexpr int kAtOnce = 16 / kValues;
  for (int first_row = warp; first_row < n_rows; first_row += warps * kAtOnce) {
    float2 sum[kAtOnce];
    float values[kAtOnce][kValues];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int i = first_row + k * warps;
      sum[k] = make_float2(-INFINITY, 0.0F);
      if (i < n_rows) {
        const std::int64_t row = index(i);
        sum[k] = p.partial_sum[row];
#pragma unroll
        for (int v = 0; v < kValues; ++v) values[k][v] = p.partial_out[row * D + lane * kValues + v];
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (!(sum[k].y > 0.0F)) continue;  // without work, and then not written
      const int exact_row = first_row + k * warps < n_exact ? 0 : 1;
      if (sum[k].x > most) {
        const float factor = exp2f(most - sum[k].x);
        most = sum[k].x;
        total *= factor;
#pragma unroll
        for (int v = 0; v < kValues; ++v) {
          out[0][v] *= factor;
          out[1][v] *= factor;
        }
      }
      const float weight = exp2f(sum[k].x - most);
      total += weight * sum[k].y;
#pragma unroll
      for (int v = 0; v < kValues; ++v) {
        out[0][v] += exact_row == 0 ? weight * values[k][v] : 0.0F;
        out[1][v] += exact_row == 0 ? 0.0F : weight * values[k][v];
      }
    }
  }
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    outs[0][warp][lane * kValues + v] = out[0][v];
    outs[1][warp][lane * kValues + v] = out[1][v];
  }
  if (lane == 0) sums[warp] = make_float2(most, total);
  __syncthreads();
  if (warp != 0) return;

  const float sink = p.sinks != nullptr ? p.sinks[query_head] * kLog2E : -INFINITY;
  most = sink;
  for (int w = 0; w < warps; ++w) most = fmaxf(most, sums[w].x);
  total = most > -INFINITY ? exp2f(sink - most) : 0.0F;
  float plain[kValues] = {};
  float turned[kValues] = {};
  for (int w = 0; w < warps; ++w) {
    const float weight = sums[w].y > 0.0F ? exp2f(sums[w].x - most) : 0.0F;
    total += weight * sums[w].y;
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      plain[v] += weight * outs[0][w][lane * kValues + v];
      turned[v] += weight * outs[1][w][lane * kValues + v];
    }
  }
  // Coded values come in the Hadamard basis: butterflies within a lane, then across lanes.
#pragma unroll
  for (int d = 1; d < kValues; d *= 2) {
#pragma unroll
    for (int k = 0; k < kValues; ++k) {
      if ((k & d) == 0) {
        const float a = turned[k];
        const float b = turned[k + d];
        turned[k] = a + b;
        turned[k + d] = a - b;
      }
    }
  }
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
#pragma unroll
    for (int k = 0; k < kValues; ++k) {
      const float other = __shfl_xor_sync(~0U, turned[k], d);
      turned[k] = (lane & d) == 0 ? turned[k] + other : other - turned[k];
    }
  }
  const float inverse = total > 0.0F ? 1.0F / total : 0.0F;
  const float unit = p.layer.value_unit[kv] * rsqrtf(static_cast<float>(D));
  __half* to = p.out + static_cast<std::int64_t>(blockIdx.x) * D;
#pragma unroll
  for (int k = 0; k < kValues; ++k) {
    const int d = lane * kValues + k;
    to[d] = __float2half_rn((plain[k] + turned[k] * unit * p.layer.value_signs[kv * D + d]) * inverse);
  }
  if (lane == 0 && p.lse != nullptr) p.lse[blockIdx.x] = total > 0.0F ? (most + log2f(total)) * kLn2 : -INFINITY;
}

}  // namespace oscar::cuda
