// The end of a decode: a block merges the partial results of its warps, and of heads that lie in several blocks the last one to
// come merges theirs. Always in the order of the line, whoever comes last: results do not depend on it.
#pragma once

#include "cuda/partial_results.cuh"
#include "cuda/warp_reduce.cuh"

namespace oscar::cuda {

// Partial results of one head, in the order of the line, at equal distances but for one.
struct PartialList {
  std::uint32_t count;
  const std::uint8_t* first;
  std::uint32_t stride;
  std::uint32_t special;  // number of the one that is elsewhere, or more than there are
  const std::uint8_t* elsewhere;
  [[nodiscard]] __device__ const std::uint8_t* at(std::uint32_t i) const {
    return i == special ? elsewhere : first + static_cast<std::uint64_t>(i) * stride;
  }
};

template <int D, bool kWide, bool kInt2>
class BlockMerge {
  using Layout = PartialLayout<D, kWide, kInt2>;

 public:
  // heads, slots: the first warp's. flags: shared memory of the block, 8 bytes.
  __device__ BlockMerge(const DecodeParams& p, std::uint32_t share, const std::uint8_t* heads, const std::uint8_t* slots,
                        std::uint32_t* flags, int lane, int warp)
      : p_(p),
        lane_(lane),
        warp_(warp),
        warps_(static_cast<int>(blockDim.x) / 32),
        block_share_(share * (blockDim.x / 32)),
        heads_(heads),
        slots_(slots),
        flags_(flags) {}

  // By all threads, after a barrier of the block.
  __device__ __forceinline__ void run() {
    // A head's slots follow each other, and then the row of the warp in whose piece it ends.
    PartialHead open{-1, 0, 0, 0U, 0U, 0};
    bool aside = false;
    if (lane_ < warps_) {
      open = heads_of(lane_).open;
      aside = heads_of(lane_).aside.sequence >= 0;
    }
    const bool used = open.sequence >= 0;
    // Of warps without a slot nothing is known but that.
    const std::uint32_t key = used ? open.begin : 0xFFFFFFFFU;
    const bool same = __shfl_up_sync(~0U, key, 1) == key;
    unsigned first = __ballot_sync(~0U, used && (lane_ == 0 || !same));
    const unsigned others = __ballot_sync(~0U, used && lane_ > 0 && same);
    const unsigned asides = __ballot_sync(~0U, aside);
    const std::uint32_t begin = blockIdx.x * block_share_;
    // Of heads of which other blocks have a part, the one that began before and the one that goes on.
    const PartialHead* shared_heads[2] = {nullptr, nullptr};
    int from = -1;  // the head that ends in the first warp's piece has no slot
    if ((asides & 1U) == 0) {
      from = __ffs(static_cast<int>(first)) - 1;
      first &= first - 1;
      if (from < 0) return;
    }
#pragma unroll 1
    for (;;) {
      const int slots = from < 0 ? 0 : __ffs(static_cast<int>(~(others >> from >> 1)));
      const int next = max(from, 0) + slots;
      const bool is_aside = (asides >> next & 1U) != 0;
      const PartialHead& head = from < 0 ? heads_of(0).aside : heads_of(from).open;
      const auto count = static_cast<std::uint32_t>(slots + (is_aside ? 1 : 0));
      const bool continues = head.begin < begin;
      const bool goes_on = head.end > begin + block_share_;
      if (continues) {
        shared_heads[0] = &head;
      } else if (goes_on) {
        shared_heads[1] = &head;
      }
      merge(head,
            {count, slot(max(from, 0)), p_.warp_bytes, is_aside ? count - 1 : count,
             Layout::row(p_, blockIdx.x * (blockDim.x / 32) + static_cast<std::uint32_t>(next))},
            !continues && !goes_on,
            p_.workers + 3 * blockIdx.x +
                (continues ? 0
                 : goes_on ? 1
                           : 2));
      if (first == 0) break;
      from = __ffs(static_cast<int>(first)) - 1;
      first &= first - 1;
    }
    if (shared_heads[0] == nullptr && shared_heads[1] == nullptr) return;
    __syncthreads();
    if (threadIdx.x < 2) {
      const PartialHead* head = threadIdx.x == 0 ? shared_heads[0] : shared_heads[1];
      bool last = false;
      if (head != nullptr) {
        const Blocks blocks = blocks_of(*head);
        fence_device();
        last = atomicAdd(p_.arrived + blocks.first, 1U) + 1 == blocks.count;
        fence_device();
        if (last) p_.arrived[blocks.first] = 0;
      }
      flags_[threadIdx.x] = last ? 1U : 0U;
    }
    __syncthreads();
#pragma unroll 1
    for (int k = 0; k < 2; ++k) {
      if (flags_[k] == 0) continue;
      const PartialHead& head = *(k == 0 ? shared_heads[0] : shared_heads[1]);
      const Blocks blocks = blocks_of(head);
      const std::uint8_t* row = Layout::row(p_, p_.workers + 3 * blocks.first);
      merge(head, {blocks.count, row, 3 * Layout::kBytes, 0, row + Layout::kBytes}, true, p_.workers + 3 * blockIdx.x + 2);
    }
  }

 private:
  [[nodiscard]] __device__ const std::uint8_t* slot(int warp) const {
    return slots_ + static_cast<std::uint32_t>(warp) * p_.warp_bytes;
  }
  [[nodiscard]] __device__ const WarpHeads& heads_of(int warp) const {
    return *reinterpret_cast<const WarpHeads*>(heads_ + static_cast<std::uint32_t>(warp) * p_.warp_bytes);
  }
  struct Blocks {
    std::uint32_t first, count;
  };
  [[nodiscard]] __device__ Blocks blocks_of(const PartialHead& head) const {
    const std::uint32_t first = head.begin / block_share_;
    return {first, (head.end - 1) / block_share_ - first + 1};
  }

