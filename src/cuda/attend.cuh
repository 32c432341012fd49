// Second kernel of a decode: attention of all queries on all tiles, one partial result per warp and part (see decode_plan.cuh).
//
// One warp works on one tile (a page of one KV head: 64 tokens) at a time, both products on tensor cores with tokens
// respectively dimensions as rows and query heads as columns:
//   S [64 tokens, 8 heads]  = digits [64, slots] * slot query [slots, 8]     one AND per two operands, see page_format.h
//   O [D, 8] += digits [D, 64] * (P * gain) [64, 8]                          P goes from accumulator to operand by movmatrix
// Gains, means and the softmax work on the 64 x 8 logits between them. Tiles come by bulk copies into the warp's own ring.
#pragma once

#include "cuda/decode_plan.cuh"
#include "cuda/int2_grids.cuh"
#include "cuda/ring.cuh"
#include "cuda/rope_means.cuh"
#include "cuda/softmax.cuh"

namespace oscar::cuda {

template <int D>
inline constexpr int kAttendWarps = D > 128 ? 8 : kMostWarps;  // of a block, at most
// Of 64 K for all lanes of a block.
template <int D, bool kMean>
inline constexpr int kAttendRegisters = D > 128 ? 224 : (kMean ? 128 : 112);
template <int D>
inline constexpr int kTiles = D / 16;

// Shared memory of a block: gains of key bytes [256] and of value bytes [256], RoPE-mean table and steps, then per warp:
// scratch 512 bytes, barriers, queries, mean weights, ring.
inline constexpr std::uint32_t kGainTableBytes = 2048;
template <bool kInt2>
inline constexpr std::uint32_t kScratchBytes = kInt2 ? kInt2ScratchBytes : 512;
inline constexpr std::uint32_t kBarrierBytes = 128;

// Says that all lanes hold the same value.
template <class T>
__device__ __forceinline__ T uniform(T x) {
  return __shfl_sync(~0U, x, 0);
}
// Keeps the compiler from computing a value again where it is used.
__device__ __forceinline__ std::uint32_t kept(std::uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

template <int D, bool kWide, bool kMean, bool kInt2>
class WarpAttention {
 public:
  __device__ WarpAttention(const DecodeParams& params, std::uint32_t shared, std::uint32_t warp_shared, int lane,
                           std::uint32_t worker)
      : p_(params),
        lane_(lane),
        worker_(worker),
        gain_table_(shared),
        scratch_(warp_shared),
        query_(warp_shared + kScratchBytes<kInt2> + kBarrierBytes),
        means_(params, lane, shared + kGainTableBytes, query_ + params.query_bytes, scratch_),
        ring_(query_ + params.query_bytes + (kMean ? RopeMeans<kWide>::weight_bytes(params) : 0U),
              warp_shared + kScratchBytes<kInt2>, params.stages, params.stage_bytes, lane) {}

  // Once per warp, before anything but tiles is used: queries come from the kernel before, tables from the other warps.
  __device__ void wait_once() {
    if (waited_) return;
    waited_ = true;
    wait_for_predecessor();
    wait_for_block();
  }

  // Units [begin, end) of the exact tier of virtual head `head`.
  __device__ void attend_exact(int sequence, int head, const Tiers& tiers, int begin, int end) {
    const int item = sequence * p_.heads + head;
    const int kv = head / p_.subgroups;
    state_ = State();
    clear_sums();
    const std::int32_t* table = p_.block_table.at(sequence, p_.sink / kBlockTokens + p_.ring, 0);
    constexpr std::uint32_t kHalfBytes = kBlockTokens * D * 2;
    const auto address = [&](std::int32_t block) {
      return p_.blocks + (static_cast<std::int64_t>(block) * p_.layer.n_head_kv + kv) * (2 * kHalfBytes);
    };
    const auto block_of = [&](int unit) {
      return __ldg(table + paged::block_column(tiers.block_position(unit), p_.sink, p_.ring) * p_.block_table.stride);
    };
    // Two copies per unit, keys and values.
    const int copies = 2 * (end - begin);
    const auto issue = [&](int copy) {
      if (copy < copies)
        ring_.issue(address(block_of(begin + copy / 2)) + static_cast<std::uint32_t>(copy & 1) * kHalfBytes, kHalfBytes);
    };
    if (p_.early) wait_once();  // what still runs may write exact rows
    for (int i = 0; i < ring_.stages(); ++i) issue(i);
    wait_once();
    load_query(p_.exact_query + static_cast<std::int64_t>(item) * (D / 16 * p_.lanes * 2), D / 16);

    const float scale = p_.scale * kLog2E;
    const int seen[2] = {seen_by_column(tiers, head, 0), seen_by_column(tiers, head, 1)};
    for (int unit = begin; unit < end; ++unit) {
      const int position = tiers.block_position(unit);
      const bool is_sink = unit < tiers.sink_blocks();
      const int low = is_sink ? 0 : max(0, tiers.recent_begin - position);
      const int high = min(kBlockTokens, (is_sink ? tiers.sink_end : tiers.n) - position);
      int first[2], last[2];  // of the lane's columns
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        first[c] = is_sink ? 0 : max(low, seen[c] - p_.recent - position);
        last[c] = min(high, seen[c] - position);
      }

      float acc[1][4] = {};
      const std::uint32_t keys = ring_.acquire();
      const std::uint32_t key_row = keys + static_cast<std::uint32_t>((lane_ & 15) * D * 2);
#pragma unroll
      for (int step = 0; step < D / 16; ++step) {
        std::uint32_t a[4];
        load_matrix(a, key_row + static_cast<std::uint32_t>(((2 * step + lane_ / 16) ^ (lane_ & 7)) * 16));
        const uint2 b = query_step(step);
        mma(acc[0], a[0], a[1], a[2], a[3], b.x, b.y);
      }
      ring_.release();
      issue(2 * (unit - begin) + ring_.stages());

      float y[1][State::kRows][2];
      State::pick(acc[0], lane_, y[0]);
#pragma unroll
      for (int r = 0; r < State::kRows; ++r) {
#pragma unroll
        for (int c = 0; c < 2; ++c) y[0][r][c] = y[0][r][c] * scale - state_.max[c];
      }
      if (p_.soft_cap > 0.0F) state_.template soft_cap<1>(y, p_.soft_cap * kLog2E);
#pragma unroll
      for (int r = 0; r < State::kRows; ++r) {
        const int row = State::row(lane_, r);
#pragma unroll
        for (int c = 0; c < 2; ++c) y[0][r][c] = row >= first[c] && row < last[c] ? y[0][r][c] : -INFINITY;
      }
      state_.template update<1>(y, out_, weight_);
      std::uint32_t b0, b1;
      probability_fragment<kWide>(y[0], b0, b1);

      // A masked row may hold anything, NaN included: 0 times that must not reach the sum.
      const auto keep = [&](int token) {
        return (token >= low && token < high ? 0xFFFFU : 0U) | (token + 1 >= low && token + 1 < high ? 0xFFFF0000U : 0U);
      };
      const std::uint32_t keep_low = keep(lane_ % 4 * 2);
      const std::uint32_t keep_high = keep(lane_ % 4 * 2 + 8);
      const std::uint32_t values = ring_.acquire();
      const std::uint32_t value_row = values + static_cast<std::uint32_t>(((lane_ & 7) + lane_ / 16 * 8) * D * 2);
#pragma unroll
      for (int i = 0; i < kTiles<D>; ++i) {
        std::uint32_t a[4];
        load_matrix_transposed(a, value_row + static_cast<std::uint32_t>(((2 * i + (lane_ / 8 & 1)) ^ (lane_ & 7)) * 16));
        mma(out_[i], a[0] & keep_low, a[1] & keep_low, a[2] & keep_high, a[3] & keep_high, b0, b1);
      }
      ring_.release();
      issue(2 * (unit - begin) + 1 + ring_.stages());
    }
    store(kHeadParts * static_cast<std::uint32_t>(item), head, 1.0F, 1.0F, 0.0F);
  }

  // Pages [begin, end) of the coded tier, in the order of Tiers::page_of().
  __device__ void attend_coded(int sequence, int head, const Tiers& tiers, int begin, int end) {
    const int item = sequence * p_.heads + head;
    const int kv = head / p_.subgroups;
    state_ = State();
    const int slots = p_.layer.slots[kv];
    constexpr auto kCodec = kInt2 ? paged::PageCodec::int2 : paged::PageCodec::spectral;
    const std::uint32_t bytes = kept(paged::head_bytes(slots, D, kCodec));
    const std::uint32_t gains = bytes - 2 * paged::row_data_bytes(kCodec);  // grids, of `int2`
    const std::uint32_t values = kept(paged::key_bytes(slots));
    const std::int32_t* table = p_.page_table.at(sequence, p_.page_columns, tiers.first_page());
    const int stride = p_.page_table.stride;
    const std::uint8_t* base = p_.pages + p_.layer.head_offset[kv];
    const auto issue = [&](std::int32_t page) {
      ring_.issue(base + static_cast<std::uint64_t>(page) * p_.layer.page_bytes, bytes);
    };
    const int pages = tiers.pages();
    paged::PageWalk at(tiers, begin, end);
    paged::PageWalk ahead = at;  // at the next page to be issued
    for (int i = 0; i < ring_.stages() && ahead.left > 0; ++i) {
      issue(__ldg(table + ahead.page * stride));
      if (!ahead.next()) ahead.next_series(pages);
    }
    wait_once();
    const int steps = static_cast<int>(kept(static_cast<std::uint32_t>(slots / 16)));
    const float* header = p_.headers + static_cast<std::int64_t>(item) * kHeaderFloats;
    // Lanes 0 .. 15 turn gains of keys into factors, lanes 16 .. 31 those of values; rows 8 .. 15 meet fields that stand
    // higher: in S they are rows (16 times), in P * gain columns (4 times).
    constexpr float kFirstValueScale = kInt2 ? 1.0F : kValueScale;
    const float unit = lane_ < 16 ? header[0] * (lane_ < 8 ? 1.0F : 0.0625F) : kFirstValueScale * (lane_ < 24 ? 1.0F : 0.25F);
    ValueScale value_scale;
    const std::uint32_t gain_table = kept(gain_table_ + (lane_ < 16 ? 0U : kGainTableBytes / 2));
    const float start[4] = {header[8 + State::head(lane_, 0)], header[8 + State::head(lane_, 1)],
                            header[8 + State::head(lane_, 0)] * 16.0F, header[8 + State::head(lane_, 1)] * 16.0F};
    const float constant[2] = {header[16 + State::head(lane_, 0)], header[16 + State::head(lane_, 1)]};
    const float query_sum[2] = {header[24 + State::head(lane_, 0)], header[24 + State::head(lane_, 1)]};
    load_query(p_.coded_query + static_cast<std::int64_t>(item) * (p_.query_bytes / 4), steps);

    // Pages of which a part belongs to the exact tier, for all queries or for some.
    const int first_cut = tiers.sink_end % kPageTokens != 0 ? 0 : -1;
    const int last_cuts = max(tiers.n - (p_.queries - 1) - p_.recent, 0) / kPageTokens - tiers.first_page();
    const int coded_end[2] = {seen_by_column(tiers, head, 0) - p_.recent, seen_by_column(tiers, head, 1) - p_.recent};

    typename RopeMeans<kWide>::Pair means;
    // Ids are read a page earlier than they are needed.
    std::int32_t page_after = ahead.left > 0 ? __ldg(table + ahead.page * stride) : -1;
    if (!ahead.next()) ahead.next_series(pages);
    const std::int32_t* next_id = table + ahead.page * stride;
    bool second = false;  // of two pages whose means are known
    if constexpr (kMean) means_.start(item, tiers.first_page() + at.page);
    clear_sums();
    for (;;) {
      const std::int32_t next_page = page_after;
      page_after = ahead.left > 0 ? __ldg(next_id) : -1;
      next_id += paged::kPatterns * stride;
      if (!ahead.next()) {
        ahead.next_series(pages);
        next_id = table + ahead.page * stride;
      }
      const std::uint32_t tile = ring_.acquire();
      if constexpr (kInt2) {
        LaneGrids lane_grids(tile + gains, lane_);
        if (at.page == first_cut || at.page >= last_cuts) {
          const int position = (tiers.first_page() + at.page) * kPageTokens;
          lane_grids.keep(tiers.sink_end - position, tiers.coded_end - position, lane_);
        }
        const float shrink = value_scale.follow(lane_grids.largest_value_step(lane_));
        if (shrink != 1.0F) scale_sums(shrink);
        __syncwarp();
        lane_grids.store(scratch_, lane_ < 16 ? unit : unit * value_scale.get(), lane_);
      } else {
        convert_gains(tile + gains, gain_table, unit);
      }

      float acc[4][4];
      key_product(tile, steps, start, acc);

      float y[4][State::kRows][2];
      const float offset[2] = {constant[0] - state_.max[0], constant[1] - state_.max[1]};
      if constexpr (kMean) {
        if (!second) means_.logits(means);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int r = 0; r < State::kRows; ++r) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            y[j][r][c] = offset[c];
            if constexpr (kMean) y[j][r][c] += means_.take(means, second, j, r, c);
          }
        }
      }
      second = !second;
      __syncwarp();  // scratch
#pragma unroll
      for (int r = 0; r < State::kRows; ++r) {
        const float4 four = load_shared_float4(scratch_ + 16U * static_cast<std::uint32_t>(State::row(lane_, r)));
        const float gain[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float x[State::kRows][2];
          State::pick(acc[j], lane_, x);
          y[j][r][0] = fmaf(x[r][0], gain[j], y[j][r][0]);
          y[j][r][1] = fmaf(x[r][1], gain[j], y[j][r][1]);
        }
        if constexpr (kInt2) {
          const float4 lo = load_shared_float4(scratch_ + kKeyOffsets + 16U * static_cast<std::uint32_t>(State::row(lane_, r)));
          const float of_token[4] = {lo.x, lo.y, lo.z, lo.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            y[j][r][0] = fmaf(of_token[j], query_sum[0], y[j][r][0]);
            y[j][r][1] = fmaf(of_token[j], query_sum[1], y[j][r][1]);
          }
        }
      }
      if (p_.soft_cap > 0.0F) state_.template soft_cap<4>(y, p_.soft_cap * kLog2E);
      if (at.page == first_cut || at.page >= last_cuts) {
        const int position = (tiers.first_page() + at.page) * kPageTokens;
        hide(tiers.sink_end - position, coded_end[0] - position, coded_end[1] - position, y);
      }
      state_.template update<4>(y, out_, weight_);

