// RoPE means of coded keys: Re(sum over pairs of c e^(i theta t)) is part of the logit of token t.
//
// About a page's middle m, t = m + x, the page has the weights c' = c e^(i theta m), and its logits are E(x) + O(x),
// E = sum Re(c') cos(theta x), O = - sum Im(c') sin(theta x), with E(-x) = E(x), O(-x) = -O(x): two products of static tables
// [32 x, pairs] with weights [pairs, heads]. The weights live in shared memory, turned on from page to page of a series: by 256
// tokens. A float4 is the real and imaginary parts of two neighbouring pairs: pairs 2t, 2t + 1 of the lane's column, and 2t +
// 8, 2t + 9. In tiles that are not wide, lanes g < 4 keep the first and lanes g >= 4 the second of the same head.
#pragma once

#include "cuda/decode_plan.cuh"
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

  // Running weights, per warp and 16 pairs: kParts float4 per lane.
  static constexpr int kParts = kWide ? 2 : 1;
  static constexpr std::uint32_t kStepBytes = 512U * kParts;
  __host__ __device__ static std::uint32_t weight_bytes(const DecodeParams& p) {
    return static_cast<std::uint32_t>(p.layer.n_pairs / 16) * kStepBytes;
  }
  // Of a block: the table and the turns from page to page.
  __host__ __device__ static std::uint32_t table_bytes(const DecodeParams& p) {
    return static_cast<std::uint32_t>(p.layer.n_pairs) * (128U + 8U);
  }
  // By all threads of a block: the table, then e^(i 256 theta) of pairs 2 i, 2 i + 1: cosines, sines.
  static __device__ void fill_tables(const DecodeParams& p, std::uint8_t* to, int thread, int threads) {
    auto* table = reinterpret_cast<uint4*>(to);
    const int pieces = p.layer.n_pairs * 8;
    for (int i = thread; i < pieces; i += threads) table[i] = reinterpret_cast<const uint4*>(p.layer.mean_table)[i];
    auto* turns = reinterpret_cast<float*>(table + pieces);
    for (int i = thread; i < p.layer.n_pairs; i += threads) {
      const float2 turn = turn_by(p.layer.turns[i] * (kPageTokens * paged::kPatterns));
      float* pair = turns + i / 2 * 4 + i % 2;
      pair[0] = turn.x;
      pair[2] = turn.y;
    }
  }

  // Before the first page of a virtual head's coded tier.
  __device__ void start(int item, int page) {
    const float4* from = p_.mean_query + static_cast<std::int64_t>(item) * (p_.layer.n_pairs / 16 * kParts * 32);
    turn_all(page * kPageTokens + (kPageTokens - 1) / 2.0,
             [&](int step, int part) { return from[(step * kParts + part) * 32 + lane_]; });
    page_ = page;
  }
  // To a page of another series.
  __device__ void jump(int page) {
    turn_all((page - page_) * kPageTokens, [&](int step, int part) { return load_shared_float4(weights(step, part)); });
    page_ = page;
  }

  // Mean logits of this page and the next of the series, so that the tables are read once for two; moves on by two pages.
  __device__ __forceinline__ void logits(float (&now)[4][State::kRows][2], float (&next)[4][State::kRows][2]) {
    const int steps = p_.layer.n_pairs / 16;
    const int fast_steps = p_.layer.n_fast_pairs / 16;
    const std::uint32_t turns = table_ + static_cast<std::uint32_t>(steps) * 2048U;
    float even[2][2][4] = {};  // [page][x / 16]
    float odd[2][2][4] = {};
    float still[2] = {0, 0};  // slow pairs: their table holds cos - 1, so that binary16 rounds the small difference only
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      std::uint32_t real[2][2], imaginary[2][2];  // [page][half of the k-step]
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        float4 c = load_shared_float4(weights(step, part));
        const float4 by = load_shared_float4(turns + 16U * static_cast<std::uint32_t>(step * 8 + eighth(part)));
#pragma unroll
        for (int page = 0; page < 2; ++page) {
          real[page][part] = pack_half2(c.x, c.y);
          imaginary[page][part] = pack_half2(c.z, c.w);
          if (step >= fast_steps) still[page] += c.x + c.y;
          c = turned(c, by);
        }
        store_shared_float4(weights(step, part), c);
      }
      if constexpr (!kWide) {
#pragma unroll
        for (int page = 0; page < 2; ++page) {
          both_halves(real[page]);
          both_halves(imaginary[page]);
        }
      }
      const std::uint32_t table = table_ + static_cast<std::uint32_t>(step) * 2048U + 16U * static_cast<std::uint32_t>(lane_);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint4 cosines = load_shared_16(table + 512U * static_cast<std::uint32_t>(e));
        const uint4 sines = load_shared_16(table + 512U * static_cast<std::uint32_t>(e + 2));
