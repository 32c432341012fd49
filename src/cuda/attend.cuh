// Second kernel of a decode: attention of all queries on all tiles, one partial result per warp and part (see decode_plan.cuh).
//
// One warp works on one tile (a page of one KV head: 64 tokens) at a time, both products on tensor cores (digit_products.cuh).
// Gains, means and the softmax work on the logits between them. Tiles come by bulk copies into the warp's own ring.
#pragma once

#include "cuda/decode_plan.cuh"
#include "cuda/digit_products.cuh"
#include "cuda/int2_grids.cuh"
#include "cuda/ring.cuh"
#include "cuda/rope_means.cuh"
#include "cuda/softmax.cuh"

namespace oscar::cuda {

template <int D, bool kWide>
inline constexpr int kAttendWarps = D > 128 ? 8 : (kWide ? 12 : kMostWarps);  // of a block, at most
// Of 64 K for all lanes of a block.
template <int D, bool kWide, bool kMean>
inline constexpr int kAttendRegisters = D > 128 ? 224 : (kWide ? 168 : (kMean ? 128 : 112));

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
  using State = SoftmaxState<kWide>;
  static constexpr int kRows = State::kRows;
  static constexpr int kColumns = State::kColumns;

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
    load_query(p_.exact_query + static_cast<std::int64_t>(item) * (D / 16 * p_.lanes * 2), D / 32 * p_.lanes);

    State state;
    float out[D / 16][4] = {};
    const float scale = p_.scale * kLog2E;
    int seen[kColumns];
    seen_by_columns(tiers, head, seen);
    for (int unit = begin; unit < end; ++unit) {
      const int position = tiers.block_position(unit);
      const bool is_sink = unit < tiers.sink_blocks();
      const int low = is_sink ? 0 : max(0, tiers.recent_begin - position);
      const int high = min(kBlockTokens, (is_sink ? tiers.sink_end : tiers.n) - position);

      float acc[4] = {};
      const std::uint32_t keys = ring_.acquire();
      const std::uint32_t key_row = keys + static_cast<std::uint32_t>((lane_ & 15) * D * 2);
#pragma unroll
      for (int step = 0; step < D / 16; ++step) {
        std::uint32_t a[4];
        load_matrix(a, key_row + static_cast<std::uint32_t>(((2 * step + lane_ / 16) ^ (lane_ & 7)) * 16));
        const uint2 b = exact_query_step(step);
        mma(acc, a[0], a[1], a[2], a[3], b.x, b.y);
      }
      ring_.release();
      issue(2 * (unit - begin) + ring_.stages());

      float y[1][kRows][kColumns];
      State::pick(acc, y[0]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) y[0][r][c] = y[0][r][c] * scale - state.max[c];
      }
      if (p_.soft_cap > 0.0F) state.template soft_cap<1>(y, p_.soft_cap * kLog2E);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int first = is_sink ? 0 : max(low, seen[c] - p_.recent - position);
        const int last = min(high, seen[c] - position);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const int row = State::row(lane_, r);
          y[0][r][c] = row >= first && row < last ? y[0][r][c] : -INFINITY;
        }
      }
      state.template update<1>(y, [&](const float(&factor)[kColumns]) {
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
#pragma unroll
          for (int c = 0; c < 4; ++c) out[i][c] *= factor[c % 2 * (kColumns - 1)];
        }
      });
      const std::uint32_t b0 = transpose(pack_half2(y[0][0][0], y[0][0][kColumns - 1]));
      const std::uint32_t b1 = transpose(pack_half2(y[0][1][0], y[0][1][kColumns - 1]));

      // A masked row may hold anything, NaN included: 0 times that must not reach the sum.
      const auto keep = [&](int token) {
        return (token >= low && token < high ? 0xFFFFU : 0U) | (token + 1 >= low && token + 1 < high ? 0xFFFF0000U : 0U);
      };
      const std::uint32_t keep_low = keep(lane_ % 4 * 2);
      const std::uint32_t keep_high = keep(lane_ % 4 * 2 + 8);
      const std::uint32_t values = ring_.acquire();
      const std::uint32_t value_row = values + static_cast<std::uint32_t>(((lane_ & 7) + lane_ / 16 * 8) * D * 2);
