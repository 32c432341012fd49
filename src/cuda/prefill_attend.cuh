// The kernel of a prefill. A block has 128 query rows, tokens times query heads of one KV head, and walks over tiles of 64
// positions: coded pages, those of one pattern of signs after the other, then the exact rows. Four warps make tiles of keys,
// four of values (prefill_keys.cuh, prefill_values.cuh), two groups of four consume them, 64 query rows each:
//   S [64, 64] = Q K^T, softmax in registers, O [64, D] += P V; the product with the next keys runs while P is computed.
// Sums of coded values are in the Hadamard basis of their pattern and are turned from one to the next where the pattern
// changes.
#pragma once

#include "cuda/prefill_keys.cuh"
#include "cuda/prefill_values.cuh"
#include "cuda/softmax.cuh"
#include "cuda/warp_reduce.cuh"

namespace oscar::cuda {

// Where a consumer is in a tier.
class CodedTiles {
 public:
  static constexpr bool kCoded = true;
  __device__ CodedTiles(const PrefillParams& p, const PrefillUnit& u)
      : p_(p),
        u_(u),
        walk_(same_in_warp(u.first_page), same_in_warp(u.last_page)),
        settled_first_(same_in_warp(max(first_whole(), u.first_page)) + paged::kPatterns),
        settled_last_(same_in_warp(last_whole())) {}
  [[nodiscard]] __device__ bool done() const { return walk_.done(); }
  [[nodiscard]] __device__ int first() const { return walk_.page() * kPageTokens; }
  // Whether every query reads all of it.
  [[nodiscard]] __device__ bool whole() const { return walk_.page() >= first_whole() && walk_.page() < last_whole(); }
  // Whether besides every query has a maximum, since it read all of the tile before.
  [[nodiscard]] __device__ bool settled() const { return walk_.page() >= settled_first_ && walk_.page() < settled_last_; }
  [[nodiscard]] __device__ Range seen(int position) const { return PrefillUnit::coded_seen(p_, position); }
  [[nodiscard]] __device__ int pattern() const {
    return static_cast<int>(static_cast<unsigned>(walk_.page()) % paged::kPatterns);
  }
  __device__ void next() { walk_.next(); }

 private:
  [[nodiscard]] __device__ int first_whole() const { return (p_.sink + kPageTokens - 1) / kPageTokens; }
  [[nodiscard]] __device__ int last_whole() const { return (u_.oldest - p_.recent + 1) / kPageTokens; }

  const PrefillParams& p_;
  const PrefillUnit& u_;
  PageWalk walk_;
  int settled_first_, settled_last_;
};
class ExactTiles {
 public:
  static constexpr bool kCoded = false;
  __device__ ExactTiles(const PrefillParams& p, const PrefillUnit& u) : p_(p), u_(u), tiles_(same_in_warp(u.exact_tiles)) {}
  [[nodiscard]] __device__ bool done() const { return tile_ >= tiles_; }
  [[nodiscard]] __device__ int first() const { return u_.exact_position(tile_); }
  [[nodiscard]] __device__ bool whole() const { return u_.exact_whole(p_, tile_); }
  [[nodiscard]] __device__ static bool settled() { return false; }
  [[nodiscard]] __device__ Range seen(int position) const { return u_.exact_seen(p_, tile_, position); }
  [[nodiscard]] __device__ int pattern() const { return 0; }
  __device__ void next() { ++tile_; }

 private:
  const PrefillParams& p_;
  const PrefillUnit& u_;
  int tiles_, tile_ = 0;
};

template <int D, int kBlocks, bool kCap>
class TileConsumer {
  using Memory = PrefillMemory<D>;
  // In powers of two: the maximum is followed when a logit exceeds it by so much, so that sums are hardly ever rescaled.
  static constexpr float kSlack = 8.0F;

