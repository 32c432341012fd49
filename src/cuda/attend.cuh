// The kernel of a decode, or the second of two: attention of all queries on all tiles, each warp on its piece of the line
// (decode_plan.cuh), then the merge of partial results.
//
// One warp works on one tile (a page of one KV head: 64 tokens) at a time, both products on tensor cores (digit_products.cuh).
// Gains, means and the softmax work on the logits between them. Tiles come by bulk copies into the warp's own ring.
#pragma once

#include "cuda/block_merge.cuh"
#include "cuda/digit_products.cuh"
#include "cuda/head_sums.cuh"
#include "cuda/int2_grids.cuh"
#include "cuda/prepare.cuh"
#include "cuda/ring.cuh"
#include "cuda/rope_means.cuh"
#include "cuda/softmax.cuh"

namespace oscar::cuda {

template <int D, bool kWide>
inline constexpr int kAttendWarps = D > 128 ? 8 : (kWide ? 12 : kMostWarps);  // of a block, at most
// Of 64 K for all lanes of a block.
template <int D, bool kWide, bool kMean, bool kInt2>
inline constexpr int kAttendRegisters = D > 128 ? 224 : (kWide ? 168 : (kMean || kInt2 ? 128 : 112));

// Whether blocks can prepare queries: there must be memory for it.
template <int D, bool kWide>
inline constexpr bool kPreparesInside = D <= 128 || !kWide;

// Shared memory of a block: gains of key bytes [256] and of value bytes [256], RoPE-mean table and steps, then per warp:
// scratch 512 bytes (`int2` 1024), barriers, heads of partial results, queries, mean weights, ring; then what prepares queries.
inline constexpr std::uint32_t kGainTableBytes = 2048;
template <bool kInt2>
inline constexpr std::uint32_t kScratchBytes = kInt2 ? kInt2ScratchBytes : 512;
inline constexpr std::uint32_t kBarrierBytes = 64;

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
  using Sums = HeadSums<D, kWide, kInt2>;

 public:
  // [begin, end): the warp's piece of the line.
  __device__ WarpAttention(const DecodeParams& params, std::uint32_t shared, std::uint8_t* warp_memory, int lane,
                           std::uint32_t worker, std::uint32_t begin, std::uint32_t end)
      : p_(params),
        lane_(lane),
        worker_(worker),
        begin_(begin),
        end_(end),
        gain_table_(shared),
        scratch_(shared_address(warp_memory)),
        query_(scratch_ + heads_offset() + sizeof(WarpHeads)),
        means_(params, lane, shared + kGainTableBytes, query_ + params.query_bytes, scratch_),
        heads_(reinterpret_cast<WarpHeads*>(warp_memory + heads_offset())),
        slot_(warp_memory + slot_offset(params)),
        ring_(scratch_ + slot_offset(params), scratch_ + kScratchBytes<kInt2>, params.stages, params.stage_bytes, lane) {
    if (lane == 0) heads_->open.sequence = heads_->aside.sequence = -1;
  }

  __host__ __device__ static constexpr std::uint32_t heads_offset() { return kScratchBytes<kInt2> + kBarrierBytes; }
  // From the start of a warp's shared memory to its ring, which is its slot in the end (partial_results.cuh).
  __host__ __device__ static std::uint32_t slot_offset(const DecodeParams& p) {
    return heads_offset() + sizeof(WarpHeads) + p.query_bytes + (kMean ? RopeMeans<kWide>::weight_bytes(p) : 0U);
  }

  // Once per warp, before anything but tiles is used: queries come from the kernel before, tables from the other warps.
  __device__ void wait_once() {
    if (waited_) return;
    waited_ = true;
    wait_for_predecessor();
    wait_for_block();
  }

  // The units of a head that belong to the warp's piece.
  __device__ void attend(const HeadSpan& span, const Tiers& tiers) {
    const auto units = [&](std::uint32_t limit, bool coded) {
      return coded ? units_before(limit, span.coded, tiers.pages(), page_cost<kInt2>(p_, span.kv))
                   : units_before(limit, span.begin, tiers.exact_blocks(), p_.exact_cost);
    };
    const int first_block = units(begin_, false);
    const int last_block = units(end_, false);
    const int first_page = units(begin_, true);
    const int last_page = units(end_, true);
    const int item = span.sequence * p_.heads + span.head;
    State state;
    Sums sums;
    if (first_block < last_block) {
      attend_exact(span, item, tiers, first_block, last_block, state, sums);
      if (first_page < last_page) sums.put_aside(p_, worker_, lane_, state);
    }
    if (first_page < last_page) attend_coded(span, item, tiers, first_page, last_page, state, sums);
    wait_once();
    state.finish();
    if (span.begin >= begin_ && span.end <= end_) {
      sums.write_output(p_, worker_, span, lane_, state);
      if (lane_ == 0 && p_.inside) p_.ready[item] = 0;
    } else {
      const bool ends = span.end < end_;
      sums.write(ends ? Sums::Layout::row(p_, worker_) : slot_, lane_, state);
      if (lane_ == 0)
        (ends ? heads_->aside : heads_->open) = {span.sequence, span.kv, span.first_row, span.begin, span.end, item};
    }
  }

 private:
  __device__ __forceinline__ void wait_for_queries(int item) {
    wait_once();
    if (p_.inside) wait_until_set(p_.ready + item);
  }

