// Queries into the basis of the codes, in the order in which the tensor cores want them; outputs of sequences without tokens.
// By a kernel of its own before the one that attends, or by blocks of that one, one sequence and virtual KV head after the
// other.
#pragma once

#include "cuda/partial_results.cuh"
#include "cuda/primitives.cuh"
#include "cuda/warp_reduce.cuh"

namespace oscar::cuda {

inline constexpr int kPrepareThreads = 256;

// Outputs of a virtual head without work.
template <int D>
__device__ __forceinline__ void answer_nothing(const DecodeParams& p, int sequence, int kv, int first_row, int rows) {
  for (int i = static_cast<int>(threadIdx.x); i < rows * D; i += kPrepareThreads) {
    const OutputRow to(p, sequence, kv, first_row + i / D);
    p.out[to.index * D + i % D] = __float2half_rn(0.0F);
    if (i % D == 0 && p.lse != nullptr) p.lse[to.index] = Closing(p, to, -INFINITY, 0.0F).lse();
  }
}

// Shared memory of a block, or of the threads of one that prepare. kHeads: 4 or 8, at least the query rows of a virtual head.
template <int D, int kHeads>
struct PrepareMemory {
  static constexpr int kParts = D < kPrepareThreads ? kPrepareThreads / D : 1;  // threads that share a coordinate
  static constexpr int kMaxSlots = 4 * D < kMostSlots ? 4 * D : kMostSlots;
  float q[kHeads][D];
  float inner[kHeads][D];
  float work[kParts * kHeads * D];
  float constant[D];
  std::uint16_t source[kMaxSlots];
  std::uint16_t bytes[kHeads][kMaxSlots];  // upper, lower
  std::uint32_t item;                      // whose turn it is
};

// By kPrepareThreads threads, the first ones of a block; sync(): all of these have come. false: the sequence is empty.
template <int D, int kHeads, class Sync>
__device__ __forceinline__ bool prepare_item(const DecodeParams& p, int item, PrepareMemory<D, kHeads>& memory, Sync&& sync) {
  constexpr int kParts = PrepareMemory<D, kHeads>::kParts;
  static_assert(D <= kPrepareThreads);
  constexpr int kRows = D / kParts;  // of the matrix, of one thread's column
  constexpr int kAtOnce = kRows < 32 ? kRows : 32;
  constexpr int kPieces = kRows / kAtOnce;
  constexpr int kLanes = 4 * kHeads;
  auto& [q, inner, work, constant, source, bytes, unused] = memory;
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
    const float* from = matrix + piece * kAtOnce * D;
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
  if (sequence_cost(p, sequence) == 0) {
    answer_nothing<D>(p, sequence, kv, first_head, heads);
    sync();
    return false;
  }
  for (int i = thread; i < kHeads * D; i += kPrepareThreads) q[i / D][i % D] = i / D < heads ? value(i / D, i % D) : 0.0F;
  for (int i = thread; i < D; i += kPrepareThreads) constant[i] = layer.key_constant[kv * D + i];
  for (int i = thread; i < slots; i += kPrepareThreads) source[i] = layer.slot_source[kv * layer.max_slots + i];
  sync();

  float sum[kHeads] = {};
#pragma unroll 1
  for (int piece = 0; piece < kPieces; ++piece) {  // inner = q * query, steps included
    const int first = part * kRows + piece * kAtOnce;
#pragma unroll
    for (int d = 0; d < kAtOnce; ++d) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) sum[h] = fmaf(q[h][first + d], m[d], sum[h]);
    }
    if (piece + 1 < kPieces) load(piece + 1);
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) work[(part * kHeads + h) * D + thread % D] = sum[h];
  sync();
  const float scale = p.scale * kLog2E;  // logits come out in the base-2 logarithm
  for (int i = thread; i < kHeads * D; i += kPrepareThreads) {
    float all = 0;
#pragma unroll
    for (int k = 0; k < kParts; ++k) all += work[k * kHeads * D + i];
    inner[i / D][i % D] = all * scale;
  }
  sync();

  // Slots: a coordinate's digit of level l weighs 4^l. Per head, in a unit that keeps all sums in their range.
  const int base = query_base(slots, layer.codec);
  float* header = p.headers + static_cast<std::int64_t>(item) * kHeaderFloats;
  std::uint32_t* coded = p.coded_query + static_cast<std::int64_t>(item) * (p.query_bytes / 4);
  for (int head = warp; head < kHeads; head += kPrepareThreads / 32) {
    const auto weight = [&](int slot) {
      const unsigned from = source[slot];
      return inner[head][from % 4096U] * static_cast<float>(1U << (2 * (from / 4096U)));
    };
    float most = 0;
    float all = 0;
    for (int s = lane; s < slots; s += 32) {
      most = fmaxf(most, fabsf(weight(s)));
      all += fabsf(weight(s));
    }
    most = warp_max(most);
    all = warp_sum(all);
    const auto floats = [](int n) { return static_cast<float>(n); };
    const int exponent = min(ilogbf(floats(127 * base) / most),
                             ilogbf(floats(kMostSum / largest_code(layer.codec) - slots) * floats(base) / all));
    const float unit = ldexpf(1.0F, -min(max(exponent, -100), 100));
    const bool is_sound = most > 0.0F && all < 3e38F;
    int upper_sum = 0;
    int lower_sum = 0;
    for (int s = lane; s < slots; s += 32) {
      const int code = is_sound ? static_cast<int>(rintf(weight(s) * (1.0F / unit))) : 0;
      const int lower = ((code + base / 2) & (base - 1)) - base / 2;
      const int upper = (code - lower) / base;
      bytes[head][s] = static_cast<std::uint16_t>((upper & 0xFF) << 8 | (lower & 0xFF));
      upper_sum += upper;
      lower_sum += lower;
    }
    upper_sum = static_cast<int>(__reduce_add_sync(~0U, static_cast<unsigned>(upper_sum)));
    lower_sum = static_cast<int>(__reduce_add_sync(~0U, static_cast<unsigned>(lower_sum)));
    float logit = 0;
    for (int d = lane; d < D; d += 32) logit += q[head][d] * constant[d];
    logit = warp_sum(logit);
    if (lane == 0) {
      // A query that is not finite gives no finite logit.
      header[head] = all < 3e38F ? unit : NAN;
      header[8 + head] = logit * scale;
      header[16 + head] = static_cast<float>(upper_sum * base + lower_sum) * unit;
    }
    if (lane < 4) {
      // Codes of `spectral` are read from 0: their centre 1.5 comes off, where it is no integer, of the upper bytes, from the
      // lower ones. Those of `int2` are not centred: lo stands for code 0.
      const int threes = layer.codec == paged::PageCodec::int2 ? 0 : 3 << (2 * lane);
      const int upper_centre = -(threes * upper_sum);
      const int lower_centre = -(threes * lower_sum) + (upper_centre & 1) * base;
      const std::uint32_t upper = kSumZeroBits + static_cast<std::uint32_t>(upper_centre >> 1);
      const std::uint32_t lower = kSumZeroBits + static_cast<std::uint32_t>(lower_centre >> 1);
      reinterpret_cast<uint2*>(coded)[lane * kHeads + head] = make_uint2(upper, lower);
    }
  }
  sync();

  constexpr int kBlocks = kHeads / 4;
  std::uint32_t* fragments = coded + coded_query_bytes(0, kBlocks) / 4;
  for (int i = thread; i < steps * 32 * kBlocks; i += kPrepareThreads) {
    // Word of lane i mod 32: column 2 h + part of block `block`, four slots of k-step `step`.
    const int step = i / (32 * kBlocks);
    const int block = i / 32 % kBlocks;
    const std::uint16_t* from = bytes[4 * block + i % 32 / 8] + 16 * step + i % 4 * 4;
    const int part = i % 8 / 4 == 0 ? 8 : 0;
    std::uint32_t word = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) word |= (static_cast<std::uint32_t>(from[b]) >> part & 0xFFU) << (8 * b);
    const bool paired = step / 2 < steps / 2;
    const int at =
        paired ? (step / 2 * kBlocks + block) * 64 + i % 32 * 2 + step % 2 : step * 32 * kBlocks + block * 32 + i % 32;
    fragments[at] = word;
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
  sync();
  return true;
}

