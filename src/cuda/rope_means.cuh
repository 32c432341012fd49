// RoPE means of coded keys: Re(sum over pairs of c e^(i theta t)) is part of the logit of token t.
//
// About a page's middle m, t = m + x, the page has the weights c' = c e^(i theta m), and its logits are E(x) + O(x),
// E = sum Re(c') cos(theta x), O = - sum Im(c') sin(theta x), with E(-x) = E(x), O(-x) = -O(x): two products of static tables
// [32 x, pairs] with weights [pairs, columns]. Two pages of a series at a time: in tiles that are not wide, columns 2 h and
// 2 h + 1 are head h at the first and at the second page, so that one product serves both; in wide tiles the tables are read
// once for two products. The weights live in shared memory and are turned on from page to page of a series, by
// 256 tokens, those of fast pairs only (LayerView::n_turned_pairs): what slow ones add is a polynomial over eight pages
// (mean_series.h), whose coefficients are a product of static tables with their weights, and whose values one more product
// adds. A float4 is the real and imaginary parts of two neighbouring pairs of a column: pairs 2t, 2t + 1 (part 0) and 2t + 8,
// 2t + 9 (part 1) of 16.
#pragma once

#include "cuda/decode_plan.cuh"
#include "cuda/mean_series.h"
#include "cuda/softmax.cuh"

namespace oscar::cuda {

// e^(i 2 pi turns).
__device__ __forceinline__ float2 turn_by(double turns) {
  float2 result;
  sincospif(2.0F * static_cast<float>(turns - rint(turns)), &result.y, &result.x);
  return result;
}

template <bool kWide>
class RopeMeans {
  using State = SoftmaxState<kWide>;

 public:
  // table: shared address of what fill_tables() wrote. weights, scratch: the warp's own shared memory, weight_bytes() and 512
  // bytes.
  __device__ RopeMeans(const DecodeParams& params, int lane, std::uint32_t table, std::uint32_t weights, std::uint32_t scratch)
      : p_(params), lane_(lane), table_(table), weights_(weights), scratch_(scratch) {}

  // Running weights, per warp and 16 pairs, a float4 per column, t and part: wide, of the page to come; else of the page two
  // pages of the series before it.
  static constexpr std::uint32_t kStepBytes = kWide ? 1024U : 512U;
  __host__ __device__ static std::uint32_t weight_bytes(const DecodeParams& p) {
    return static_cast<std::uint32_t>(p.layer.n_pairs / 16) * kStepBytes;
  }
  // Of a block: the table, the turns and the tables of slow pairs.
  __host__ __device__ static std::uint32_t table_bytes(const DecodeParams& p) {
    return static_cast<std::uint32_t>(p.layer.n_turned_pairs * 128 + p.layer.n_pairs * 16 + 2 * series_halves(p));
  }
  // By all threads of a block: the table of fast pairs; twice e^(i 256 k theta) of pairs 2 i, 2 i + 1, cosines and sines: k =
  // 2, of slow pairs 8, then k = 3 and 9; of wide tiles k = 1 for all, then 8; then the tables of slow pairs.
  static __device__ void fill_tables(const DecodeParams& p, std::uint8_t* to, int thread, int threads) {
    auto* table = reinterpret_cast<uint4*>(to);
    const int fast = p.layer.n_turned_pairs;
    const int pieces = fast * 8;
    for (int i = thread; i < pieces; i += threads) table[i] = reinterpret_cast<const uint4*>(p.layer.mean_table)[i];
    uint4* series = table + pieces + p.layer.n_pairs;
    for (int i = thread; i < series_halves(p) / 8; i += threads)
      series[i] = reinterpret_cast<const uint4*>(p.layer.series_tables)[i];
    auto* turns = reinterpret_cast<float*>(table + pieces);
    for (int i = thread; i < 2 * p.layer.n_pairs; i += threads) {
      const int later = i < p.layer.n_pairs ? 0 : 1;
      const int pair = i - later * p.layer.n_pairs;
      const int steps = kWide ? (later == 0 ? 1 : kGroupPages) : (pair < fast ? 2 : kGroupPages) + later;
      const float2 turn = turn_by(p.layer.turns[pair] * (steps * kSeriesStep));
      float* both = turns + i / 2 * 4 + i % 2;
      both[0] = turn.x;
      both[2] = turn.y;
    }
  }

