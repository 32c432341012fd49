// The four warps of a prefill that make tiles of keys, [64, D] binary16, from pages or from exact rows.
//
// Keys of a page come back to the model's basis by a matrix product, k = gain (digits - 1.5) B + mean(position): all other
// sides of the attention are then as for plain keys, and what it costs is shared by all query rows of the block, or of the
// cluster, whose blocks take turns with the pages. Columns of coded keys are ordered such that the coordinates that RoPE turns
// together are neighbours: a lane turns its own means from page to page. What is added to all coded keys is the consumers'
// affair: it is one number per query row.
#pragma once

#include "cuda/prefill_memory.cuh"
#include "cuda/rope_means.cuh"

namespace oscar::cuda {

// Where a slot stands in the summed index: of 16 slots, those of bytes 0 and 2 of word c are columns 2 c and 2 c + 1 of a step,
// those of bytes 1 and 3 columns 2 c + 8 and 2 c + 9.
__device__ __forceinline__ int basis_index(int slot) {
  return slot / 16 * 16 + slot % 2 * 8 + slot % 16 / 4 * 2 + slot % 4 / 2;
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
  __syncthreads();
  // Of columns 2 i, 2 i + 1, for two rows: what the centre 1.5 of all codes adds to the product.
  auto* columns = reinterpret_cast<float*>(shared + Memory::kColumns);
  for (int column = warp; column < D; column += kPrefillThreads / 32) {
    float sum = 0;
    for (int index = lane; index < slots; index += 32) sum += __half2float(*entry(column, index));
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0U, sum, d);
    if (lane < 2) columns[column / 2 * 4 + lane * 2 + column % 2] = -1.5F * 0x1p-24F * sum;
  }
  publish_stores();
}

template <int D, int kBlocks>
class KeyMaker {
  using Memory = PrefillMemory<D>;
  static constexpr int kColumnTiles = D / 8;
  static constexpr int kStep = paged::kPatterns * kBlocks;  // from a page of this block to the next one of the same pattern

 public:
  __device__ KeyMaker(const PrefillParams& p, const PrefillUnit& unit, std::uint32_t shared, std::uint32_t rank)
      : p_(p),
        u_(unit),
        shared_(shared),
        rank_(rank),
        thread_(static_cast<int>(threadIdx.x) % 128),
        lane_(thread_ % 32),
        warp_(same_in_warp(thread_ / 32)),
        slots_(same_in_warp<int>(p.layer.slots[unit.kv])),
        ring_(shared, Memory::tiles(slots_), Memory::stages(slots_, p.shared_bytes)) {}

  __device__ __forceinline__ void run() {
    coded();
    exact();
  }

 private:
  __device__ __forceinline__ void coded() {
    PageRing pages;
    std::uint32_t owner = 0;  // of the page
    for (PageWalk walk(same_in_warp(u_.first_page), same_in_warp(u_.last_page)); !walk.done(); walk.next()) {
      const std::uint32_t full = ring_.barrier(Memory::kFull);
      barrier_await(shared_ + Memory::kPage + pages.offset(), pages.parity());
      if (kBlocks == 1 || owner == rank_) {
        const std::uint32_t page =
            shared_ + Memory::kPages + static_cast<std::uint32_t>(pages.stage()) * Memory::page_stage(slots_);
        float gain[2];
        float k[D / 2];
        turn_to(walk.page() - kStep);
        product(page, k, gain);
        release_page(pages);
        ring_.wait_empty();
        if (kBlocks > 1 && ring_.round() > 0) barrier_await(ring_.barrier(Memory::kPeerEmpty), (ring_.round() - 1U) & 1U);
        turn();
        mean_page_ += kStep;
        finish(k, gain);
        publish_stores();
        named_barrier(1, 128);
        if (thread_ == 0) {
#pragma unroll
          for (std::uint32_t i = 1; i < kBlocks; ++i) {
            const std::uint32_t other = (rank_ + i) % kBlocks;
            copy_to_block(address_in(ring_.tile(), other), ring_.tile(), Memory::kHalfTile, address_in(full, other));
          }
          barrier_arrive(full);
        }
      } else {
        release_page(pages);
        if (thread_ == 0) {
          ring_.wait_empty();
          barrier_expect(full, Memory::kHalfTile);
        }
      }
      __syncwarp();  // matrix products want all lanes, and the first one may have waited
      pages.next();
      ring_.next();
      owner = (owner + 1U) % kBlocks;
    }
    if constexpr (kBlocks > 1) {  // copies to the other blocks have left their tiles
      for (int stage = 0; stage < ring_.stages(); ++stage) {
        const std::uint32_t uses = ring_.uses(stage);
        if (uses > 0) barrier_await(shared_ + Memory::kPeerEmpty + 8U * static_cast<std::uint32_t>(stage), (uses - 1U) & 1U);
      }
    }
  }
  __device__ __forceinline__ void release_page(const PageRing& pages) {
    __syncwarp();
    if (lane_ == 0) barrier_arrive(shared_ + Memory::kPageEmpty + pages.offset());
  }

