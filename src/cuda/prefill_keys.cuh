// The four warps of a prefill that make tiles of keys, [64, D] binary16, from pages or from exact rows.
//
// Keys of a page come back to the model's basis by a matrix product, k = gain (digits - 1.5) B + mean(position): all other
// sides of the attention are then as for plain keys, and what it costs is shared by all query rows of the block, or of the
// cluster, whose blocks take turns with the pages. Columns of coded keys are ordered such that the coordinates that RoPE turns
// together are neighbours. The mean of token t of 16 is w e^(i theta t): w once per page and pair, the rest is a table. What is
// added to all coded keys is the consumers' affair: it is one number per query row.
#pragma once

#include "cuda/prefill_memory.cuh"
#include "cuda/rope_means.cuh"

namespace oscar::cuda {

// Where a slot stands in the summed index: of 16 slots, those of bytes 0 and 2 of word c are columns 2 c and 2 c + 1 of a step,
// those of bytes 1 and 3 columns 2 c + 8 and 2 c + 9.
__device__ __forceinline__ int basis_index(int slot) {
  return slot / 16 * 16 + slot % 2 * 8 + slot % 16 / 4 * 2 + slot % 4 / 2;
}

// Where a float2 of pair 4 j + t is: of a token of 16, or (token 0) of the pairs' means alone. Pairs of j and j + 1, j even,
// are neighbours; their place is that of j = 0 with bits of j xored in. A warp reads without bank conflicts.
template <int D>
__device__ __forceinline__ std::uint32_t mean_place(int token, int t) {
  const int flip = D == 64 ? t / 2 | token % 2 * 2 : t | token % 2 * 4;
  return static_cast<std::uint32_t>(token * (4 * D) + t * D + flip * 16);
}
__device__ __forceinline__ std::uint32_t mean_place(std::uint32_t first, int j) {
  return (first ^ static_cast<std::uint32_t>(j / 2 * 16)) + static_cast<std::uint32_t>(j % 2 * 8);
}

// By all threads of a block, before anything else: order of the columns, basis of the codes, gains.
template <int D>
__device__ __forceinline__ void fill_prefill_tables(const PrefillParams& p, const PrefillUnit& unit, std::uint8_t* shared,
                                                    bool coded) {
  using Memory = PrefillMemory<D>;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  const LayerView& layer = p.layer;
  const int slots = layer.slots[unit.kv];
  auto* order = reinterpret_cast<std::uint16_t*>(shared + Memory::kOrder);
  auto* work = reinterpret_cast<std::uint32_t*>(shared + Memory::kWork);
  auto* key_gains = reinterpret_cast<float*>(shared + Memory::kKeyGains);
  auto* value_gains = reinterpret_cast<float*>(shared + Memory::kValueGains);
  for (int n = thread; n < 256; n += kPrefillThreads)
    key_gains[n] = n == 0 ? 0.0F : exp2_fast(static_cast<float>(n - 128) / 16.0F);
  for (int n = thread; n < paged::kValueGains; n += kPrefillThreads)
    value_gains[n] = n == 0 ? 0.0F : exp2_fast(static_cast<float>(n - 40) / 8.0F);

  // Columns 2 i and 2 i + 1: the coordinates of pair i; then those of no pair. What pads the pairs has two equal coordinates.
  if (thread < 16) work[thread] = 0;
  __syncthreads();
  int pairs = 0;
  for (int i = thread; i < layer.n_pairs; i += kPrefillThreads) {
    const int first = layer.pair[2 * i];
    const int second = layer.pair[2 * i + 1];
    if (first == second) continue;
    order[2 * i] = static_cast<std::uint16_t>(first);
    order[2 * i + 1] = static_cast<std::uint16_t>(second);
    atomicOr(work + first / 32, 1U << (first % 32));
    atomicOr(work + second / 32, 1U << (second % 32));
    ++pairs;
  }
  if (pairs != 0) atomicAdd(work + 8, static_cast<std::uint32_t>(pairs));
  __syncthreads();
  if (thread < D && (work[thread / 32] >> (thread % 32) & 1U) == 0) {
    int before = __popc(~work[thread / 32] & ((1U << (thread % 32)) - 1U));
    for (int w = 0; w < thread / 32; ++w) before += __popc(~work[w]);
    order[2 * static_cast<int>(work[8]) + before] = static_cast<std::uint16_t>(thread);
  }
  for (int i = thread; i < 16 * (D / 2); i += kPrefillThreads) {
    const int token = i / (D / 2);
    const int pair = i % (D / 2);
    const float2 turn = pair < layer.n_pairs ? turn_by(layer.turns[pair] * token) : make_float2(0.0F, 0.0F);
    *reinterpret_cast<float2*>(shared + mean_place(Memory::kTurns + mean_place<D>(token, pair % 4), pair / 4)) = turn;
  }
  __syncthreads();
  if (!coded) return;

  // A power of two that brings the largest entry of the basis to 2^12.
  const float* query = layer.query + static_cast<std::int64_t>(unit.kv) * D * D;
  const std::uint16_t* source = layer.slot_source + unit.kv * layer.max_slots;
  const auto weight = [&](int column, int slot) {
    const unsigned from = source[slot];
    return query[order[column] * D + static_cast<int>(from % 4096U)] * static_cast<float>(1U << (2 * (from / 4096U)));
  };
  float most = 0;
#pragma unroll 8
  for (int i = thread; i < D * slots; i += kPrefillThreads) most = fmaxf(most, fabsf(weight(i / slots, i % slots)));
#pragma unroll
  for (int d = 16; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(~0U, most, d));
  if (lane == 0) work[16 + warp] = __float_as_uint(most);
  __syncthreads();
  most = 0;
  for (int w = 0; w < kPrefillThreads / 32; ++w) most = fmaxf(most, __uint_as_float(work[16 + w]));
  const int exponent = most > 0.0F && most < 3e38F ? 12 - ilogbf(most) : 0;
  const float factor = ldexpf(1.0F, min(max(exponent, -100), 100));
  if (thread == 0) *reinterpret_cast<float*>(shared + Memory::kScalars) = ldexpf(1.0F, 24) / factor;

  const auto entry = [&](int column, int index) {
    return reinterpret_cast<__half*>(shared + Memory::basis(slots) + index / 64 * (D * 128) + swizzled(column, index % 64 / 8) +
                                     index % 8 * 2);
  };
#pragma unroll 8
  for (int i = thread; i < D * slots; i += kPrefillThreads) {
    const int column = i / slots;
    const int slot = i % slots;
    *entry(column, basis_index(slot)) = __float2half_rn(weight(column, slot) * factor);
  }
  for (int i = thread; slots == 0 && i < D * 16; i += kPrefillThreads) *entry(i / 16, i % 16) = __float2half_rn(0.0F);
  publish_stores();
}

template <int D, int kBlocks>
class KeyMaker {
  using Memory = PrefillMemory<D>;
  static constexpr int kStep = paged::kPatterns * kBlocks;  // from a page of this block to the next one of the same pattern
  static constexpr int kLanePairs = D / 64;