  // Before the first page of a virtual head's coded tier.
  __device__ void start(int item, int page) {
    constexpr int kParts = static_cast<int>(kStepBytes / 512U);
    const float4* from = p_.mean_query + static_cast<std::int64_t>(item) * (p_.layer.n_pairs / 16 * kParts * 32);
    const int before = kWide ? 0 : 2 * kSeriesStep;
    const double middle = page * kPageTokens + (kPageTokens - 1) / 2.0;
    turn_all(middle - before, middle - group_offset(0) - kGroupPages * kSeriesStep,
             [&](std::uint32_t place) { return from[place]; });
    page_ = page;
    turn_ = 0;
  }
  // To a page of another series.
  __device__ void jump(int page) {
    // Weights of slow pairs are those of the group before the next one.
    const int group = page_ + (kGroupTurns - turn_) % kGroupTurns * (2 * paged::kPatterns);
    turn_all((page - page_) * kPageTokens, (page - group) * kPageTokens,
             [&](std::uint32_t place) { return load_shared_float4(weights_ + 16U * place); });
    page_ = page;
    turn_ = 0;
  }

  // Mean logits of a page of a series and the next one: groups of 16 tokens, rows, columns.
  struct Pair {
    float page[2][4][State::kRows][State::kColumns];
  };
  // Of this page and the next; moves on by two pages.
  __device__ __forceinline__ void logits(Pair& pages) {
    const int steps = p_.layer.n_turned_pairs / 16;
    const int fast_steps = p_.layer.n_fast_pairs / 16;
    const std::uint32_t turns = lane_turns(later());
    if (has_slow() && turn_ == 0) start_group();
    float even[kProducts][2][4] = {};  // [..][x / 16]
    float odd[kProducts][2][4] = {};
    // Slow pairs, and slower ones of the others: their tables hold cos - 1, so that binary16 rounds the small difference only.
    float still[kProducts];
#pragma unroll
    for (int k = 0; k < kProducts; ++k) still[k] = still_[k];
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      std::uint32_t real[kProducts][2], imaginary[kProducts][2];  // [..][half of the k-step]
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const std::uint32_t at = place(step, part);
        float4 c;
        float4 by;
        if constexpr (kWide) {
          c = load_shared_float4(at);
          by = load_shared_float4(turns + 16U * static_cast<std::uint32_t>(step * 8 + 4 * part));
        } else {
          c = turn_on(at, turns, step, part);
        }
#pragma unroll
        for (int k = 0; k < kProducts; ++k) {
          real[k][part] = pack_half2(c.x, c.y);
          imaginary[k][part] = pack_half2(c.z, c.w);
          if (step >= fast_steps) still[k] += c.x + c.y;
          if constexpr (kWide) c = turned(c, by);
        }
        if constexpr (kWide) store_shared_float4(at, c);
      }
      const std::uint32_t table = table_ + static_cast<std::uint32_t>(step) * 2048U + 16U * static_cast<std::uint32_t>(lane_);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint4 cosines = load_shared_16(table + 512U * static_cast<std::uint32_t>(e));
        const uint4 sines = load_shared_16(table + 512U * static_cast<std::uint32_t>(e + 2));
#pragma unroll
        for (int k = 0; k < kProducts; ++k) {
          mma(even[k][e], cosines.x, cosines.y, cosines.z, cosines.w, real[k][0], real[k][1]);
          mma(odd[k][e], sines.x, sines.y, sines.z, sines.w, imaginary[k][0], imaginary[k][1]);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kProducts; ++k) {
      add_parts(even[k], odd[k], still[k], [&](int j, int c, float low, float high) {
        logit(pages, k, j, 0, c) = low;
        logit(pages, k, j, 1, c) = high;
      });
    }
    if (has_slow()) add_group(pages);
    page_ += 2 * paged::kPatterns;
  }
  // Makes the second page the first one.
  static __device__ __forceinline__ void advance(Pair& pages) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int r = 0; r < State::kRows; ++r) {
#pragma unroll
        for (int c = 0; c < State::kColumns; ++c) pages.page[0][j][r][c] = pages.page[1][j][r][c];
      }
    }
  }

 private:
  static constexpr int kProducts = kWide ? 2 : 1;  // for two pages

  [[nodiscard]] __device__ bool has_slow() const { return p_.layer.n_turned_pairs < p_.layer.n_pairs; }
  // Of the tables of slow pairs.
  __host__ __device__ static int series_halves(const DecodeParams& p) {
    const int slow = p.layer.n_pairs - p.layer.n_turned_pairs;
    return slow > 0 ? slow * kCoefficientHalves + kValueHalves : 0;
  }
  // Shared address of what the lane's pairs turn by, of the first or the second kind.
  [[nodiscard]] __device__ std::uint32_t lane_turns(bool second) const {
    return table_ +
           static_cast<std::uint32_t>(p_.layer.n_turned_pairs * 128 + (second ? p_.layer.n_pairs * 8 : 0) + 16 * (lane_ % 4));
  }
  [[nodiscard]] __device__ std::uint32_t series_tables() const {
    return table_ + static_cast<std::uint32_t>(p_.layer.n_turned_pairs * 128 + p_.layer.n_pairs * 16 + 16 * lane_);
  }
  // Turned weights of the lane's column; those of the first page, or of its group, stay.
  __device__ __forceinline__ float4 turn_on(std::uint32_t at, std::uint32_t turns, int step, int part) const {
    const float4 by = load_shared_float4(turns + 16U * static_cast<std::uint32_t>(step * 8 + 4 * part));
    const float4 c = turned(load_shared_float4(at), by);
    __syncwarp();
    if (!later()) store_shared_float4(at, c);
    return c;
  }
  // Coefficients of the next eight pages, for every other one.
  __device__ __forceinline__ void start_group() {
    const std::uint32_t turns = lane_turns(kWide || later());
    float sums[kProducts][4] = {};
#pragma unroll
    for (int k = 0; k < kProducts; ++k) still_[k] = 0;
    const int first = p_.layer.n_turned_pairs / 16;
#pragma unroll 1
    for (int step = first; step < p_.layer.n_pairs / 16; ++step) {
      std::uint32_t real[kProducts][2], imaginary[kProducts][2];
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        float4 c = turn_on(place(step, part), turns, step, part);
#pragma unroll
        for (int k = 0; k < kProducts; ++k) {
          if (k == 1)
            c = turned(c, load_shared_float4(lane_turns(false) + 16U * static_cast<std::uint32_t>(step * 8 + 4 * part)));
          real[k][part] = pack_half2(c.x, c.y);
          imaginary[k][part] = pack_half2(c.z, c.w);
          still_[k] += c.x + c.y;
        }
      }
      const uint4 of = load_shared_16(series_tables() + 512U * static_cast<std::uint32_t>(step - first));
#pragma unroll
      for (int k = 0; k < kProducts; ++k) {
        mma(sums[k], of.x, 0, of.y, 0, real[k][0], real[k][1]);
        mma(sums[k], of.z, 0, of.w, 0, imaginary[k][0], imaginary[k][1]);
      }
    }
