// The portable kernel of a prefill, for compute capability 8.0 and later, both codecs and all head_dims: m16n8k16 products, no
// instruction that sm_80 lacks. A block has 64 query rows, tokens times query heads of one KV head, 16 per warp, and walks over
// tiles of 64 positions: coded pages, those of one pattern of signs after the other, then the exact rows.
//
// Queries go into the basis of the codes once per block, so both products take a page's digits as they lie there
// (prefill_portable_products.cuh); gains or grids are factors of the columns of logits, before and after the softmax. What all
// warps of the block need of a page is prepared one page ahead; there is one barrier per page, and warps share nothing else.
#pragma once

#include "cuda/prefill_portable_pages.cuh"
#include "cuda/prefill_portable_softmax.cuh"
#include "cuda/prefill_portable_sums.cuh"
#include "cuda/prefill_rows.cuh"

namespace oscar::cuda {

template <int D, bool kInt2>
class PortablePrefill {
  using Memory = PortableMemory<D, kInt2>;

 public:
  __device__ PortablePrefill(const PrefillParams& p, const PrefillUnit& u, std::uint32_t shared)
      : p_(p),
        u_(u),
        shared_(shared),
        thread_(static_cast<int>(threadIdx.x)),
        lane_(thread_ % 32),
        warp_(thread_ / 32),
        row_(16 * warp_ + lane_ / 4),
        queries_(p, u, shared, warp_, lane_) {}

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out_[j][i] = 0;
    }
    float constant[2];
    queries_.load(constant);
    if (u_.last_page > u_.first_page) coded(constant);
    thread_ = computed_anew(thread_);
    lane_ = thread_ % 32;
    warp_ = thread_ / 32;
    row_ = 16 * warp_ + lane_ / 4;
    exact();
    store();
  }

 private:
  // -- The coded tier.
  // constant: base-2 logits of the constant of coded keys.
  __device__ __forceinline__ void coded(float (&constant)[2]) {
    const int slots = p_.layer.slots[u_.kv];
    __syncthreads();
    const float unit = queries_.transform(slots);
    PortablePages<D, kInt2> pages(p_, u_, shared_, slots, unit);
    int page = pages.fetch(0);
    int next = pages.fetch(1);
    copies_arrived();
    __syncthreads();
    if (p_.layer.n_pairs > 0) {
      queries_.order_by_pairs();
      constant[0] *= 0.5F;  // see add_means()
      constant[1] *= 0.5F;
    }
    queries_.store_rows(slots, constant);
    pages.make_table(0, page);
    for (int number = 0; page >= 0;) {
      const int pattern = page % paged::kPatterns;
      do {
        copies_arrived();
        __syncthreads();
        const int after = pages.fetch(number + 2);
        if (next >= 0) pages.make_table(number + 1, next);
        coded_tile(pages, number, slots, page);
        page = next;
        next = after;
        ++number;
      } while (page >= 0 && (kInt2 || page % paged::kPatterns == pattern));
      if constexpr (!kInt2) {
        centre();
        turn_sums<D>(p_, u_.kv, pattern, page < 0 ? -1 : page % paged::kPatterns, lane_, out_);
      }
    }
    if constexpr (kInt2) {
      centre();
      const float weight[2] = {quad_sum(softmax_.sum[0]), quad_sum(softmax_.sum[1])};
      rotate_sums<D>(p_, u_.kv, queries_.own(), weight, computed_anew(lane_), out_);
    }
    if (kInt2 || p_.layer.n_pairs > 0) queries_.load(constant);
    __syncthreads();  // exact tiles take the place of pages
  }

  __device__ __forceinline__ void coded_tile(const PortablePages<D, kInt2>& pages, int number, int slots, int page) {
    const std::uint32_t table = pages.table(number) + static_cast<std::uint32_t>(lane_ % 4 * 8);  // of the lane's columns
    float start[2];
    float sums[2];
    queries_.load_rows(start, sums);
    const bool has_means = p_.layer.n_pairs > 0;
    const bool is_capped = p_.soft_cap > 0.0F;
    // Logits relative to the softmax's base; two of them are added to each other where there are means.
#pragma unroll
    for (int r = 0; r < 2; ++r) start[r] -= is_capped ? 0.0F : (has_means ? 0.5F : 1.0F) * softmax_.base(r);
    float s[8][4];
    key_product(queries_.own_coded(slots), sums, pages.keys(number), slots, lane_, s);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 factor = columns(table, j);
      const float2 offset = kInt2 ? columns(table + Memory::kOffsets, j) : make_float2(0.0F, 0.0F);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float from = kInt2 ? fmaf(sums[i / 2], i % 2 == 0 ? offset.x : offset.y, start[i / 2]) : start[i / 2];
        s[j][i] = fmaf(s[j][i], i % 2 == 0 ? factor.x : factor.y, from);
      }
    }
    if (has_means) {
      add_means(queries_.own(), pages.table(number) + Memory::kMeans, reinterpret_cast<const uint4*>(p_.layer.mean_table),
                p_.layer.n_pairs / 16, p_.layer.n_fast_pairs / 16, lane_, s);
    }
    if (is_capped) softmax_.soft_cap(s, p_.soft_cap);
    const int first = page * kPageTokens;
    if (first < p_.sink || first + kPageTokens - 1 > u_.oldest - p_.recent) {
      Range seen[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) seen[r] = PrefillUnit::coded_seen(p_, u_.row_position(row_ + 8 * r, p_.group));
      mask(s, first, seen);
    }
    if (softmax_.update(s)) shrink_sums(softmax_.shrink[0], softmax_.shrink[1]);

    float inverse = 1.0F;
    if constexpr (kInt2) {
      inverse = follow_steps(pages.table(number));
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 offset = columns(table + Memory::kOffsets + 256U, j);
#pragma unroll
        for (int i = 0; i < 4; ++i) offset_[i / 2] = fmaf(s[j][i], i % 2 == 0 ? offset.x : offset.y, offset_[i / 2]);
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float2 factor = columns(table + 256U, j);
      if constexpr (kInt2) factor = make_float2(factor.x * inverse, factor.y * inverse);
#pragma unroll
      for (int i = 0; i < 4; ++i) s[j][i] *= i % 2 == 0 ? factor.x : factor.y;
    }
    uint4 weights[4];
    pack(s, weights);
    value_product<D>(weights, pages.values(number), lane_, out_, weight_);
  }

  // Of the lane's two columns of eight.
  static __device__ __forceinline__ float2 columns(std::uint32_t table, int j) {
    const uint2 both = load_shared_8(table + static_cast<std::uint32_t>(32 * j));
    return make_float2(__uint_as_float(both.x), __uint_as_float(both.y));
  }
  // `int2`: weights of digits are P times step in a unit that follows the largest step of a page, so that they do not overflow
  // binary16 whatever the size of values. What they are to be multiplied by.
  __device__ __forceinline__ float follow_steps(std::uint32_t table) {
    const float most = fmaxf(load_shared_float(table + Memory::kSteps + 8U), load_shared_float(table + Memory::kSteps + 12U));
    const int exponent = most > 0.0F ? ilogbf(most) : -100;
    if (exponent > step_exponent_ + 4) {
      const float factor = ldexpf(1.0F, max(step_exponent_ - exponent, -120));
      step_exponent_ = exponent;
#pragma unroll
      for (int j = 0; j < D / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out_[j][i] *= factor;
      }
#pragma unroll
      for (float& w : weight_) w *= factor;
    }
    return ldexpf(1.0F, -step_exponent_);
  }
  __device__ __forceinline__ void centre() {
    centre_sums<D>(out_, weight_, kInt2 ? ldexpf(1.0F, step_exponent_) : 1.0F, {quad_sum(offset_[0]), quad_sum(offset_[1])});
#pragma unroll
    for (float& w : weight_) w = 0;
  }

  // -- The exact tier.
  __device__ __forceinline__ void exact() {
    const int tiles = u_.exact_tiles;
    if (tiles == 0) return;
    const std::uint32_t keys = shared_ + Memory::kKeys;
    const std::uint32_t values = shared_ + Memory::kValues;
    fetch_rows(0, false, keys);
    for (int tile = 0; tile < tiles; ++tile) {
      copies_arrived();
      __syncthreads();
      fetch_rows(tile, true, values);
      float s[8][4];
      exact_key_product<D>(queries_.own(), keys, lane_, s);
      const bool is_capped = p_.soft_cap > 0.0F;
      const float base[2] = {is_capped ? 0.0F : softmax_.base(0), is_capped ? 0.0F : softmax_.base(1)};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[j][i] = fmaf(s[j][i], p_.scale * kLog2E, -base[i / 2]);
      }
      if (is_capped) softmax_.soft_cap(s, p_.soft_cap);
      if (!u_.exact_whole(p_, tile)) {
        Range seen[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) seen[r] = u_.exact_seen(p_, tile, u_.row_position(row_ + 8 * r, p_.group));
        mask(s, u_.exact_position(tile), seen);
      }
      if (softmax_.update(s)) shrink_sums(softmax_.shrink[0], softmax_.shrink[1]);
      uint4 weights[4];
      pack(s, weights);
      copies_arrived();
      __syncthreads();
      if (tile + 1 < tiles) fetch_rows(tile + 1, false, keys);
      exact_value_product<D>(weights, values, lane_, out_);
    }
  }
  // Two threads per row, in the order of a page's columns; zeros where no query of the block reads.
  __device__ __forceinline__ void fetch_rows(int tile, bool value, std::uint32_t to) const {
    const int n = thread_ / 2;
    int flip = 0;
    const uint4* row = exact_row<D>(p_, u_, tile, tile_token(n), value, flip);
    const auto* from = reinterpret_cast<const std::uint8_t*>(row != nullptr ? row : reinterpret_cast<const uint4*>(p_.k));
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      const int piece = i % 4 * 2 + thread_ % 2;
      copy_16_if(row != nullptr, exact_piece<D>(to, 0, n, i / 4, piece), from + i / 4 * 128 + (piece ^ flip) * 16);
    }
  }

  // -- Both tiers.
  __device__ __forceinline__ void mask(float (&s)[8][4], int first, const Range (&seen)[2]) const {
    const int mine = first + lane_ % 4 * 2;
    const int mirrored = first - lane_ % 4 * 2;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // tile_token() of column 8 j + 2 t + b.
        const int position = j < 4 ? mirrored + 8 * (j ^ 1) + 7 - i % 2 : mine + 8 * j + i % 2;
        s[j][i] = position >= seen[i / 2].low && position <= seen[i / 2].high ? s[j][i] : -INFINITY;
      }
    }
  }
  __device__ __forceinline__ void shrink_sums(float first, float second) {
    const float factor[2] = {first, second};
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out_[j][i] *= factor[i / 2];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) weight_[i] *= factor[i / 2];
    offset_[0] *= first;
    offset_[1] *= second;
  }
  // To A fragments, tokens as columns.
  static __device__ __forceinline__ void pack(const float (&s)[8][4], uint4 (&to)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float(&a)[4] = s[2 * e];
      const float(&b)[4] = s[2 * e + 1];
      to[e] = make_uint4(pack_half2(a[0], a[1]), pack_half2(a[2], a[3]), pack_half2(b[0], b[1]), pack_half2(b[2], b[3]));
    }
  }

  __device__ __forceinline__ void store() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(softmax_.sum[r]);
      const int row = row_ + 8 * r;
      if (row >= u_.rows) continue;
      const RowEnd end(p_, u_.query_head(p_, row), softmax_.max[r], sum);
      const std::int64_t to = u_.row_index(p_, row);
      auto* out = reinterpret_cast<__half2*>(p_.out + to * D + lane_ % 4 * 2);
