// First kernel of a decode: queries into the basis of the codes, in the order in which the tensor cores want them.
// One block per sequence and virtual KV head.
#pragma once

#include "cuda/decode_plan.cuh"
#include "cuda/primitives.cuh"

namespace oscar::cuda {

inline constexpr int kPrepareThreads = 256;

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_xor_sync(~0U, x, d);
  return x;
}

template <int D>
__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(const __grid_constant__ DecodeParams p) {
  let_successor_start();
  constexpr int kParts = kPrepareThreads / D;  // threads that share a coordinate
  __shared__ float q[kHeadsPerTile][D];
  __shared__ float inner[kParts][kHeadsPerTile][D];
  __shared__ float largest[kPrepareThreads / 32];

  const int item = static_cast<int>(blockIdx.x);
  const int sequence = item / p.heads;
  const int kv = item % p.heads / p.subgroups;
  const int first_head = item % p.heads % p.subgroups * kHeadsPerTile;
  const int heads = min(kHeadsPerTile, p.group - first_head);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  const LayerView& layer = p.layer;

  const __half* rows = p.q + (static_cast<std::int64_t>(sequence) * layer.n_head_kv * p.group + kv * p.group + first_head) * D;
  for (int i = thread; i < kHeadsPerTile * D; i += kPrepareThreads) {
    q[i / D][i % D] = i / D < heads ? __half2float(rows[i]) : 0.0F;
  }
  __syncthreads();

  {  // inner = q * query, steps included; scaled so that logits come out in the base-2 logarithm
    const int column = thread % D;
    const int part = thread / D;
    constexpr int kRows = D / kParts;
    const float* matrix = layer.query + (static_cast<std::int64_t>(kv) * D + part * kRows) * D + column;
    float sum[kHeadsPerTile] = {};
#pragma unroll 16
    for (int d = 0; d < kRows; ++d) {
      const float m = matrix[static_cast<std::int64_t>(d) * D];
#pragma unroll
      for (int h = 0; h < kHeadsPerTile; ++h) sum[h] = fmaf(q[h][part * kRows + d], m, sum[h]);
    }
#pragma unroll
    for (int h = 0; h < kHeadsPerTile; ++h) inner[part][h][column] = sum[h];
  }
  __syncthreads();
  const float scale = p.scale * kLog2E;
  for (int i = thread; i < kHeadsPerTile * D; i += kPrepareThreads) {
    float sum = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) sum += inner[part][i / D][i % D];
    inner[0][i / D][i % D] = sum * scale;
  }
  __syncthreads();

  // Slots: a coordinate's digit of level l weighs 4^l.
  const int slots = layer.slots[kv];
  const std::uint16_t* source = layer.slot_source + kv * layer.max_slots;
  const auto slot_value = [&](int head, int slot) {
    const unsigned from = source[slot];
    return inner[0][head][from % 4096U] * static_cast<float>(1U << (2 * (from / 4096U)));
  };
  float most = 0;
  for (int i = thread; i < kHeadsPerTile * slots; i += kPrepareThreads) most = fmaxf(most, fabsf(slot_value(i / slots, i % slots)));
#pragma unroll
  for (int d = 16; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(~0U, most, d));
  if (lane == 0) largest[warp] = most;
  __syncthreads();
  most = largest[0];
#pragma unroll
  for (int i = 1; i < kPrepareThreads / 32; ++i) most = fmaxf(most, largest[i]);
  // A power of two that brings the largest weight to 2^12: binary16 then holds all that matters without subnormals.
  const int exponent = most > 0.0F && most < 3e38F ? 12 - ilogbf(most) : 0;
  const float unit = ldexpf(1.0F, min(max(exponent, -100), 100));
  // Columns 8 .. 15 of a k-step meet fields that stand two bits higher.
  const auto rounded = [&](int head, int slot) {
    return __float2half_rn(slot_value(head, slot) * unit * (slot % 16 < 8 ? 1.0F : 0.25F));
  };

  float* header = p.headers + static_cast<std::int64_t>(item) * kHeaderFloats;
  {  // Constants of head `warp`. Codes are read from 0: their centre 1.5 times the rounded weights comes off.
    float centre = 0;
    for (int s = lane; s < slots; s += 32) centre += __half2float(rounded(warp, s)) * (s % 16 < 8 ? 1.0F : 4.0F);
    centre = warp_sum(centre);
    float constant = 0;
    for (int d = lane; d < D; d += 32) constant += q[warp][d] * layer.key_constant[kv * D + d];
    constant = warp_sum(constant);
    if (lane == 0) {
      header[8 + warp] = -1.5F * centre * 0x1p-24F;
      header[16 + warp] = constant * scale;
    }
    if (thread == 0) header[0] = ldexpf(1.0F, 24) / unit;
  }

  const int lanes = p.lanes;
  const int steps = slots / 16;
  std::uint32_t* coded = p.coded_query + static_cast<std::int64_t>(item) * (p.query_bytes / 4);
  for (int i = thread; i < steps * lanes; i += kPrepareThreads) {
    const int step = i / lanes;
    const int head = i % lanes / 4;
    const int slot = step * 16 + i % 4 * 2;
    const auto pair = [&](int s) {
      const __half2 both = __halves2half2(rounded(head, s), rounded(head, s + 1));
      return *reinterpret_cast<const std::uint32_t*>(&both);
    };
    const int word = step / 2 < steps / 2 ? step / 2 * 4 * lanes + i % lanes * 4 + step % 2 * 2 : step * 2 * lanes + i % lanes * 2;
    coded[word] = pair(slot);
    coded[word + 1] = pair(slot + 8);
  }

  std::uint32_t* exact = p.exact_query + static_cast<std::int64_t>(item) * (D / 16 * lanes * 2);
  for (int i = thread; i < D / 16 * lanes; i += kPrepareThreads) {
    const int step = i / lanes;
    const int head = i % lanes / 4;
    const int d = step * 16 + i % 4 * 2;
    const int word = step / 2 * 4 * lanes + i % lanes * 4 + step % 2 * 2;
    exact[word] = pack_half2(q[head][d], q[head][d + 1]);
    exact[word + 1] = pack_half2(q[head][d + 8], q[head][d + 9]);
  }

  // q . RoPE_t(mean) = sum over pairs of Re(c e^(i theta t)), c = (q1 m1 + q2 m2) - i (q2 m1 - q1 m2).
  // A float4 holds the real and the imaginary parts of two neighbouring pairs of one head, see attend.cuh.
  const int parts = lanes / 16;
  const int places = layer.n_pairs / 16 * parts * 32;
  float4* mean = p.mean_query + static_cast<std::int64_t>(item) * places;
  for (int i = thread; i < places; i += kPrepareThreads) {
    const int column = i % 32 / 4;
    const int head = parts == 2 ? column : column % 4;
    const int upper = parts == 2 ? i / 32 % 2 : column / 4;
    const auto weight = [&](int pair) {
      const float q1 = q[head][layer.pair[2 * pair]];
      const float q2 = q[head][layer.pair[2 * pair + 1]];
      const float m1 = layer.mean[2 * (kv * layer.n_pairs + pair)];
      const float m2 = layer.mean[2 * (kv * layer.n_pairs + pair) + 1];
      return make_float2((q1 * m1 + q2 * m2) * scale, (q1 * m2 - q2 * m1) * scale);
    };
    const int pair = i / 32 / parts * 16 + upper * 8 + i % 4 * 2;
    const float2 a = weight(pair);
    const float2 b = weight(pair + 1);
    mean[i] = make_float4(a.x, b.x, a.y, b.y);
  }
}

}  // namespace oscar::cuda