  // k = digits B - centre, tokens as rows: a page's field, that of the warp's group of tokens, is an A fragment once it is at
  // the lowest bits of its byte. gain: of the lane's two rows.
  __device__ __forceinline__ void product(std::uint32_t page, float (&k)[D / 2], float (&gain)[2]) {
    const std::uint32_t basis = tile_descriptor(shared_ + Memory::basis(slots_));
    const int steps = slots_ / 16;
    const int shift = 2 * warp_;
    // Of the words of rows 0 .. 7 and 8 .. 15.
    const auto fields = [&](std::uint32_t first, std::uint32_t second, std::uint32_t* a) {
      first >>= shift;
      second >>= shift;
      a[0] = first & 0x00030003U;
      a[1] = second & 0x00030003U;
      a[2] = first >> 8 & 0x00030003U;
      a[3] = second >> 8 & 0x00030003U;
    };
    const auto step_basis = [&](int step) {
      return further(basis, static_cast<std::uint32_t>(step / 4 * (D * 128) + step % 4 * 32));
    };
    const std::uint32_t gain_bytes = page + paged::key_bytes(slots_) + paged::value_bytes(D);
    std::uint32_t gains[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) gains[r] = load_shared_4(gain_bytes + 4U * static_cast<std::uint32_t>(lane_ / 4 + 8 * r));
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      const float4 centre =
          load_shared_float4(shared_ + Memory::kColumns + 16U * static_cast<std::uint32_t>(4 * j + lane_ % 4));
      k[4 * j] = centre.x;
      k[4 * j + 1] = centre.y;
      k[4 * j + 2] = centre.z;
      k[4 * j + 3] = centre.w;
    }
    pin(k);
    int step = 0;
    const std::uint32_t words = page + 16U * static_cast<std::uint32_t>(lane_);
#pragma unroll 1
    for (; step + 4 <= steps; step += 4) {
      std::uint32_t a[4][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 four = load_shared_16(words + 512U * static_cast<std::uint32_t>(step / 2 + half));
        fields(four.x, four.y, a[2 * half]);
        fields(four.z, four.w, a[2 * half + 1]);
      }
      group_begin();
#pragma unroll
      for (int i = 0; i < 4; ++i) group_mma(k, a[i], step_basis(step + i), 1);
      group_commit();
      group_wait<0>();
    }
#pragma unroll 1
    for (; step < steps; ++step) {
      std::uint32_t a[4];
      const bool paired = step / 2 < steps / 2;
      const std::uint32_t at =
          page + (paired ? 512U * static_cast<std::uint32_t>(step / 2) + 8U * static_cast<std::uint32_t>(step % 2) +
                               16U * static_cast<std::uint32_t>(lane_)
                         : 256U * static_cast<std::uint32_t>(step) + 8U * static_cast<std::uint32_t>(lane_));
      const uint2 two = load_shared_8(at);
      fields(two.x, two.y, a);
      group_begin();
      group_mma(k, a, step_basis(step), 1);
      group_commit();
      group_wait<0>();
    }
    pin(k);
    const float unit = load_shared_float(shared_ + Memory::kScalars);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::uint32_t byte = gains[r] >> (8 * warp_) & 0xFFU;
      gain[r] = unit * load_shared_float(shared_ + Memory::kKeyGains + 4U * byte);
    }
  }

  // Gains and means; into the tile.
  __device__ __forceinline__ void finish(float (&k)[D / 2], const float (&gain)[2]) {
    const int row = 16 * warp_ + lane_ % 16;
    const std::uint32_t to = ring_.tile() + static_cast<std::uint32_t>(row) * 128U;
    const auto flip = static_cast<std::uint32_t>((lane_ / 16 ^ row & 7) * 16);
#pragma unroll
    for (int j = 0; j < kColumnTiles; j += 2) {
      std::uint32_t out[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float* x = k + 4 * (j + i);
        const float2* m = mean_ + 2 * (j + i);
        out[2 * i] = pack_half2(fmaf(gain[0], x[0], m[0].x), fmaf(gain[0], x[1], m[0].y));
        out[2 * i + 1] = pack_half2(fmaf(gain[1], x[2], m[1].x), fmaf(gain[1], x[3], m[1].y));
      }
      // Matrices: (j, rows 0 .. 7), (j, rows 8 .. 15), (j + 1, ...).
      store_matrix(
          to + static_cast<std::uint32_t>(j / 8) * (kPageTokens * 128U) + (flip ^ static_cast<std::uint32_t>(j % 8 * 16)),
          out[0], out[1], out[2], out[3]);
    }
  }

  // -- Means: of row r and pair of columns 4 j + lane mod 4, for page mean_page_.
  __device__ __forceinline__ void turn() {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      const uint2 bits = load_shared_8(shared_ + Memory::kTurns + 8U * static_cast<std::uint32_t>(4 * j + lane_ % 4));
      const float cosine = __uint_as_float(bits.x);
      const float sine = __uint_as_float(bits.y);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float2& m = mean_[2 * j + r];
        m = make_float2(m.x * cosine - m.y * sine, m.x * sine + m.y * cosine);
      }
    }
  }
  __device__ __forceinline__ void fill_turns(int pages) {
    named_barrier(1, 128);
    if (thread_ < D / 2) {
      float2 by = make_float2(1.0F, 0.0F);
      if (thread_ < p_.layer.n_pairs) by = turn_by(p_.layer.turns[thread_] * (pages * kPageTokens));
      store_shared_float(shared_ + Memory::kTurns + 8U * static_cast<std::uint32_t>(thread_), by.x);
      store_shared_float(shared_ + Memory::kTurns + 8U * static_cast<std::uint32_t>(thread_) + 4U, by.y);
    }
    named_barrier(1, 128);
  }
  // Brings the running means to a page, and kTurns to the usual distance between two pages of this block.
  __device__ __forceinline__ void turn_to(int number) {
    if (started_ && number == mean_page_) return;
    if (!started_) {
      started_ = true;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int position = number * kPageTokens + tile_token(16 * warp_ + lane_ / 4 + 8 * r);
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) {
          const int pair = 4 * j + lane_ % 4;
          float2 m = make_float2(0.0F, 0.0F);
          if (pair < p_.layer.n_pairs) {
            const float2 by = turn_by(p_.layer.turns[pair] * position);
            const float2 c = *reinterpret_cast<const float2*>(p_.layer.mean + 2 * (u_.kv * p_.layer.n_pairs + pair));
            m = make_float2(c.x * by.x - c.y * by.y, c.x * by.y + c.y * by.x);
          }
          mean_[2 * j + r] = m;
        }
      }
    } else {
      fill_turns(number - mean_page_);
      turn();
    }
    fill_turns(kStep);
    mean_page_ = number;
  }

  // -- Exact rows: two threads per row; zeros where no query of the block reads.
  __device__ __forceinline__ void exact() {
    const int exact_tiles = same_in_warp(u_.exact_tiles);
    for (int tile = 0; tile < exact_tiles; ++tile) {
      ring_.wait_empty();
      const int n = thread_ / 2;
      int flip = 0;
      const uint4* row = exact_row<D>(p_, u_, tile, tile_token(n), false, flip);
#pragma unroll
      for (int i = 0; i < D / 16; ++i) {
        const int piece = 2 * i + thread_ % 2;
        const uint4 x = row != nullptr ? __ldg(row + (piece ^ flip)) : make_uint4(0, 0, 0, 0);
        store_shared_16(ring_.tile() + static_cast<std::uint32_t>(piece / 8) * (kPageTokens * 128U) + swizzled(n, piece % 8),
                        x);
      }
      publish_stores();
      named_barrier(1, 128);
      if (thread_ == 0) barrier_arrive(ring_.barrier(Memory::kFull));
      ring_.next();
    }
  }

  const PrefillParams& p_;
  const PrefillUnit& u_;
  std::uint32_t shared_, rank_;
  int thread_, lane_, warp_, slots_;
  MakerRing<D> ring_;
  bool started_ = false;
  int mean_page_ = 0;
  float2 mean_[2 * kColumnTiles];
};

}  // namespace oscar::cuda