#pragma unroll
        for (int page = 0; page < 2; ++page) {
          mma(even[page][e], cosines.x, cosines.y, cosines.z, cosines.w, real[page][0], real[page][1]);
          mma(odd[page][e], sines.x, sines.y, sines.z, sines.w, imaginary[page][0], imaginary[page][1]);
        }
      }
    }
    add_parts(even[0], odd[0], still[0], now);
    add_parts(even[1], odd[1], still[1], next);
    page_ += 2 * paged::kPatterns;
  }

 private:
  // Weights become load(step, part) e^(i theta positions).
  template <class Load>
  __device__ __forceinline__ void turn_all(double positions, Load&& load) {
    const int n_pairs = p_.layer.n_pairs;
    for (int base = 0; base < n_pairs; base += 64) {  // e^(i theta positions) of 64 pairs at a time through the scratch
      __syncwarp();
      for (int i = base + lane_; i < min(n_pairs, base + 64); i += 32) {
        const std::uint32_t place =
            scratch_ + 16U * static_cast<std::uint32_t>((i - base) / 2) + 4U * static_cast<std::uint32_t>(i % 2);
        const float2 turn = turn_by(p_.layer.turns[i] * positions);
        store_shared_float(place, turn.x);
        store_shared_float(place + 8U, turn.y);
      }
      __syncwarp();
      for (int step = base / 16; step < min(n_pairs / 16, base / 16 + 4); ++step) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const float4 by =
              load_shared_float4(scratch_ + 16U * static_cast<std::uint32_t>((step - base / 16) * 8 + eighth(part)));
          store_shared_float4(weights(step, part), turned(load(step, part), by));
        }
      }
    }
    __syncwarp();
  }
  [[nodiscard]] __device__ std::uint32_t weights(int step, int part) const {
    return weights_ + static_cast<std::uint32_t>(step) * kStepBytes + static_cast<std::uint32_t>(part) * 512U +
           16U * static_cast<std::uint32_t>(lane_);
  }
  // Which of a step's eight float4 of turns belongs to the lane's weights.
  [[nodiscard]] __device__ int eighth(int part) const { return lane_ % 4 + 4 * (kWide ? part : lane_ / 16); }
  static __device__ __forceinline__ float4 turned(float4 c, float4 by) {
    return make_float4(c.x * by.x - c.z * by.z, c.y * by.y - c.w * by.w, c.x * by.z + c.z * by.x, c.y * by.w + c.w * by.y);
  }

  // Lanes g < 4 have the first half of the k-step, lanes g >= 4 the second half of the same head.
  __device__ __forceinline__ void both_halves(std::uint32_t (&x)[2]) const {
    const std::uint32_t other = __shfl_xor_sync(~0U, x[0], 16);
    x[1] = lane_ < 16 ? other : x[0];
    x[0] = lane_ < 16 ? x[0] : other;
  }
  __device__ __forceinline__ void add_parts(const float (&even)[2][4], const float (&odd)[2][4], float still,
                                            float (&y)[4][State::kRows][2]) const {
    still += __shfl_xor_sync(~0U, still, 1);
    still += __shfl_xor_sync(~0U, still, 2);
    if constexpr (!kWide) still += __shfl_xor_sync(~0U, still, 16);
    const float mine[2] = {__shfl_sync(~0U, still, 4 * State::head(lane_, 0)),
                           __shfl_sync(~0U, still, 4 * State::head(lane_, 1))};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float x[State::kRows][2], z[State::kRows][2];
      State::pick(even[e], lane_, x);
      State::pick(odd[e], lane_, z);
#pragma unroll
      for (int r = 0; r < State::kRows; ++r) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float both = x[r][c] + mine[c];
          y[2 + e][r][c] = both + z[r][c];
          y[1 - e][r][c] = both - z[r][c];
        }
      }
    }
  }

  const DecodeParams& p_;
  int lane_;
  std::uint32_t table_, weights_, scratch_;
  int page_ = 0;  // for which the weights are
};

}  // namespace oscar::cuda