// Queries are prepared by the blocks that attend, each taking the next virtual head that nobody has taken yet: whoever waits
// for one, waits for a block that runs, however few do. The counter ends as high as there are heads and blocks, and whoever
// brings it there sets it back.
__device__ __forceinline__ std::uint32_t claim(const DecodeParams& p) { return atomicAdd(p.claimed, 1U); }

// By kPrepareThreads threads; memory.item: the first claim.
template <int D, int kHeads>
__device__ __forceinline__ void prepare_inside(const DecodeParams& p, PrepareMemory<D, kHeads>& memory) {
  const auto items = static_cast<std::uint32_t>(p.batch * p.heads);
  std::uint32_t item = 0;
  for (;;) {
    wait_for_threads(kPrepareThreads);
    item = memory.item;
    if (item >= items) break;
    const bool prepared = prepare_item<D, kHeads>(p, static_cast<int>(item), memory, [] { wait_for_threads(kPrepareThreads); });
    if (threadIdx.x == 0) {
      if (prepared) store_release(p.ready + item, 1U);
      memory.item = claim(p);
    }
  }
  if (threadIdx.x == 0 && item == items + gridDim.x - 1) *p.claimed = 0;
}

template <int D, int kHeads>
__global__ void __launch_bounds__(kPrepareThreads, 4) prepare_kernel(const __grid_constant__ DecodeParams p) {
  let_successor_start();
  __shared__ PrepareMemory<D, kHeads> memory;
  for (int item = static_cast<int>(blockIdx.x); item < p.batch * p.heads; item += static_cast<int>(gridDim.x))
    prepare_item<D, kHeads>(p, item, memory, [] { __syncthreads(); });
}

}  // namespace oscar::cuda