#pragma unroll
    for (int k = 0; k < kProducts; ++k) coefficients_[k] = transpose(pack_half2(sums[k][0], sums[k][1]));
  }
  // Adds what slow pairs are at the tokens of two pages.
  __device__ __forceinline__ void add_group(Pair& pages) {
    const int slow = p_.layer.n_pairs - p_.layer.n_turned_pairs;
    const std::uint32_t values = series_tables() + static_cast<std::uint32_t>(2 * kCoefficientHalves * slow + 1024 * turn_);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint4 of = load_shared_16(values + 512U * static_cast<std::uint32_t>(j / 2));
#pragma unroll
      for (int k = 0; k < kProducts; ++k) {
        float* const at[4] = {&logit(pages, k, j, 0, 0), &logit(pages, k, j, 0, 1), &logit(pages, k, j, 1, 0),
                              &logit(pages, k, j, 1, 1)};
        float sums[4] = {*at[0], *at[1], *at[2], *at[3]};
        mma(sums, j % 2 == 0 ? of.x : of.z, j % 2 == 0 ? of.y : of.w, 0, 0, coefficients_[k], 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) *at[i] = sums[i];
      }
    }
    turn_ = (turn_ + 1) % kGroupTurns;
  }

  // Weights become load(place) e^(i theta positions), those of slow pairs load(place) e^(i theta slow_positions).
  template <class Load>
  __device__ __forceinline__ void turn_all(double positions, double slow_positions, Load&& load) {
    const int n_pairs = p_.layer.n_pairs;
    for (int base = 0; base < n_pairs; base += 64) {  // e^(i theta positions) of 64 pairs at a time through the scratch
      __syncwarp();
      for (int i = base + lane_; i < min(n_pairs, base + 64); i += 32) {
        const std::uint32_t to =
            scratch_ + 16U * static_cast<std::uint32_t>((i - base) / 2) + 4U * static_cast<std::uint32_t>(i % 2);
        const float2 turn = turn_by(p_.layer.turns[i] * (i < p_.layer.n_turned_pairs ? positions : slow_positions));
        store_shared_float(to, turn.x);
        store_shared_float(to + 8U, turn.y);
      }
      __syncwarp();
      constexpr int kStepPlaces = static_cast<int>(kStepBytes / 16U);
      for (int i = base / 16 * kStepPlaces + lane_; i < min(n_pairs, base + 64) / 16 * kStepPlaces; i += 32) {
        const int eighth = i / (kStepPlaces / 2) * 4 + i % 4 - base / 2;  // which float4 of turns
        const float4 by = load_shared_float4(scratch_ + 16U * static_cast<std::uint32_t>(eighth));
        const auto at = static_cast<std::uint32_t>(i);
        store_shared_float4(weights_ + 16U * at, turned(load(at), by));
      }
    }
    __syncwarp();
  }
  // Of product k: the lane's column c of tile j, row g or g + 8.
  [[nodiscard]] static __device__ float& logit(Pair& pages, int k, int j, int row, int c) {
    return pages.page[kWide ? k : c][j][row][kWide ? c : 0];
  }
  // The lane's column of weights is that of the second page.
  [[nodiscard]] __device__ bool later() const { return !kWide && (lane_ & 4) != 0; }
  // Shared address of the weights of the lane's column and pairs.
  [[nodiscard]] __device__ std::uint32_t place(int step, int part) const {
    constexpr std::uint32_t kPart = kStepBytes / 2;
    return weights_ + static_cast<std::uint32_t>(2 * step + part) * kPart +
           16U * static_cast<std::uint32_t>(4 * State::head_of_column(lane_ / 4) + lane_ % 4);
  }
  static __device__ __forceinline__ float4 turned(float4 c, float4 by) {
    return make_float4(c.x * by.x - c.z * by.z, c.y * by.y - c.w * by.w, c.x * by.z + c.z * by.x, c.y * by.w + c.w * by.y);
  }

  // take(group of 16 tokens, column, logit in row g, logit in row g + 8) of the lane's two columns.
  template <class Take>
  __device__ __forceinline__ void add_parts(const float (&even)[2][4], const float (&odd)[2][4], float still,
                                            Take&& take) const {
    still += __shfl_xor_sync(~0U, still, 1);
    still += __shfl_xor_sync(~0U, still, 2);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float mine = __shfl_sync(~0U, still, 4 * (lane_ % 4 * 2 + c));
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float low = even[e][c] + mine;
        const float high = even[e][c + 2] + mine;
        take(2 + e, c, low + odd[e][c], high + odd[e][c + 2]);
        take(1 - e, c, low - odd[e][c], high - odd[e][c + 2]);
      }
    }
  }

  const DecodeParams& p_;
  int lane_;
  std::uint32_t table_, weights_, scratch_;
  int page_ = 0;  // for which the weights are
  // Of the group of eight pages that page_ is in.
  int turn_ = 0;  // which two of them come next; 0: those of the next group
  std::uint32_t coefficients_[kProducts] = {};
  float still_[kProducts] = {};
};

}  // namespace oscar::cuda