  // Partial results of a head into its output, or into a row where they are not the whole head.
  __device__ __forceinline__ void merge(const PartialHead& head, const PartialList& list, bool whole, std::uint32_t row) {
    const int parts = rows_of(p_, head.first_row) * (D / 64);
    // The task of a warp is a part; they go on where those of the head before ended.
    int part = warp_ - task_;
    if (part < 0) part += warps_;
#pragma unroll 1
    for (; part < parts; part += warps_) merge_part(head, part, list, whole, row);
    task_ = (task_ + parts) % warps_;
    if (whole && threadIdx.x == 0 && p_.inside) p_.ready[head.item] = 0;
    if constexpr (kInt2) {
      if (whole) {
        __syncthreads();
        finish(head, row);
        __syncthreads();
      }
    }
  }

  // Partial results of 64 dimensions of a query, two per lane, into its output, or into a row, where they are not the whole
  // head or still to be turned.
  __device__ __forceinline__ void merge_part(const PartialHead& head, int part, const PartialList& list, bool whole,
                                             std::uint32_t row) {
    const int query = part / (D / 64);
    const int dim = part % (D / 64) * 64 + 2 * lane_;
    float most = -INFINITY;
    float total = 0;
    float2 out[Layout::kVectors] = {};
#pragma unroll 1
    for (std::uint32_t base = 0; base < list.count; base += kAtOnce) {
      const std::uint32_t here = min(list.count - base, kAtOnce);
      float2 mine = make_float2(0.0F, 0.0F);
      if (static_cast<std::uint32_t>(lane_) < here)
        mine = *reinterpret_cast<const float2*>(list.at(base + static_cast<std::uint32_t>(lane_)) + Layout::sum_at(query));
#pragma unroll
      for (int v = 0; v < Layout::kVectors; ++v) {
        float2 x[kAtOnce];
        const std::uint32_t at = Layout::value_at(v, query, dim);
#pragma unroll
        for (std::uint32_t j = 0; j < kAtOnce; ++j)
          x[j] = j < here ? *reinterpret_cast<const float2*>(list.at(base + j) + at) : make_float2(0.0F, 0.0F);
        if (v == 0) {
          const bool filled = mine.y != 0.0F;  // others hold zeros
          const float before = most;
          most = fmaxf(most, warp_max(filled ? mine.x : -INFINITY));
          mine.x = filled ? exp2_fast(mine.x - most) : 0.0F;
          const float rescale = before > -INFINITY ? exp2_fast(before - most) : 0.0F;
          total = total * rescale + warp_sum(mine.x * mine.y);
#pragma unroll
          for (int u = 0; u < Layout::kVectors; ++u) out[u] = make_float2(out[u].x * rescale, out[u].y * rescale);
        }
#pragma unroll
        for (std::uint32_t j = 0; j < kAtOnce; ++j) {
          const float w = __shfl_sync(~0U, mine.x, static_cast<int>(j));
          out[v].x = fmaf(w, x[j].x, out[v].x);
          out[v].y = fmaf(w, x[j].y, out[v].y);
        }
      }
    }
    if (!whole || kInt2) {
      std::uint8_t* partial = Layout::row(p_, row);
#pragma unroll
      for (int v = 0; v < Layout::kVectors; ++v) *reinterpret_cast<float2*>(partial + Layout::value_at(v, query, dim)) = out[v];
      if (dim == 0) *reinterpret_cast<float2*>(partial + Layout::sum_at(query)) = make_float2(most, total);
      return;
    }
    const OutputRow to(p_, head.sequence, head.kv, head.first_row + query);
    const Closing closing(p_, to, most, total);
    *reinterpret_cast<__half2*>(p_.out + to.index * D + dim) =
        __floats2half2_rn(out[0].x * closing.factor, out[0].y * closing.factor);
    if (dim == 0 && p_.lse != nullptr) p_.lse[to.index] = closing.lse();
  }

  // Of `int2`: the row of a complete head to its outputs.
  __device__ __forceinline__ void finish(const PartialHead& head, std::uint32_t row) {
    const std::uint8_t* partial = Layout::row(p_, row);
    const auto* coded = reinterpret_cast<const float*>(partial + Layout::value_at(1, 0, 0));
    turn_rows<D, Layout::kRows, 4>(p_, head.kv, coded, Layout::kStride, rows_of(p_, head.first_row), lane_, warp_, warps_,
                                   [&](int row, int dim, float turned) {
                                     const OutputRow to(p_, head.sequence, head.kv, head.first_row + row);
                                     const float2 all = *reinterpret_cast<const float2*>(partial + Layout::sum_at(row));
                                     const Closing closing(p_, to, all.x, all.y);
                                     const float value =
                                         *reinterpret_cast<const float*>(partial + Layout::value_at(0, row, dim)) + turned;
                                     p_.out[to.index * D + dim] = __float2half_rn(value * closing.factor);
                                     if (dim == 0 && p_.lse != nullptr) p_.lse[to.index] = closing.lse();
                                   });
  }

  static constexpr std::uint32_t kAtOnce = 20;  // partial results on their way

  const DecodeParams& p_;
  int lane_, warp_, warps_;
  int task_ = 0;  // the warp whose turn is next
  std::uint32_t block_share_;
  const std::uint8_t *heads_, *slots_;
  std::uint32_t* flags_;
};

}  // namespace oscar::cuda