      std::uint32_t b[4][2];
#pragma unroll
      for (int r = 0; r < State::kRows; ++r) {
        if constexpr (kInt2) {  // P lo, the same for all dimensions
          const float4 lo =
              load_shared_float4(scratch_ + kValueOffsets + 16U * static_cast<std::uint32_t>(State::row(lane_, r)));
          const float of_token[4] = {lo.x, lo.y, lo.z, lo.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            weight_[0] = fmaf(of_token[j], y[j][r][0], weight_[0]);
            weight_[1] = fmaf(of_token[j], y[j][r][1], weight_[1]);
          }
        }
        const float4 four = load_shared_float4(scratch_ + 256U + 16U * static_cast<std::uint32_t>(State::row(lane_, r)));
        const float gain[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          y[j][r][0] *= gain[j];
          y[j][r][1] *= gain[j];
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) probability_fragment<kWide>(y[j], b[j][0], b[j][1]);
      value_product(tile + values, b);
      ring_.release();
      if (next_page >= 0) issue(uniform(next_page));
      if (at.next()) continue;

      // The series is over. The factor 2^24 of the subnormals, kValueScale, and the place of the rows' fields; 1.5 is the
      // centre of the codes.
      const float factor = 16777216.0F / (kInt2 ? value_scale.get() : kValueScale);
      const auto series = static_cast<std::uint32_t>(at.page % paged::kPatterns);
      const std::uint32_t part = kHeadParts * static_cast<std::uint32_t>(item) + 1U + series;
      if constexpr (kInt2) {
        sum_over_rows(weight_[0]);
        sum_over_rows(weight_[1]);
        store(part, head, factor, factor / 16.0F, -1.0F);
      } else {
        store(part, head, factor, factor / 16.0F, 1.5F / kValueScale);
      }
      if (at.more == 0) break;
      at.next_series(pages);
      if constexpr (kMean) means_.jump(tiers.first_page() + at.page);
      second = false;
      clear_sums();
    }
  }

 private:
  using State = SoftmaxState<kWide>;

  [[nodiscard]] __device__ int query_lane() const { return kWide ? lane_ : lane_ & 15; }

  // The maximum stays.
  __device__ void clear_sums() {
    state_.sum[0] = state_.sum[1] = 0.0F;
#pragma unroll
    for (int i = 0; i < kTiles<D>; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) out_[i][c] = 0.0F;
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) weight_[c] = 0.0F;
  }

  __device__ void scale_sums(float factor) {
#pragma unroll
    for (int i = 0; i < kTiles<D>; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) out_[i][c] *= factor;
    }
  }
  // Over the lanes that share a column.
  static __device__ void sum_over_rows(float& x) {
#pragma unroll
    for (int d = kWide ? 4 : 2; d < 32; d *= 2) x += __shfl_xor_sync(~0U, x, d);
  }

  __device__ void load_query(const std::uint32_t* from, int steps) {
    __syncwarp();
    const int pieces = steps * p_.lanes / 2;  // of 16 bytes
    for (int i = lane_; i < pieces; i += 32) {
      store_shared_16(query_ + 16U * static_cast<std::uint32_t>(i), reinterpret_cast<const uint4*>(from)[i]);
    }
    __syncwarp();
  }
  // B fragments of an even and the following odd step; `step` even.
  [[nodiscard]] __device__ uint4 query_steps(int step) const {
    constexpr std::uint32_t kLanes = kWide ? 32 : 16;
    return load_shared_16(query_ + static_cast<std::uint32_t>(step) * kLanes * 8 +
                          16U * static_cast<std::uint32_t>(query_lane()));
  }
  [[nodiscard]] __device__ uint2 query_step(int step) const {  // of an even number of steps
    constexpr std::uint32_t kLanes = kWide ? 32 : 16;
    return load_shared_8(query_ + static_cast<std::uint32_t>(step & ~1) * kLanes * 8 +
                         16U * static_cast<std::uint32_t>(query_lane()) + 8U * static_cast<std::uint32_t>(step & 1));
  }

  __device__ void convert_gains(std::uint32_t gains, std::uint32_t table, float unit) {
    const std::uint32_t four = load_shared_4(gains + 4U * static_cast<std::uint32_t>(lane_));
    float4 factor;
    factor.x = unit * load_shared_float(table | ((four << 2) & 0x3FCU));
    factor.y = unit * load_shared_float(table | ((four >> 6) & 0x3FCU));
    factor.z = unit * load_shared_float(table | ((four >> 14) & 0x3FCU));
    factor.w = unit * load_shared_float(table | ((four >> 22) & 0x3FCU));
    __syncwarp();
    store_shared_float4(scratch_ + 16U * static_cast<std::uint32_t>(lane_), factor);
  }
  // Two token groups' (or tiles') fragments of one k-step from one word: one AND per register.
  static __device__ __forceinline__ void digit_product(float (&even)[4], float (&odd)[4], std::uint32_t word, std::uint32_t b0,
                                                       std::uint32_t b1) {
    const std::uint32_t high = word >> 8;
    mma(even, word & 0x00030003U, word & 0x00300030U, word & 0x000C000CU, word & 0x00C000C0U, b0, b1);
    mma(odd, high & 0x00030003U, high & 0x00300030U, high & 0x000C000CU, high & 0x00C000C0U, b0, b1);
  }
  static __device__ __forceinline__ void first_digit_product(float (&even)[4], float (&odd)[4], std::uint32_t word,
                                                             std::uint32_t b0, std::uint32_t b1, const float (&start)[4]) {
    const std::uint32_t high = word >> 8;
    mma(even, word & 0x00030003U, word & 0x00300030U, word & 0x000C000CU, word & 0x00C000C0U, b0, b1, start);
    mma(odd, high & 0x00030003U, high & 0x00300030U, high & 0x000C000CU, high & 0x00C000C0U, b0, b1, start);
  }

  __device__ __forceinline__ void key_product(std::uint32_t keys, int steps, const float (&start)[4], float (&acc)[4][4]) {
    const std::uint32_t lane_keys = keys + 16U * static_cast<std::uint32_t>(lane_);
    if (steps < 2) {
#pragma unroll
      for (int j = 0; j < 4; ++j) mma(acc[j], 0, 0, 0, 0, 0, 0, start);  // a copy that leaves the other path without copies
    } else {
      const uint4 a = load_shared_16(lane_keys);
      const uint4 b = query_steps(0);
      first_digit_product(acc[0], acc[1], a.x, b.x, b.y, start);
      first_digit_product(acc[2], acc[3], a.y, b.x, b.y, start);
      digit_product(acc[0], acc[1], a.z, b.z, b.w);
      digit_product(acc[2], acc[3], a.w, b.z, b.w);
    }
    int step = 2;
#pragma unroll 1
    for (; step + 3 < steps; step += 4) {
      const uint4 a = load_shared_16(lane_keys + static_cast<std::uint32_t>(step) * 256U);
      const uint4 b = query_steps(step);
      const uint4 a2 = load_shared_16(lane_keys + static_cast<std::uint32_t>(step) * 256U + 512U);
      const uint4 b2 = query_steps(step + 2);
      digit_product(acc[0], acc[1], a.x, b.x, b.y);
      digit_product(acc[2], acc[3], a.y, b.x, b.y);
      digit_product(acc[0], acc[1], a.z, b.z, b.w);
      digit_product(acc[2], acc[3], a.w, b.z, b.w);
      digit_product(acc[0], acc[1], a2.x, b2.x, b2.y);
      digit_product(acc[2], acc[3], a2.y, b2.x, b2.y);
      digit_product(acc[0], acc[1], a2.z, b2.z, b2.w);
      digit_product(acc[2], acc[3], a2.w, b2.z, b2.w);
    }
    if (step + 1 < steps) {
      const uint4 a = load_shared_16(lane_keys + static_cast<std::uint32_t>(step) * 256U);
      const uint4 b = query_steps(step);
      digit_product(acc[0], acc[1], a.x, b.x, b.y);
      digit_product(acc[2], acc[3], a.y, b.x, b.y);
      digit_product(acc[0], acc[1], a.z, b.z, b.w);
      digit_product(acc[2], acc[3], a.w, b.z, b.w);
    }
    if ((steps & 1) != 0) {
      const auto last = static_cast<std::uint32_t>(steps - 1);
      const uint2 a = load_shared_8(keys + last * 256U + 8U * static_cast<std::uint32_t>(lane_));
      constexpr std::uint32_t kLanes = kWide ? 32 : 16;
      const uint2 b = load_shared_8(query_ + last * kLanes * 8 + 8U * static_cast<std::uint32_t>(query_lane()));
      digit_product(acc[0], acc[1], a.x, b.x, b.y);
      digit_product(acc[2], acc[3], a.y, b.x, b.y);
    }
  }

  __device__ __forceinline__ void value_product(std::uint32_t values, const std::uint32_t (&b)[4][2]) {
    constexpr std::uint32_t kVector = D >= 128 ? 16 : 8;
    constexpr int kVectors = D / 8 / static_cast<int>(kVector);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // The sum of the weights: 1, and 4 where P carries 1/4.
      if constexpr (!kInt2) mma(weight_, 0x3C003C00U, 0x3C003C00U, 0x44004400U, 0x44004400U, b[j][0], b[j][1]);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const std::uint32_t at = values + static_cast<std::uint32_t>(j * 4 * D) + static_cast<std::uint32_t>(v) * 32 * kVector +
                                 kVector * static_cast<std::uint32_t>(lane_);
        if constexpr (kVector == 16) {
          const uint4 a = load_shared_16(at);
          digit_product(out_[8 * v], out_[8 * v + 1], a.x, b[j][0], b[j][1]);
          digit_product(out_[8 * v + 2], out_[8 * v + 3], a.y, b[j][0], b[j][1]);
          digit_product(out_[8 * v + 4], out_[8 * v + 5], a.z, b[j][0], b[j][1]);
          digit_product(out_[8 * v + 6], out_[8 * v + 7], a.w, b[j][0], b[j][1]);
        } else {
          const uint2 a = load_shared_8(at);
          digit_product(out_[0], out_[1], a.x, b[j][0], b[j][1]);
          digit_product(out_[2], out_[3], a.y, b[j][0], b[j][1]);
        }
      }
    }
  }

  // Tokens that the query of the lane's column c sees.
  [[nodiscard]] __device__ int seen_by_column(const Tiers& tiers, int head, int c) const {
    const int query = (head % p_.subgroups * kHeadsPerTile + State::head(lane_, c)) / p_.group;
    return paged::seen_by(tiers.n, min(query, p_.queries - 1), p_.queries);
  }

  // high: of the lane's columns.
  __device__ void hide(int low, int high_0, int high_1, float (&y)[4][State::kRows][2]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int r = 0; r < State::kRows; ++r) {
        const int token = paged::token_of(j, State::row(lane_, r));
        if (token < low || token >= high_0) y[j][r][0] = -INFINITY;
        if (token < low || token >= high_1) y[j][r][1] = -INFINITY;
      }
    }
  }

  // Row part + worker of the partial results. Rows g and g + 8 of a tile may carry different factors; centre times the weight
  // of the head comes off.
  __device__ void store(std::uint32_t part, int head, float low_factor, float high_factor, float centre) {
    state_.finish();
    const int n = min(kHeadsPerTile, p_.columns - head % p_.subgroups * kHeadsPerTile);
    const std::int64_t row = static_cast<std::int64_t>(part + worker_) * p_.stride_heads;
    const int t = lane_ % 4;
    if (!kWide && t >= 2) return;  // columns 4 .. 7
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int h = 2 * t + c;
      if (h >= n) continue;
      float* to = p_.partial_out + (row + h) * D + lane_ / 4;
      const float off = centre * weight_[c];
#pragma unroll
      for (int i = 0; i < kTiles<D>; ++i) {
        to[16 * i] = out_[i][c] * low_factor - off;
        to[16 * i + 8] = out_[i][c + 2] * high_factor - off;
      }
      if (lane_ < 4) p_.partial_sum[row + h] = make_float2(state_.max[c], state_.sum[c]);
    }
  }

  const DecodeParams& p_;
  int lane_;
  std::uint32_t worker_;
  std::uint32_t gain_table_, scratch_, query_;
  RopeMeans<kWide> means_;
  bool waited_ = false;
  TileRing ring_;
  State state_;
  float out_[kTiles<D>][4];
  float weight_[4];  // sum of the weights of digits; `int2`: [0], [1] the sum of P times lo
};