#pragma unroll
      for (int i = 0; i < D / 16; ++i) {
        std::uint32_t a[4];
        load_matrix_transposed(a, value_row + static_cast<std::uint32_t>(((2 * i + (lane_ / 8 & 1)) ^ (lane_ & 7)) * 16));
        mma(out[i], a[0] & keep_low, a[1] & keep_low, a[2] & keep_high, a[3] & keep_high, b0, b1);
      }
      ring_.release();
      issue(2 * (unit - begin) + 1 + ring_.stages());
    }
    store(kHeadParts * static_cast<std::uint32_t>(item), head, state, [&](int i, int r, int c) { return out[i][2 * r + c]; });
  }

  // Pages [begin, end) of the coded tier, in the order of Tiers::page_of().
  __device__ void attend_coded(int sequence, int head, const Tiers& tiers, int begin, int end) {
    const int item = sequence * p_.heads + head;
    const int kv = head / p_.subgroups;
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
    // Lanes 0 .. 15 turn gains of keys into factors, lanes 16 .. 31 those of values. Fields of a later group of tokens stand
    // higher.
    const float field = lane_ < 16 ? 0.25F : 1.0F;
    const float fields[4] = {1.0F, field, field * field, field * field * field};
    const std::uint32_t gain_table = kept(gain_table_ + (lane_ < 16 ? 0U : kGainTableBytes / 2));
    // The sum of the upper bytes takes off what that of the lower ones starts at, too.
    const auto lower_base = static_cast<float>(query_base(slots, kCodec));
    const float upper_zero = kSumZero + kSumZero / lower_base;
    float upper_unit[kColumns], unit[kColumns], constant[kColumns], query_sum[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int h = State::head(lane_, c);
      unit[c] = header[h];
      constant[c] = header[8 + h];
      query_sum[c] = header[16 + h];
      upper_unit[c] = unit[c] * lower_base;
    }
    load_query(p_.coded_query + static_cast<std::int64_t>(item) * (p_.query_bytes / 4),
               static_cast<int>(coded_query_bytes(slots, kColumns) / 16));

    // Pages of which a part belongs to the exact tier, for all queries or for some.
    const int first_cut = tiers.sink_end % kPageTokens != 0 ? 0 : -1;
    const int last_cuts = max(tiers.n - (p_.queries - 1) - p_.recent, 0) / kPageTokens - tiers.first_page();

    State state;
    ValueSums<D, kColumns> sums;
    typename RopeMeans<kWide>::Pair means;
    // Ids are read a page earlier than they are needed.
    std::int32_t page_after = ahead.left > 0 ? __ldg(table + ahead.page * stride) : -1;
    if (!ahead.next()) ahead.next_series(pages);
    const std::int32_t* next_id = table + ahead.page * stride;
    bool second = false;  // of two pages whose means are known
    if constexpr (kMean) means_.start(item, tiers.first_page() + at.page);
    for (;;) {
      const std::int32_t next_page = page_after;
      page_after = ahead.left > 0 ? __ldg(next_id) : -1;
      next_id += paged::kPatterns * stride;
      if (!ahead.next()) {
        ahead.next_series(pages);
        next_id = table + ahead.page * stride;
      }
      const std::uint32_t tile = ring_.acquire();
      const bool is_cut = at.page == first_cut || at.page >= last_cuts;
      const int position = (tiers.first_page() + at.page) * kPageTokens;
      if constexpr (kInt2) {
        LaneGrids lane_grids(tile + gains, lane_);
        if (is_cut) lane_grids.keep(tiers.sink_end - position, tiers.coded_end - position, lane_);
        __syncwarp();
        lane_grids.store(scratch_, fields, lane_);
      } else {
        convert_gains(tile + gains, gain_table, fields);
      }
      if constexpr (kMean) {
        if (!second) {
          means_.logits(means);
        } else {
          RopeMeans<kWide>::advance(means);
        }
      }
      __syncwarp();  // scratch

      float y[4][kRows][kColumns];
      constexpr int kFields = kWide && D > 128 ? 2 : 4;  // of key bytes at a time, as registers allow
#pragma unroll
      for (int first = 0; first < 4; first += kFields) {
        std::uint32_t acc[kFields][kColumns][4];
        key_product<kFields, kColumns>(tile, query_, steps, first, lane_, acc);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const std::uint32_t row = scratch_ + 16U * static_cast<std::uint32_t>(State::row(lane_, r));
          const float4 four = load_shared_float4(row);
          const float gain[4] = {four.x, four.y, four.z, four.w};
          float lo[4] = {};
          if constexpr (kInt2) {
            const float4 of_token = load_shared_float4(row + kKeyOffsets);
            lo[0] = of_token.x;
            lo[1] = of_token.y;
            lo[2] = of_token.z;
            lo[3] = of_token.w;
          }
#pragma unroll
          for (int f = 0; f < kFields; ++f) {
            const int j = first + f;
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
              float start = constant[c] - state.max[c];
              if constexpr (kMean) start += means.page[0][j][r][c];
              if constexpr (kInt2) start = fmaf(lo[j], query_sum[c], start);
              const float product = fmaf(__uint_as_float(acc[f][c][2 * r + 1]), unit[c],
                                         (__uint_as_float(acc[f][c][2 * r]) - upper_zero) * upper_unit[c]);
              y[j][r][c] = fmaf(product, gain[j], start);
            }
          }
        }
      }
      second = !second;
      if (p_.soft_cap > 0.0F) state.template soft_cap<4>(y, p_.soft_cap * kLog2E);
      if (is_cut) hide(tiers, head, position, y);
      state.template update<4>(y, [&](const float(&factor)[kColumns]) { sums.multiply(factor); });

      if constexpr (kInt2) {  // P lo, the same for all dimensions
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float4 lo =
              load_shared_float4(scratch_ + kValueOffsets + 16U * static_cast<std::uint32_t>(State::row(lane_, r)));
          const float of_token[4] = {lo.x, lo.y, lo.z, lo.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int c = 0; c < kColumns; ++c) sums.weight[c] = fmaf(of_token[j], y[j][r][c], sums.weight[c]);
          }
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4 four = load_shared_float4(scratch_ + 256U + 16U * static_cast<std::uint32_t>(State::row(lane_, r)));
        const float gain[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            y[j][r][c] *= gain[j];
            if constexpr (!kInt2) sums.weight[c] += y[j][r][c];
          }
        }
      }
      value_product<D, kColumns>(tile + values, y, lane_, sums);
      ring_.release();
      if (next_page >= 0) issue(uniform(next_page));
      if (at.next()) continue;

      // The series is over. 1.5 is the centre of the codes.
      const auto series = static_cast<std::uint32_t>(at.page % paged::kPatterns);
      const std::uint32_t part = kHeadParts * static_cast<std::uint32_t>(item) + 1U + series;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) sums.weight[c] = State::sum_over_rows(sums.weight[c]) * (kInt2 ? 1.0F : -1.5F);
      store(part, head, state, [&](int i, int r, int c) {
        constexpr float kField[4] = {1.0F, 0.25F, 0.0625F, 0.015625F};
        return fmaf(sums.of[i][r][c], kField[i % 4], sums.weight[c]);
      });
      if (at.more == 0) return;
      at.next_series(pages);
      if constexpr (kMean) means_.jump(tiers.first_page() + at.page);
      second = false;
      sums = ValueSums<D, kColumns>();