 public:
  __device__ TileConsumer(const PrefillParams& p, const PrefillUnit& unit, std::uint8_t* memory, std::uint32_t rank)
      : p_(p),
        u_(unit),
        memory_(memory),
        shared_(shared_address(memory)),
        tiles_(shared_ + Memory::tiles(p.layer.slots[unit.kv])),
        queries_(shared_ + Memory::queries(p.layer.slots[unit.kv])),
        rank_(rank),
        stages_(Memory::stages(p.layer.slots[unit.kv], p.shared_bytes)),
        thread_(static_cast<int>(threadIdx.x) % 128),
        lane_(thread_ % 32),
        group_(same_in_warp((static_cast<int>(threadIdx.x) - kMakers) / 128)),
        row_(64 * group_ + thread_ / 32 * 16 + lane_ / 4),
        factor_(kCap ? 1.0F : p.scale * kLog2E) {}

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int i = 0; i < D / 2; ++i) out_[i] = 0;
    attend(CodedTiles(p_, u_));
    attend(ExactTiles(p_, u_));
    store();
  }

 private:
  template <class Tiles>
  __device__ __forceinline__ void attend(Tiles tiles) {
    if (tiles.done()) return;
    load_queries(Tiles::kCoded);
    float s[32];
    start_logits(s);
    group_wait<0>();
    pin(s);
    release_keys<Tiles::kCoded>();
    softmax(s, tiles);
    while (true) {
      rescale();
#pragma unroll
      for (int i = 0; i < 16; ++i) p16_[i] = pack_half2(s[2 * i], s[2 * i + 1]);
      const int pattern = tiles.pattern();
      tiles.next();
      if (tiles.done()) {
        start_output();
        finish_output();
        if (Tiles::kCoded) {
          turn_sums(pattern, -1);
          // Coded logits went without the keys' constant.
          if constexpr (!kCap) {
            max_[0] += shift_[0] * factor_;
            max_[1] += shift_[1] * factor_;
          }
        }
        return;
      }
      start_logits(s);
      start_output();
      group_wait<1>();
      pin(s);
      release_keys<Tiles::kCoded>();
      softmax(s, tiles);
      finish_output();
      if (Tiles::kCoded && tiles.pattern() != pattern) turn_sums(pattern, tiles.pattern());
    }
  }

  // The group's 64 rows; coded: columns in the order of coded keys.
  __device__ __forceinline__ void load_queries(bool coded) {
    const auto* order = reinterpret_cast<const std::uint16_t*>(memory_ + Memory::kOrder);
    const int row = 64 * group_ + thread_ / 2;
    const __half* from = row < u_.rows ? p_.q + u_.row_index(p_, row) * D : nullptr;
    float shift = 0;
#pragma unroll 4
    for (int i = 0; i < D / 16; ++i) {
      const int piece = 2 * i + thread_ % 2;
      uint4 x = make_uint4(0, 0, 0, 0);
      if (from != nullptr && !coded) {
        x = __ldg(reinterpret_cast<const uint4*>(from) + piece);
      } else if (from != nullptr) {
        const auto pair = [&](int k) {
          const int first = order[8 * piece + k];
          const int second = order[8 * piece + k + 1];
          const __half2 both = __halves2half2(__ldg(from + first), __ldg(from + second));
          const float* constant = p_.layer.key_constant + u_.kv * D;
          shift += __low2float(both) * __ldg(constant + first) + __high2float(both) * __ldg(constant + second);
          return *reinterpret_cast<const std::uint32_t*>(&both);
        };
        x = make_uint4(pair(0), pair(2), pair(4), pair(6));
      }
      store_shared_16(queries_ + static_cast<std::uint32_t>(piece / 8) * (kPrefillRows * 128U) + swizzled(row, piece % 8), x);
    }
    if (coded) {
      shift += __shfl_xor_sync(~0U, shift, 1);
      store_shared_float(shared_ + Memory::kRowShift + 4U * static_cast<std::uint32_t>(row), shift);
    }
    publish_stores();
    named_barrier(2 + group_, 128);
    if (coded) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        shift_[r] = load_shared_float(shared_ + Memory::kRowShift + 4U * static_cast<std::uint32_t>(row_ + 8 * r));
    }
  }

  __device__ __forceinline__ void start_logits(float (&s)[32]) {
    barrier_await(shared_ + Memory::kKeyRing + Memory::kFull + keys_.offset(), keys_.parity());
    const std::uint32_t q = further(tile_descriptor(queries_), static_cast<std::uint32_t>(group_) * (64U * 128U));
    const std::uint32_t k = further(tile_descriptor(tiles_), keys_.stage() * Memory::kTile);
    group_begin();
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      group_mma(s, further(q, static_cast<std::uint32_t>(step / 4 * (kPrefillRows * 128) + step % 4 * 32)),
                further(k, static_cast<std::uint32_t>(step / 4 * (kPageTokens * 128) + step % 4 * 32)), step != 0);
    }
    group_commit();
    keys_.next(stages_);
  }
  __device__ __forceinline__ void start_output() {
    barrier_await(shared_ + Memory::kValueRing + Memory::kFull + values_.offset(), values_.parity());
    const std::uint32_t v = further(tile_descriptor(tiles_), values_.stage() * Memory::kTile + Memory::kHalfTile);
    group_begin();
#pragma unroll
    for (int step = 0; step < kPageTokens / 16; ++step)
      group_mma(out_, p16_ + 4 * step, further(v, 32U * static_cast<std::uint32_t>(step)), 1);
    group_commit();
    values_.next(stages_);
  }
  // Of the tile whose logits are there.
  template <bool kCoded>
  __device__ __forceinline__ void release_keys() {
    const std::uint32_t at = Memory::kKeyRing + keys_.last_offset(stages_);
    // In this order: what the own makers see, those of the other block have seen.
    if (kBlocks > 1 && kCoded) barrier_arrive_in(shared_ + at + Memory::kPeerEmpty, rank_ ^ 1U);
    barrier_arrive(shared_ + at + Memory::kEmpty);
  }
  __device__ __forceinline__ void finish_output() {
    group_wait<0>();
    pin(out_);
    barrier_arrive(shared_ + Memory::kValueRing + Memory::kEmpty + values_.last_offset(stages_));
  }

  // s: logits, become probabilities times 2^-max.
  template <class Tiles>
  __device__ __forceinline__ void softmax(float (&s)[32], const Tiles& tiles) {
    if constexpr (kCap) {
      const float inner = 2.0F * kLog2E * p_.scale / p_.soft_cap;
      const float cap = p_.soft_cap * kLog2E;
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] = soft_capped(Tiles::kCoded ? s[i] + shift_[i / 2 % 2] : s[i], inner, cap);
    }
    const bool settled = tiles.settled();
    if (!settled && !tiles.whole()) mask(s, tiles);
    float base[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) base[r] = max_[r] > -INFINITY ? -max_[r] : 0.0F;
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = fmaf(s[i], factor_, base[i / 2 % 2]);
    raised_ = __any_sync(~0U, !settled || !(highest(s) <= kSlack));
    if (raised_) raise_maximum(s);
    float sum[4] = {};  // of row r: r and r + 2
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      s[i] = exp2_fast(s[i]);
      sum[i / 2 % 2 + i % 2 * 2] += s[i];
    }
    sum_[0] += sum[0] + sum[2];
    sum_[1] += sum[1] + sum[3];
  }
  template <class Tiles>
  __device__ __forceinline__ void mask(float (&s)[32], const Tiles& tiles) const {
    const int first = tiles.first() + lane_ % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Range seen = tiles.seen(u_.row_position(row_ + 8 * r, p_.group));
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          // tile_token() of column 8 j + 2 t + b.
          const int position = j < 4 ? first + 8 * (j ^ 1) + 7 - b - lane_ % 4 * 4 : first + 8 * j + b;
          float& x = s[4 * j + 2 * r + b];
          x = position >= seen.low && position <= seen.high ? x : -INFINITY;
        }
      }
    }
  }
  // The largest, where one is positive, or NaN; else some negative number. Positive floats are ordered as their bits are.
  __device__ __forceinline__ static float highest(const float (&s)[32]) {
    int part[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* x = s + 8 * i;
      part[i] = max(__float_as_int(x[0]), __float_as_int(x[1]));
#pragma unroll
      for (int n = 2; n < 8; n += 2) part[i] = __vimax3_s32(part[i], __float_as_int(x[n]), __float_as_int(x[n + 1]));
    }
    return __int_as_float(__vimax3_s32(max(part[0], part[1]), part[2], part[3]));
  }
  // s: distances from the maximum so far, or where there is none from 0; become those from the new one.
  __device__ __forceinline__ void raise_maximum(float (&s)[32]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = -INFINITY;
#pragma unroll
      for (int i = 0; i < 16; ++i) most = fmaxf(most, s[i / 2 * 4 + 2 * r + i % 2]);
      most = quad_max(most);
      const bool first = max_[r] == -INFINITY;
      const float by = first && most > -INFINITY ? most : fmaxf(most, 0.0F);
      shrink_[r] = first ? 1.0F : exp2_fast(-by);
      max_[r] = first ? most : max_[r] + by;
      sum_[r] *= shrink_[r];
#pragma unroll
      for (int i = 0; i < 16; ++i) s[i / 2 * 4 + 2 * r + i % 2] -= by;
    }
  }
  __device__ __forceinline__ void rescale() {
    if (!raised_) return;
#pragma unroll
    for (int i = 0; i < D / 2; ++i) out_[i] *= shrink_[i / 2 % 2];
  }

  // Sums from the basis of a pattern of signs to that of another one, or (-1) the model's.
  __device__ __forceinline__ void turn_sums(int from, int to) {
    const float* signs = p_.layer.value_signs + u_.kv * D + lane_ % 4 * 2;
    const int stride = p_.layer.n_head_kv * D;
    hadamard();
    const float factor =
        to < 0 ? p_.layer.value_unit[u_.kv] * rsqrtf(static_cast<float>(D)) / kValueUnit : 1.0F / static_cast<float>(D);
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      float2 sign = *reinterpret_cast<const float2*>(signs + from * stride + 8 * j);
      if (to >= 0) {
        const float2 other = *reinterpret_cast<const float2*>(signs + to * stride + 8 * j);
        sign = make_float2(sign.x * other.x, sign.y * other.y);
      }
      out_[4 * j] *= factor * sign.x;
      out_[4 * j + 1] *= factor * sign.y;
      out_[4 * j + 2] *= factor * sign.x;
      out_[4 * j + 3] *= factor * sign.y;
    }
    if (to >= 0) hadamard();
  }
  // Dimension 8 j + 2 t + b: bits b and j are within a lane, t across four.
  __device__ __forceinline__ void hadamard() {
    const auto butterfly = [&](int a, int b) {
      const float x = out_[a];
      const float y = out_[b];
      out_[a] = x + y;
      out_[b] = x - y;
    };
#pragma unroll
    for (int i = 0; i < D / 2; i += 2) butterfly(i, i + 1);
#pragma unroll
    for (int d = 4; d < D / 2; d *= 2) {
#pragma unroll
      for (int i = 0; i < D / 2; ++i) {
        if ((i & d) == 0) butterfly(i, i + d);
      }
    }
#pragma unroll
    for (int d = 1; d < 4; d *= 2) {
      const float sign = (lane_ & d) == 0 ? 1.0F : -1.0F;
#pragma unroll
      for (int i = 0; i < D / 2; ++i) out_[i] = fmaf(sign, out_[i], __shfl_xor_sync(~0U, out_[i], d));
    }
  }

  __device__ __forceinline__ void store() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(sum_[r]);
      const int row = row_ + 8 * r;
      if (row >= u_.rows) continue;
      const RowEnd end(p_, u_.query_head(p_, row), max_[r], sum);
      const std::int64_t to = u_.row_index(p_, row);
      auto* out = reinterpret_cast<__half2*>(p_.out + to * D + lane_ % 4 * 2);