// Marks the row of a part in which the warp has nothing to do.
__device__ __forceinline__ void store_empty(const DecodeParams& p, std::uint32_t part, std::uint32_t worker, int lane) {
  if (lane < p.stride_heads) {
    p.partial_sum[static_cast<std::int64_t>(part + worker) * p.stride_heads + lane] = make_float2(-INFINITY, 0.0F);
  }
}

template <int D, bool kWide, bool kMean, bool kInt2>
__global__ void __maxnreg__((kAttendRegisters<D, kMean>)) attend_kernel(const __grid_constant__ DecodeParams p) {
  std::uint8_t* shared = dynamic_shared();
  let_successor_start();
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = uniform(thread / 32);
  const int warps = static_cast<int>(blockDim.x) / 32;
  const std::uint32_t mean_bytes = kMean ? RopeMeans<kWide>::table_bytes(p) : 0U;
  const std::uint32_t base = shared_address(shared);
  // Neighbours on the line go to different multiprocessors, so that all of them are busy when there is little to do.
  const std::uint32_t worker = static_cast<std::uint32_t>(warp) * gridDim.x + blockIdx.x;
  WarpAttention<D, kWide, kMean, kInt2> attention(
      p, base, base + kGainTableBytes + mean_bytes + static_cast<std::uint32_t>(warp) * p.warp_bytes, lane, worker);
  for (int n = thread; !kInt2 && n < 256; n += warps * 32) {
    auto* gains = reinterpret_cast<float*>(shared);
    gains[n] = n == 0 ? 0.0F : exp2_fast(static_cast<float>(n - 128) / 16.0F);
    const int value = n % paged::kValueGains;  // above it is the pattern
    gains[256 + n] = value == 0 ? 0.0F : exp2_fast(static_cast<float>(value - 40) / 8.0F);
  }
  if constexpr (kMean) RopeMeans<kWide>::fill_tables(p, shared + kGainTableBytes, thread, warps * 32);

  const Shares share = shares(p, lane);
  const std::uint32_t begin = worker * share.share;
  const std::uint32_t end = min(begin + share.share, share.total);
  SequenceStart at{p.batch, 0};
  if (begin < end) at = find_sequence(p, begin, lane);
  const std::uint32_t unit_cost = exact_cost(p);
  // Units of a tier that starts at `from` on the line whose first byte lies in [begin, end).
  const auto attend = [&](std::uint32_t from, int units, std::uint32_t cost, auto&& part_of, auto&& work) {
    const std::uint32_t length = static_cast<std::uint32_t>(units) * cost;
    if (length == 0 || from >= end || from + length <= begin) return;
    const auto count = [&](std::uint32_t limit) {
      return limit <= from ? 0 : static_cast<int>(min((limit - from + cost - 1) / cost, static_cast<std::uint32_t>(units)));
    };
    const int first = count(begin);
    const int last = count(end);
    if (first < last) work(first, last);
    // Where the piece begins within a unit, it touches a part in which it may have nothing to do.
    if (from + static_cast<std::uint32_t>(first) * cost > begin && first > 0 &&
        (first == last || part_of(first - 1) != part_of(first))) {
      attention.wait_once();
      store_empty(p, part_of(first - 1), worker, lane);
    }
  };
  for (int sequence = at.sequence; sequence < p.batch && at.begin < end; ++sequence) {
    const Tiers t = tiers(p, sequence);
    for (int head = 0; head < p.heads && at.begin < end; ++head) {
      const std::uint32_t part = kHeadParts * static_cast<std::uint32_t>(sequence * p.heads + head);
      const std::uint32_t exact = static_cast<std::uint32_t>(t.exact_blocks()) * unit_cost;
      const std::uint32_t coded = static_cast<std::uint32_t>(t.pages()) * page_cost<kInt2>(p, head);
      attend(
          at.begin, t.exact_blocks(), unit_cost, [&](int) { return part; },
          [&](int first, int last) { attention.attend_exact(sequence, head, t, first, last); });
      attend(
          at.begin + exact, t.pages(), page_cost<kInt2>(p, head),
          [&](int i) { return part + 1U + static_cast<std::uint32_t>(t.series_of(i)); },
          [&](int first, int last) { attention.attend_coded(sequence, head, t, first, last); });
      at.begin += exact + coded;
    }
  }
  attention.wait_once();  // of warps without work
}

}  // namespace oscar::cuda