#pragma unroll
      for (int j = 0; j < D / 8; ++j)
        out[4 * j] = __floats2half2_rn(out_[j][2 * r] * end.factor, out_[j][2 * r + 1] * end.factor);
      if (p_.lse != nullptr && lane_ % 4 == 0) p_.lse[to] = end.lse;
    }
  }

  const PrefillParams& p_;
  const PrefillUnit& u_;
  std::uint32_t shared_;
  int thread_, lane_, warp_, row_;
  PortableQueries<D, kInt2> queries_;
  RowSoftmax softmax_;
  float out_[D / 8][4];   // sums of values; in the coded tier in the basis of the codes, of digits in units of their fields
  float weight_[4] = {};  // sums of what digits were multiplied by
  float offset_[2] = {};  // `int2`: of offsets of values, the lane's own share
  int step_exponent_ = -100;
};

// Blocks of a multiprocessor at a time, by registers.
template <int D>
inline constexpr int kPortableBlocks = D <= 128 ? 3 : 2;

template <int D, bool kInt2>
__global__ void __launch_bounds__(kPortableThreads, kPortableBlocks<D>)
    portable_prefill_kernel(const __grid_constant__ PrefillParams p) {
  std::uint8_t* memory = dynamic_shared();
  // In shared memory: it would take registers from all warps.
  PrefillUnit& unit = *reinterpret_cast<PrefillUnit*>(memory + PortableMemory<D, kInt2>::kUnit);
  const PrefillUnit found = PrefillUnit::find<1, kPortableRows>(p, static_cast<int>(blockIdx.x), 0);
  if (found.sequence < 0) return;
  if (threadIdx.x == 0) unit = found;
  __syncthreads();
  PortablePrefill<D, kInt2>(p, unit, shared_address(memory)).run();
}

}  // namespace oscar::cuda