  // Units [begin, end) of the exact tier of a virtual head.
  __device__ __forceinline__ void attend_exact(const HeadSpan& span, int item, const Tiers& tiers, int begin, int end,
                                               State& state, Sums& sums) {
    const int kv = span.kv;
    const std::int32_t* table = p_.block_table.at(span.sequence, p_.sink / kBlockTokens + p_.ring, 0);
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
    wait_for_queries(item);
    load_query(p_.exact_query + static_cast<std::int64_t>(item) * (D / 16 * p_.lanes * 2), D / 32 * p_.lanes);

    float out[D / 16][4] = {};
    const float scale = p_.scale * kLog2E;
    int seen[kColumns];
    seen_by_columns(tiers, span.first_row, seen);
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
    sums.set([&](int i, int r, int c) { return out[i][2 * r + c]; });
  }

  // Pages [begin, end) of the coded tier, in the order of Tiers::page_of().
  __device__ __forceinline__ void attend_coded(const HeadSpan& span, int item, const Tiers& tiers, int begin, int end,
                                               State& state, Sums& all) {
    const int kv = span.kv;
    const int slots = p_.layer.slots[kv];
    constexpr auto kCodec = kInt2 ? paged::PageCodec::int2 : paged::PageCodec::spectral;
    const std::uint32_t bytes = kept(paged::head_bytes(slots, D, kCodec));
    const std::uint32_t gains = bytes - 2 * paged::row_data_bytes(kCodec);  // grids, of `int2`
    const std::uint32_t values = kept(paged::key_bytes(slots));
    const std::int32_t* table = p_.page_table.at(span.sequence, p_.page_columns, tiers.first_page());
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
    wait_for_queries(item);
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
      if (is_cut) hide(tiers, span.first_row, position, y);
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

      // The series is over, and with it the basis of its sums.
      const bool over = at.more == 0;
      if (!kInt2 || over) all.add_coded(p_, worker_, kv, tiers.series_pattern(at.page % paged::kPatterns), lane_, state, sums);
      if (over) return;
      if constexpr (!kInt2) {
        all.put_aside(p_, worker_, lane_, state);
        sums = ValueSums<D, kColumns>();
      }
      at.next_series(pages);
      if constexpr (kMean) means_.jump(tiers.first_page() + at.page);
      second = false;
    }
  }

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
  __device__ void seen_by_columns(const Tiers& tiers, int first_row, int (&seen)[kColumns]) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int query = (first_row + State::head(lane_, c)) / p_.group;
      seen[c] = paged::seen_by(tiers.n, min(query, p_.queries - 1), p_.queries);
    }
  }

  // Tokens of the page at `position` that are exact for the query of a column.
  __device__ void hide(const Tiers& tiers, int first_row, int position, float (&y)[4][kRows][kColumns]) const {
    int seen[kColumns];
    seen_by_columns(tiers, first_row, seen);
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

  const DecodeParams& p_;
  int lane_;
  std::uint32_t worker_, begin_, end_;
  std::uint32_t gain_table_, scratch_, query_;
  RopeMeans<kWide> means_;
  bool waited_ = false;
  WarpHeads* heads_;
  std::uint8_t* slot_;
  TileRing ring_;
};

template <int D, bool kWide, bool kMean, bool kInt2>
__global__ void __maxnreg__((kAttendRegisters<D, kWide, kMean, kInt2>)) attend_kernel(const __grid_constant__ DecodeParams p) {
  std::uint8_t* shared = dynamic_shared();
  let_successor_start();
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = uniform(thread / 32);
  const int warps = static_cast<int>(blockDim.x) / 32;
  const std::uint32_t mean_bytes = kMean ? RopeMeans<kWide>::table_bytes(p) : 0U;
  const std::uint32_t base = shared_address(shared);
  for (int n = thread; !kInt2 && n < 256; n += warps * 32) {
    auto* gains = reinterpret_cast<float*>(shared);
    gains[n] = n == 0 ? 0.0F : exp2_fast(static_cast<float>(n - 128) / 16.0F);
    const int value = n % paged::kValueGains;  // above it is the pattern
    gains[256 + n] = value == 0 ? 0.0F : exp2_fast(static_cast<float>(value - 40) / 8.0F);
  }
  if constexpr (kMean) RopeMeans<kWide>::fill_tables(p, shared + kGainTableBytes, thread, warps * 32);

  const Shares share = shares(p, lane);
  const std::uint32_t worker = blockIdx.x * static_cast<std::uint32_t>(warps) + static_cast<std::uint32_t>(warp);
  const std::uint32_t begin = worker * share.share;
  const std::uint32_t end = min(begin + share.share, share.total);
  std::uint8_t* warps_shared = shared + kGainTableBytes + mean_bytes;
  using Attention = WarpAttention<D, kWide, kMean, kInt2>;
  Attention attention(p, base, warps_shared + static_cast<std::uint32_t>(warp) * p.warp_bytes, lane, worker, begin, end);
  if constexpr (kPreparesInside<D, kWide>) {
    if (p.inside && warp < kPrepareThreads / 32) {
      auto& memory =
          *reinterpret_cast<PrepareMemory<D, kWide ? 8 : 4>*>(warps_shared + static_cast<std::uint32_t>(warps) * p.warp_bytes);
      if (thread == 0) {
        wait_for_predecessor();
        memory.item = claim(p);
      }
      prepare_inside(p, memory);
    }
  }
  if (begin < end) {
    for (LineWalk<kInt2> walk(p, begin, lane); walk.span().begin < end; walk.next())
      attention.attend(walk.span(), walk.tiers());
  }
  attention.wait_once();  // of warps without work
  __syncthreads();
  BlockMerge<D, kWide, kInt2>(p, share.share, warps_shared + Attention::heads_offset(),
                              warps_shared + Attention::slot_offset(p), reinterpret_cast<std::uint32_t*>(shared), lane, warp)
      .run();
}

}  // namespace oscar::cuda