#pragma unroll
      for (int c = 0; c < kColumns; ++c) state.sum[c] = 0.0F;  // the maximum stays
    }
  }

 private:
  __device__ void load_query(const std::uint32_t* from, int pieces) {  // of 16 bytes
    __syncwarp();
    for (int i = lane_; i < pieces; i += 32) {
      store_shared_16(query_ + 16U * static_cast<std::uint32_t>(i), reinterpret_cast<const uint4*>(from)[i]);
    }
    __syncwarp();
  }
  [[nodiscard]] __device__ uint2 exact_query_step(int step) const {
    constexpr std::uint32_t kLanes = kWide ? 32 : 16;
    const auto at = static_cast<std::uint32_t>(4 * State::head_of_column(lane_ / 4) + lane_ % 4);
    return load_shared_8(query_ + static_cast<std::uint32_t>(step & ~1) * kLanes * 8 + 16U * at +
                         8U * static_cast<std::uint32_t>(step & 1));
  }

  __device__ void convert_gains(std::uint32_t gains, std::uint32_t table, const float (&fields)[4]) {
    const std::uint32_t four = load_shared_4(gains + 4U * static_cast<std::uint32_t>(lane_));
    float4 factor;
    factor.x = load_shared_float(table | ((four << 2) & 0x3FCU));
    factor.y = fields[1] * load_shared_float(table | ((four >> 6) & 0x3FCU));
    factor.z = fields[2] * load_shared_float(table | ((four >> 14) & 0x3FCU));
    factor.w = fields[3] * load_shared_float(table | ((four >> 22) & 0x3FCU));
    __syncwarp();
    store_shared_float4(scratch_ + 16U * static_cast<std::uint32_t>(lane_), factor);
  }

  // Tokens that the queries of the lane's columns see.
  __device__ void seen_by_columns(const Tiers& tiers, int head, int (&seen)[kColumns]) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int query = (head % p_.subgroups * kHeadsPerTile + State::head(lane_, c)) / p_.group;
      seen[c] = paged::seen_by(tiers.n, min(query, p_.queries - 1), p_.queries);
    }
  }

  // Tokens of the page at `position` that are exact for the query of a column.
  __device__ void hide(const Tiers& tiers, int head, int position, float (&y)[4][kRows][kColumns]) const {
    int seen[kColumns];
    seen_by_columns(tiers, head, seen);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int token = position + paged::token_of(j, State::row(lane_, r));
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          if (token < tiers.sink_end || token >= seen[c] - p_.recent) y[j][r][c] = -INFINITY;
        }
      }
    }
  }

  // Row part + worker of the partial results. value(i, r, c): of dimension 16 i + g + 8 r.
  template <class Value>
  __device__ void store(std::uint32_t part, int head, State state, Value&& value) const {
    state.finish();
    const int n = min(kHeadsPerTile, p_.columns - head % p_.subgroups * kHeadsPerTile);
    const std::int64_t row = static_cast<std::int64_t>(part + worker_) * p_.stride_heads;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int h = State::head(lane_, c);
      if (h >= n) continue;
      float* to = p_.partial_out + (row + h) * D + lane_ / 4;
#pragma unroll
      for (int i = 0; i < D / 16; ++i) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) to[16 * i + 8 * r] = value(i, r, c);
      }
      if (lane_ < 4) p_.partial_sum[row + h] = make_float2(state.max[c], state.sum[c]);
    }
  }

  const DecodeParams& p_;
  int lane_;
  std::uint32_t worker_;
  std::uint32_t gain_table_, scratch_, query_;
  RopeMeans<kWide> means_;
  bool waited_ = false;
  TileRing ring_;
};

// Marks the row of a part in which the warp has nothing to do.
__device__ __forceinline__ void store_empty(const DecodeParams& p, std::uint32_t part, std::uint32_t worker, int lane) {
  if (lane < p.stride_heads) {
    p.partial_sum[static_cast<std::int64_t>(part + worker) * p.stride_heads + lane] = make_float2(-INFINITY, 0.0F);
  }
}

template <int D, bool kWide, bool kMean, bool kInt2>
__global__ void __maxnreg__((kAttendRegisters<D, kWide, kMean>)) attend_kernel(const __grid_constant__ DecodeParams p) {
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
      const std::uint32_t exact = static_cast<std::uint32_t>(t.exact_blocks()) * p.exact_cost;
      const std::uint32_t coded = static_cast<std::uint32_t>(t.pages()) * page_cost<kInt2>(p, head);
      attend(
          at.begin, t.exact_blocks(), p.exact_cost, [&](int) { return part; },
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