#pragma unroll
      for (int j = 0; j < D / 8; ++j)
        out[4 * j] = __floats2half2_rn(out_[4 * j + 2 * r] * end.factor, out_[4 * j + 2 * r + 1] * end.factor);
      if (p_.lse != nullptr && lane_ % 4 == 0) p_.lse[to] = end.lse;
    }
  }

  const PrefillParams& p_;
  const PrefillUnit& u_;
  std::uint8_t* memory_;
  std::uint32_t shared_, tiles_, queries_, rank_;
  int stages_;
  int thread_, lane_, group_, row_;
  float factor_;
  RingPlace keys_, values_;                // of the products that start next
  float max_[2] = {-INFINITY, -INFINITY};  // base-2 logarithm; of all lanes of a row
  float sum_[2] = {0, 0};                  // the lane's own share
  float shrink_[2] = {1, 1};
  float shift_[2] = {0, 0};  // logit of the constant of coded keys
  bool raised_ = false;
  float out_[D / 2];
  std::uint32_t p16_[16];
};

// 128 registers for each thread of a block, shared out by need.
inline constexpr int kKeyRegisters = 144;
inline constexpr int kValueRegisters = 48;
inline constexpr int kConsumerRegisters = 160;

template <int D, int kBlocks, bool kCap>
__global__ void __launch_bounds__(kPrefillThreads, 1) prefill_kernel(const __grid_constant__ PrefillParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Memory = PrefillMemory<D>;
  extern __shared__ __align__(128) std::uint8_t unaligned[];
  std::uint8_t* memory = unaligned + (1024U - shared_address(unaligned) % 1024U) % 1024U;
  const std::uint32_t shared = shared_address(memory);
  std::uint32_t rank = 0;
  if constexpr (kBlocks > 1) rank = same_in_warp(cluster_rank());
  // In shared memory: it would take registers from all warps.
  const PrefillUnit& unit = *reinterpret_cast<const PrefillUnit*>(memory + Memory::kUnit);
  {
    const PrefillUnit found = PrefillUnit::find<kBlocks>(p, static_cast<int>(blockIdx.x) / kBlocks, static_cast<int>(rank));
    if (found.sequence < 0) return;  // of the whole cluster
    if (threadIdx.x == 0) *reinterpret_cast<PrefillUnit*>(memory + Memory::kUnit) = found;
    __syncthreads();
  }

  if (threadIdx.x == 0) {
    for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(kMostTileStages); ++i) {
      for (const std::uint32_t ring : {Memory::kKeyRing, Memory::kValueRing}) {
        barrier_init(shared + ring + Memory::kFull + 8U * i, 1);
        barrier_init(shared + ring + Memory::kEmpty + 8U * i, Memory::kReaders);
      }
      barrier_init(shared + Memory::kKeyRing + Memory::kPeerEmpty + 8U * i, Memory::kReaders);
    }
    for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(kPageStages); ++i) {
      barrier_init(shared + Memory::kPage + 8U * i, 1);
      barrier_init(shared + Memory::kPageEmpty + 8U * i, Memory::kReaders);
    }
    barriers_visible();
  }
  fill_prefill_tables<D>(p, unit, memory, unit.last_page > unit.first_page);
  __syncthreads();
  if constexpr (kBlocks > 1) cluster_sync();
  if (threadIdx.x < 128U) {
    fewer_registers<kValueRegisters>();
    ValueMaker<D>(p, unit, shared).run();
  } else if (threadIdx.x < static_cast<unsigned>(kMakers)) {
    more_registers<kKeyRegisters>();
    KeyMaker<D, kBlocks>(p, unit, shared, rank).run();
  } else {
    more_registers<kConsumerRegisters>();
    TileConsumer<D, kBlocks, kCap>(p, unit, memory, rank).run();
  }
  if constexpr (kBlocks > 1) {
    __syncwarp();
    cluster_sync();  // no block leaves while the other one may still write to it
  }
#else
  __trap();  // built without sm_90a
#endif
}

}  // namespace oscar::cuda
