// The four warps of a prefill that make tiles of values, [D, 64] binary16, from pages or from exact rows, and fetch the pages.
// Coded values stay in the Hadamard basis of their page.
#pragma once

#include "cuda/prefill_memory.cuh"

namespace oscar::cuda {

template <int D>
class ValueMaker {
  using Memory = PrefillMemory<D>;

 public:
  __device__ ValueMaker(const PrefillParams& p, const PrefillUnit& unit, std::uint32_t shared)
      : p_(p),
        u_(unit),
        shared_(shared),
        thread_(static_cast<int>(threadIdx.x) % 128),
        lane_(thread_ % 32),
        warp_(same_in_warp(thread_ / 32)),
        slots_(same_in_warp<int>(p.layer.slots[unit.kv])),
        stages_(Memory::stages(slots_, p.shared_bytes)),
        fetch_(same_in_warp(unit.first_page), same_in_warp(unit.last_page)) {}

  __device__ __forceinline__ void run() {
    // Two pages ahead: the makers of keys may be two behind.
    fetch_page();
    fetch_page();
    RingPlace page;
    for (PageWalk walk(same_in_warp(u_.first_page), same_in_warp(u_.last_page)); !walk.done(); walk.next()) {
      fetch_page();
      barrier_await(shared_ + Memory::kPage + page.offset(), page.parity());
      make(page);
      publish();
      page.next(kPageStages);
      tile_.next(stages_);
    }
    const int exact_tiles = same_in_warp(u_.exact_tiles);
    for (int i = 0; i < exact_tiles; ++i, tile_.next(stages_)) {
      make_exact(i);
      publish();
    }
  }

 private:
  __device__ __forceinline__ void fetch_page() {
    if (thread_ == 0 && !fetch_.done()) {
      fetched_.wait_empty(shared_ + Memory::kPageEmpty);
      const std::int32_t page = __ldg(p_.page_table.at(u_.sequence, p_.page_columns, fetch_.page()));
      const std::uint32_t bytes = paged::head_bytes(slots_, D);
      const std::uint32_t at = shared_ + Memory::kPage + fetched_.offset();
      barrier_expect(at, bytes);
      copy_to_shared(page_at(fetched_),
                     p_.pages + static_cast<std::int64_t>(page) * p_.layer.page_bytes + p_.layer.head_offset[u_.kv], bytes, at);
    }
    __syncwarp();
    if (!fetch_.done()) fetch_.next();
    fetched_.next(kPageStages);
  }
  [[nodiscard]] __device__ std::uint32_t page_at(const RingPlace& page) const {
    return shared_ + Memory::kPages + page.stage() * Memory::page_stage(slots_);
  }
  // Where values go.
  [[nodiscard]] __device__ std::uint32_t values() const {
    return shared_ + Memory::tiles(slots_) + Memory::kHalfTile + tile_.stage() * Memory::kTile;
  }
  __device__ __forceinline__ void wait_empty() const { tile_.wait_empty(shared_ + Memory::kValueRing + Memory::kEmpty); }
  __device__ __forceinline__ void publish() const {
    publish_stores();
    named_barrier(4, 128);
    if (thread_ == 0) barrier_arrive(shared_ + Memory::kValueRing + Memory::kFull + tile_.offset());
  }
  // Exact rows, eight tokens by 32 dimensions at a time, transposed on their way; zeros where no query of the block reads.
  __device__ __forceinline__ void make_exact(int number) {
    wait_empty();
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      int flip = 0;
      const uint4* row = exact_row<D>(p_, u_, number, tile_token(16 * warp_ + 8 * half + lane_ / 4), true, flip);
#pragma unroll
      for (int i = 0; i < D / 32; ++i) {
        const uint4 x = row != nullptr ? __ldg(row + ((4 * i + lane_ % 4) ^ flip)) : make_uint4(0, 0, 0, 0);
        // Matrix m has dimensions 8 t + 2 m and 8 t + 2 m + 1 of lanes t.
        const int dim = 32 * i + lane_ % 8 / 2 * 8 + lane_ / 8 * 2 + lane_ % 2;
        store_matrix_transposed(values() + swizzled(dim, 2 * warp_ + half), x.x, x.y, x.z, x.w);
      }
    }
  }

  // Dimensions as rows, the tokens of the warp's group as columns.
  __device__ __forceinline__ void make(const RingPlace& page) {
    const std::uint32_t digits = page_at(page) + paged::key_bytes(slots_);
    const std::uint32_t gain_bytes = digits + paged::value_bytes(D) + kPageTokens;
    uint2 word[D / 64];  // of 64 dimensions: rows 0 .. 7 and 8 .. 15 of four fragments, four tokens
#pragma unroll
    for (int i = 0; i < D / 64; ++i)
      word[i] = load_shared_8(digits + static_cast<std::uint32_t>(warp_ / 2 * 8 * D + 512 * i + 16 * lane_ + warp_ % 2 * 8));
    // Gains of tokens 2 t, 2 t + 1 (half 0) and 2 t + 8, 2 t + 9 (half 1).
    __half2 gain[2], centre[2];
    std::uint32_t four[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        four[half][i] = load_shared_4(gain_bytes + 4U * static_cast<std::uint32_t>(lane_ % 4 * 2 + i + 8 * half));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float g[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const std::uint32_t byte = four[half][i] >> (8 * warp_) & (paged::kValueGains - 1U);
        g[i] = load_shared_float(shared_ + Memory::kValueGains + 4U * byte);
      }
      constexpr float kUnit = 0x1p24F * kValueUnit;
      gain[half] = __floats2half2_rn(g[0] * kUnit, g[1] * kUnit);
      centre[half] = __floats2half2_rn(-1.5F * kValueUnit * g[0], -1.5F * kValueUnit * g[1]);
    }
    barrier_arrive(shared_ + Memory::kPageEmpty + page.offset());
    wait_empty();
    const std::uint32_t to = values() + swizzled(lane_ / 16 * 8 + lane_ % 8, 2 * warp_ + lane_ / 8 % 2);
#pragma unroll
    for (int field = 0; field < 4; ++field) {
#pragma unroll
      for (int i = 0; i < D / 64; ++i) {
        const auto value = [&](std::uint32_t fields, int half) {
          const std::uint32_t bits = fields & 0x00030003U << (2 * field);
          const __half2 x = __hfma2(*reinterpret_cast<const __half2*>(&bits), gain[half], centre[half]);
          return *reinterpret_cast<const std::uint32_t*>(&x);
        };
        // Matrices: (rows 0 .. 7, tokens 0 .. 7), (rows 0 .. 7, tokens 8 .. 15), (rows 8 .. 15, ...).
        store_matrix(to + 2048U * static_cast<std::uint32_t>(4 * i + field), value(word[i].x, 0), value(word[i].x >> 8, 1),
                     value(word[i].y, 0), value(word[i].y >> 8, 1));
      }
      // The next field stands two bits higher.
#pragma unroll
      for (int half = 0; half < 2; ++half) gain[half] = __hmul2(gain[half], __float2half2_rn(0.25F));
    }
  }

  const PrefillParams& p_;
  const PrefillUnit& u_;
  std::uint32_t shared_;
  int thread_, lane_, warp_, slots_, stages_;
  RingPlace tile_, fetched_;
  PageWalk fetch_;
};

}  // namespace oscar::cuda