 public:
  // rank: of the block in its cluster.
  __device__ KeyMaker(const PrefillParams& p, const PrefillUnit& unit, std::uint32_t shared, std::uint32_t rank)
      : p_(p),
        u_(unit),
        shared_(shared),
        rank_(rank),
        thread_(static_cast<int>(threadIdx.x) % 128),
        lane_(thread_ % 32),
        warp_(same_in_warp(thread_ / 32)),
        slots_(same_in_warp<int>(p.layer.slots[unit.kv])),
        stages_(Memory::stages(slots_, p.shared_bytes)) {}

  __device__ __forceinline__ void run() {
    RingPlace page;
    std::uint32_t owner = 0;  // of the page
    for (PageWalk walk(same_in_warp(u_.first_page), same_in_warp(u_.last_page)); !walk.done(); walk.next()) {
      barrier_await(shared_ + Memory::kPage + page.offset(), page.parity());
      if (kBlocks == 1 || owner == rank_) {
        make(walk.page(), page);
      } else {
        expect(page);
      }
      __syncwarp();  // matrix products want all lanes, and the first one may have waited
      page.next(kPageStages);
      tile_.next(stages_);
      owner = (owner + 1U) % kBlocks;
    }
    if constexpr (kBlocks > 1) {  // copies to the other blocks have left their tiles
      for (int stage = 0; stage < stages_; ++stage) {
        const std::uint32_t uses = tile_.uses(stage);
        if (uses > 0)
          barrier_await(shared_ + Memory::kKeyRing + Memory::kPeerEmpty + 8U * static_cast<std::uint32_t>(stage),
                        (uses - 1U) & 1U);
      }
    }
    const int exact_tiles = same_in_warp(u_.exact_tiles);
    for (int i = 0; i < exact_tiles; ++i, tile_.next(stages_)) make_exact(i);
  }

 private:
  // Where keys go.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t keys() const {
    return shared_ + Memory::tiles(slots_) + tile_.stage() * Memory::kTile;
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t barrier(std::uint32_t kind) const {
    return shared_ + Memory::kKeyRing + kind + tile_.offset();
  }
  __device__ __forceinline__ void wait_empty(std::uint32_t kind) const { tile_.wait_empty(shared_ + Memory::kKeyRing + kind); }

