// First kernel of a decode: queries into the basis of the codes, in the order in which the tensor cores want them.
// A block serves one sequence and virtual KV head after the other.
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
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(~0U, x, d));
  return x;
}

// kHeads: 4 or 8, at least the query rows of a virtual head.
template <int D, int kHeads>
__global__ void __launch_bounds__(kPrepareThreads, 4) prepare_kernel(const __grid_constant__ DecodeParams p) {
  let_successor_start();
  constexpr int kParts = D < kPrepareThreads ? kPrepareThreads / D : 1;    // threads that share a coordinate
  constexpr int kColumns = D > kPrepareThreads ? D / kPrepareThreads : 1;  // coordinates of one thread
  constexpr int kRows = D / kParts;                                        // of the matrix, of one thread
  constexpr int kAtOnce = kRows < 32 ? kRows : 32;
  constexpr int kPieces = kRows / kAtOnce;  // of a column
  constexpr int kMaxSlots = 4 * D < kMostSlots ? 4 * D : kMostSlots;
  constexpr int kLanes = 4 * kHeads;
  __shared__ float q[kHeads][D];
  __shared__ float constant[D];
  __shared__ std::uint16_t source[kMaxSlots];
  __shared__ float work[kParts * kHeads * D < kHeads * kMaxSlots ? kHeads * kMaxSlots : kParts * kHeads * D];
  __shared__ float inner[kHeads][D];
  __shared__ float largest[kPrepareThreads / 32];

  for (int item = static_cast<int>(blockIdx.x); item < p.batch * p.heads; item += static_cast<int>(gridDim.x)) {
    const int sequence = item / p.heads;
    const int kv = item % p.heads / p.subgroups;
    const int first_head = item % p.heads % p.subgroups * kHeadsPerTile;
    const int heads = min(kHeads, p.columns - first_head);
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32;
    const int warp = thread / 32;
    const LayerView& layer = p.layer;
    const int slots = layer.slots[kv];
    const int steps = slots / 16;

    // Loads.
    const int part = thread / D % kParts;
    const float* matrix = layer.query + (static_cast<std::int64_t>(kv) * D + part * kRows) * D + thread % D;
    float m[kAtOnce];
    const auto load = [&](int piece) {
      const float* from = matrix + piece % kPieces * kAtOnce * D + piece / kPieces * kPrepareThreads;
#pragma unroll
      for (int d = 0; d < kAtOnce; ++d) m[d] = from[d * D];
    };
    load(0);
    const auto value = [&](int h, int d) {
      const int token = sequence * p.queries + (first_head + h) / p.group;
      const int head = kv * p.group + (first_head + h) % p.group;
      return __half2float(p.q[(static_cast<std::int64_t>(token) * layer.n_head_kv * p.group + head) * D + d]);
    };
    wait_for_predecessor();  // everything before is constant
    for (int i = thread; i < kHeads * D; i += kPrepareThreads) q[i / D][i % D] = i / D < heads ? value(i / D, i % D) : 0.0F;
    for (int i = thread; i < D; i += kPrepareThreads) constant[i] = layer.key_constant[kv * D + i];
    for (int i = thread; i < slots; i += kPrepareThreads) source[i] = layer.slot_source[kv * layer.max_slots + i];
    __syncthreads();

    float sum[kHeads] = {};
#pragma unroll 1
    for (int piece = 0; piece < kColumns * kPieces; ++piece) {  // inner = q * query, steps included
      const int first = part * kRows + piece % kPieces * kAtOnce;
#pragma unroll
      for (int d = 0; d < kAtOnce; ++d) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) sum[h] = fmaf(q[h][first + d], m[d], sum[h]);
      }
      if (piece + 1 < kColumns * kPieces) load(piece + 1);
      if (piece % kPieces == kPieces - 1) {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          work[(part * kHeads + h) * D + thread % D + piece / kPieces * kPrepareThreads] = sum[h];
          sum[h] = 0;
        }
      }
    }
    __syncthreads();
    const float scale = p.scale * kLog2E;  // logits come out in the base-2 logarithm
    for (int i = thread; i < kHeads * D; i += kPrepareThreads) {
      float all = 0;
#pragma unroll
      for (int k = 0; k < kParts; ++k) all += work[k * kHeads * D + i];
      inner[i / D][i % D] = all * scale;
    }
    __syncthreads();

    // Slots: a coordinate's digit of level l weighs 4^l.
    float most = 0;
    for (int i = thread; i < kHeads * slots; i += kPrepareThreads) {
      const unsigned from = source[i % slots];
      work[i] = inner[i / slots][from % 4096U] * static_cast<float>(1U << (2 * (from / 4096U)));
      most = fmaxf(most, fabsf(work[i]));
    }
    most = warp_max(most);
    if (lane == 0) largest[warp] = most;
    __syncthreads();
    most = warp_max(lane < kPrepareThreads / 32 ? largest[lane] : 0.0F);
    // A power of two that brings the largest weight to 2^12: binary16 then holds all that matters without subnormals.
    const int exponent = most > 0.0F && most < 3e38F ? 12 - ilogbf(most) : 0;
    const float unit = ldexpf(1.0F, min(max(exponent, -100), 100));
    // Columns 8 .. 15 of a k-step meet fields that stand two bits higher.
    const auto rounded = [&](int head, int slot) {
      return __float2half_rn(work[head * slots + slot] * unit * (slot % 16 < 8 ? 1.0F : 0.25F));
    };

    float* header = p.headers + static_cast<std::int64_t>(item) * kHeaderFloats;
    if (thread == 0) header[0] = ldexpf(1.0F, 24) / unit;
    for (int head = warp; head < kHeads;
         head += kPrepareThreads / 32) {  // Codes are read from 0: their centre 1.5 times the rounded weights comes off.
      float centre = 0;
      for (int s = lane; s < slots; s += 32) centre += __half2float(rounded(head, s)) * (s % 16 < 8 ? 1.0F : 4.0F);
      centre = warp_sum(centre);
      float logit = 0;
      for (int d = lane; d < D; d += 32) logit += q[head][d] * constant[d];
      logit = warp_sum(logit);
      if (lane == 0) {
        // Codes of `int2` are not centred: lo stands for code 0.
        header[8 + head] = layer.codec == paged::PageCodec::int2 ? 0.0F : -1.5F * centre * 0x1p-24F;
        header[16 + head] = logit * scale;
        header[24 + head] = centre / unit;
      }
    }

    std::uint32_t* coded = p.coded_query + static_cast<std::int64_t>(item) * (p.query_bytes / 4);
    for (int i = thread; i < steps * kLanes; i += kPrepareThreads) {
      const int step = i / kLanes;
      const int head = i % kLanes / 4;
      const int slot = step * 16 + i % 4 * 2;
      const auto pair = [&](int s) {
        const __half2 both = __halves2half2(rounded(head, s), rounded(head, s + 1));
        return *reinterpret_cast<const std::uint32_t*>(&both);
      };
      const int word =
          step / 2 < steps / 2 ? step / 2 * 4 * kLanes + i % kLanes * 4 + step % 2 * 2 : step * 2 * kLanes + i % kLanes * 2;
      *reinterpret_cast<uint2*>(coded + word) = make_uint2(pair(slot), pair(slot + 8));
    }

    std::uint32_t* exact = p.exact_query + static_cast<std::int64_t>(item) * (D / 16 * kLanes * 2);
    for (int i = thread; i < D / 16 * kLanes; i += kPrepareThreads) {
      const int step = i / kLanes;
      const int head = i % kLanes / 4;
      const int d = step * 16 + i % 4 * 2;
      const int word = step / 2 * 4 * kLanes + i % kLanes * 4 + step % 2 * 2;
      *reinterpret_cast<uint2*>(exact + word) =
          make_uint2(pack_half2(q[head][d], q[head][d + 1]), pack_half2(q[head][d + 8], q[head][d + 9]));
    }

    // q . RoPE_t(mean) = sum over pairs of Re(c e^(i theta t)), c = (q1 m1 + q2 m2) - i (q2 m1 - q1 m2).
    // A float4 holds the real and the imaginary parts of two neighbouring pairs of one head, see rope_means.cuh.
    const int places = layer.n_pairs / 16 * 2 * kLanes;
    for (int i = thread; i < places; i += kPrepareThreads) {
      const int pair = i / kLanes * 8 + i % 4 * 2;
      const ushort4 coordinate = *reinterpret_cast<const ushort4*>(layer.pair + 2 * pair);
      const float4 mean = *reinterpret_cast<const float4*>(layer.mean + 2 * (kv * layer.n_pairs + pair));
      const float* row = q[i % kLanes / 4];
      const float a1 = row[coordinate.x];
      const float a2 = row[coordinate.y];
      const float b1 = row[coordinate.z];
      const float b2 = row[coordinate.w];
      p.mean_query[static_cast<std::int64_t>(item) * places + i] =
          make_float4((a1 * mean.x + a2 * mean.y) * scale, (b1 * mean.z + b2 * mean.w) * scale,
                      (a1 * mean.y - a2 * mean.x) * scale, (b1 * mean.w - b2 * mean.z) * scale);
    }
    __syncthreads();
  }
}

}  // namespace oscar::cuda