  // A coded page that this block makes, for all blocks of the cluster.
  __device__ __forceinline__ void make(int number, const RingPlace& page) {
    if (number != mean_page_ + kStep) start_means(number - kStep);
    mean_page_ = number;
    float gain[2];
    float k[D / 2];
    start_product(page, k, gain);
    make_means();
    wait_empty(Memory::kEmpty);
    if (kBlocks > 1) wait_empty(Memory::kPeerEmpty);
    group_wait<0>();
    pin(k);
    finish(k, gain);
    publish_stores();
    meet();
    if (thread_ == 0) {
#pragma unroll
      for (std::uint32_t i = 1; i < kBlocks; ++i) {
        const std::uint32_t other = (rank_ + i) % kBlocks;
        copy_to_block(address_in(keys(), other), keys(), Memory::kHalfTile, address_in(barrier(Memory::kFull), other));
      }
      barrier_arrive(barrier(Memory::kFull));
    }
  }
  // One that another block makes.
  __device__ __forceinline__ void expect(const RingPlace& page) {
    release_page(page);
    if (thread_ != 0) return;
    wait_empty(Memory::kEmpty);
    barrier_expect(barrier(Memory::kFull), Memory::kHalfTile);
  }
  // Exact rows: two threads per row; zeros where no query of the block reads.
  __device__ __forceinline__ void make_exact(int number) {
    wait_empty(Memory::kEmpty);
    const int n = thread_ / 2;
    int flip = 0;
    const uint4* row = exact_row<D>(p_, u_, number, tile_token(n), false, flip);
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      const int piece = 2 * i + thread_ % 2;
      const uint4 x = row != nullptr ? __ldg(row + (piece ^ flip)) : make_uint4(0, 0, 0, 0);
      store_shared_16(keys() + static_cast<std::uint32_t>(piece / 8) * (kPageTokens * 128U) + swizzled(n, piece % 8), x);
    }
    publish_stores();
    meet();
    if (thread_ == 0) barrier_arrive(barrier(Memory::kFull));
  }
  __device__ __forceinline__ static void meet() { named_barrier(1, 128); }
  __device__ __forceinline__ void release_page(const RingPlace& page) const {
    barrier_arrive(shared_ + Memory::kPageEmpty + page.offset());
  }

  // Starts k = (2 digits - 3) 4^warp B, tokens as rows: a page's field, that of the warp's group of tokens, is an A fragment as
  // it stands in its byte. gain: of the lane's two rows, times what takes k to keys. The page may be overwritten after it.
  __device__ __forceinline__ void start_product(const RingPlace& place, float (&k)[D / 2], float (&gain)[2]) {
    const std::uint32_t page = shared_ + Memory::kPages + place.stage() * Memory::page_stage(slots_);
    const std::uint32_t gain_bytes = page + paged::key_bytes(slots_) + paged::value_bytes(D);
    const float unit =
        load_shared_float(shared_ + Memory::kScalars) * __uint_as_float((126U - 2U * static_cast<std::uint32_t>(warp_)) << 23);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::uint32_t word = load_shared_4(gain_bytes + 4U * static_cast<std::uint32_t>(lane_ / 4 + 8 * r));
      gain[r] = unit * load_shared_float(shared_ + Memory::kKeyGains + 4U * (word >> (8 * warp_) & 0xFFU));
    }
    const std::uint32_t basis = tile_descriptor(shared_ + Memory::basis(slots_));
    const auto step_basis = [&](int step) {
      return further(basis, static_cast<std::uint32_t>(step / 4 * (D * 128) + step % 4 * 32));
    };
    // Two steps at a time, the operands of the next two are made while they run.
    const int pairs = slots_ / 32;
#pragma unroll 1
    for (int i = 0; i < pairs; i += 2) {
      std::uint32_t a[2][2][4];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if (i + b >= pairs) break;
        if (i > 0) group_wait<1>();
        const uint4 four =
            load_shared_16(page + 16U * static_cast<std::uint32_t>(lane_) + 512U * static_cast<std::uint32_t>(i + b));
        fields(four.x, four.y, a[b][0]);
        fields(four.z, four.w, a[b][1]);
        group_begin();
        group_mma(k, a[b][0], step_basis(2 * (i + b)), i + b != 0);
        group_mma(k, a[b][1], step_basis(2 * (i + b) + 1), 1);
        group_commit();
      }
    }
    if (slots_ % 32 != 0 || slots_ == 0) {  // without slots: any digits times zeros
      group_wait<0>();
      std::uint32_t a[4];
      const uint2 two = load_shared_8(page + 8U * static_cast<std::uint32_t>(lane_) + 512U * static_cast<std::uint32_t>(pairs));
      fields(two.x, two.y, a);
      group_begin();
      group_mma(k, a, step_basis(2 * pairs), pairs != 0);
      group_commit();
    }
    release_page(place);
  }
  // Of the words of rows 0 .. 7 and 8 .. 15: subnormals (2 digit - 3) 4^warp 2^-24.
  __device__ __forceinline__ void fields(std::uint32_t first, std::uint32_t second, std::uint32_t* a) const {
    const std::uint32_t mask = 0x00030003U << (2 * warp_);
    const std::uint32_t centre = 0x80008000U | mask;
    const auto centred = [&](std::uint32_t bits) {
      bits &= mask;
      const __half2 x =
          __hfma2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(2.0F), *reinterpret_cast<const __half2*>(&centre));
      return *reinterpret_cast<const std::uint32_t*>(&x);
    };
    a[0] = centred(first);
    a[1] = centred(second);
    a[2] = centred(first >> 8);
    a[3] = centred(second >> 8);
  }

  // w of the warp's 16 tokens of the next page; a lane has pairs lane, lane + 32, ...
  __device__ __forceinline__ void make_means() {
#pragma unroll
    for (int i = 0; i < kLanePairs; ++i) {
      w_[i] = times(w_[i], turn_[i]);
      const std::uint32_t to = mean_place(means() + mean_place<D>(0, lane_ % 4), lane_ / 4 + 8 * i);
      store_shared_float(to, w_[i].x);
      store_shared_float(to + 4U, w_[i].y);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void start_means(int page) {
#pragma unroll
    for (int i = 0; i < kLanePairs; ++i) {
      const int pair = lane_ + 32 * i;
      w_[i] = make_float2(0.0F, 0.0F);
      turn_[i] = w_[i];
      if (pair >= p_.layer.n_pairs) continue;
      const double turns = p_.layer.turns[pair];
      const float2 c = *reinterpret_cast<const float2*>(p_.layer.mean + 2 * (u_.kv * p_.layer.n_pairs + pair));
      w_[i] = times(c, turn_by(turns * (page * kPageTokens + 16 * warp_)));
      turn_[i] = turn_by(turns * (kStep * kPageTokens));
    }
  }
  __device__ __forceinline__ static float2 times(float2 a, float2 b) {
    return make_float2(a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x);
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t means() const {
    return shared_ + Memory::kMeans + static_cast<std::uint32_t>(warp_ * (4 * D));
  }

  // Gains and means; into the tile.
  __device__ __forceinline__ void finish(float (&k)[D / 2], const float (&gain)[2]) {
    const int t = lane_ % 4;
    const int token = tile_token(16 * warp_ + lane_ / 4) % 16;  // of row 0; that of row 1 is 8 further, or before
    // Once for all pages these would take registers.
    const std::uint32_t pair_means = computed_anew(means() + mean_place<D>(0, t));
    const std::uint32_t turns = computed_anew(shared_ + Memory::kTurns + mean_place<D>(token, t));
    const std::uint32_t other_turns = computed_anew(turns + static_cast<std::uint32_t>((token < 8 ? 8 : -8) * (4 * D)));
    const std::uint32_t to = computed_anew(keys() + swizzled(16 * warp_ + lane_ % 16, lane_ / 16));
    float4 w[2], e[2][2];
    const auto load = [&](int j) {
      w[j / 2 % 2] = load_shared_float4(mean_place(pair_means, j));
      e[j / 2 % 2][0] = load_shared_float4(mean_place(turns, j));
      e[j / 2 % 2][1] = load_shared_float4(mean_place(other_turns, j));
    };
    load(0);
#pragma unroll
    for (int j = 0; j < D / 8; j += 2) {
      if (j + 2 < D / 8) load(j + 2);
      const float4& a = w[j / 2 % 2];
      std::uint32_t out[4];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float4& b = e[j / 2 % 2][r];
        const float* x = k + 4 * j + 2 * r;
        out[r] = pack_half2(fmaf(gain[r], x[0], a.x * b.x - a.y * b.y), fmaf(gain[r], x[1], a.x * b.y + a.y * b.x));
        out[2 + r] = pack_half2(fmaf(gain[r], x[4], a.z * b.z - a.w * b.w), fmaf(gain[r], x[5], a.z * b.w + a.w * b.z));
      }
      // Matrices: (j, rows 0 .. 7), (j, rows 8 .. 15), (j + 1, ...).
      store_matrix((to ^ static_cast<std::uint32_t>(j % 8 * 16)) + static_cast<std::uint32_t>(j / 8) * (kPageTokens * 128U),
                   out[0], out[1], out[2], out[3]);
    }
  }

  const PrefillParams& p_;
  const PrefillUnit& u_;
  std::uint32_t shared_, rank_;
  int thread_, lane_, warp_, slots_, stages_;
  RingPlace tile_;
  int mean_page_ = -1 - kStep;  // what w_ is of
  float2 w_[kLanePairs], turn_[kLanePairs];
};

}  // namespace oscar::cuda
