// The sums of values of one warp and virtual head: of dimensions 16 i + g + 8 r and the columns of lane 4 g + t. They come tier
// by tier and, in the coded tier, pattern by pattern of signs, each in a basis of its own; what is complete is kept in the
// model's basis and waits aside, in the workspace, while the next part is summed.
#pragma once

#include "cuda/digit_products.cuh"
#include "cuda/partial_results.cuh"

namespace oscar::cuda {

template <int D, bool kWide, bool kInt2>
class HeadSums {
  using State = SoftmaxState<kWide>;
  static constexpr int kColumns = State::kColumns;
  static constexpr int kValues = D / 8 * kColumns;                                                    // of a lane
  static constexpr int kRows = 4 * kColumns;                                                          // of a warp
  static constexpr std::uint32_t kAside = static_cast<std::uint32_t>(kInt2 ? 2 : 1) * kRows * D / 4;  // float4, of a warp

 public:
  using Layout = PartialLayout<D, kWide, kInt2>;

  template <class Value>
  __device__ __forceinline__ void set(Value&& value) {
    each([&](int k, int i, int r, int c) { model_[k] = value(i, r, c); });
  }

  // Sums of the coded tier: of `spectral` of pages of one pattern, of `int2` of all pages.
  __device__ __forceinline__ void add_coded(const DecodeParams& p, std::uint32_t worker, int kv, int pattern, int lane,
                                            const State& state, const ValueSums<D, kColumns>& sums) {
    constexpr float kField[4] = {1.0F, 0.25F, 0.0625F, 0.015625F};
    float weight[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      weight[c] = State::sum_over_rows(sums.weight[c]) * (kInt2 ? 1.0F : -1.5F);  // 1.5: centre of the codes
    each([&](int k, int i, int r, int c) {
      const float x = fmaf(sums.of[i][r][c], kField[i % 4], weight[c]);
      model_[k] = kInt2 ? 0.0F : x;
      if constexpr (kInt2) coded_[k] = x;
    });
    if constexpr (!kInt2) {
      turn_back(lane);
      const float unit = p.layer.value_unit[kv] * rsqrtf(static_cast<float>(D));
      const float* signs = p.layer.value_signs + (pattern * p.layer.n_head_kv + kv) * D + lane / 4;
      each([&](int k, int i, int r, int) { model_[k] *= unit * signs[16 * i + 8 * r]; });
    }
    if (aside_) {
      float factor[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) factor[c] = exp2_fast(aside_max_[c] - state.max[c]);
      const float4* from = aside(p, worker, lane);
#pragma unroll
      for (int k = 0; k < kValues; k += 4) {
        const float4 four = from[k * 8];
        model_[k] = fmaf(four.x, factor[k % kColumns], model_[k]);
        model_[k + 1] = fmaf(four.y, factor[(k + 1) % kColumns], model_[k + 1]);
        model_[k + 2] = fmaf(four.z, factor[k % kColumns], model_[k + 2]);
        model_[k + 3] = fmaf(four.w, factor[(k + 1) % kColumns], model_[k + 3]);
      }
    }
    if constexpr (kInt2) {
      if (p.layer.value_mean != nullptr) add_mean(p, kv, lane, state);
    }
  }

  // Until the next add_coded().
  __device__ __forceinline__ void put_aside(const DecodeParams& p, std::uint32_t worker, int lane, const State& state) {
    float4* to = aside(p, worker, lane);
#pragma unroll
    for (int k = 0; k < kValues; k += 4) to[k * 8] = make_float4(model_[k], model_[k + 1], model_[k + 2], model_[k + 3]);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      aside_max_[c] = state.started[c] ? state.max[c] : -INFINITY;
      if constexpr (kInt2) aside_sum_[c] = State::sum_over_rows(state.sum[c]);
    }
    aside_ = true;
  }

  // To a slot or row; of a state that is finished.
  __device__ __forceinline__ void write(std::uint8_t* to, int lane, const State& state) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (lane < 4)
        *reinterpret_cast<float2*>(to + Layout::sum_at(State::head(lane, c))) = make_float2(state.max[c], state.sum[c]);
    }
    each([&](int k, int i, int r, int c) {
      const int row = State::head(lane, c);
      const int dim = 16 * i + 8 * r + lane / 4;
      *reinterpret_cast<float*>(to + Layout::value_at(0, row, dim)) = model_[k];
      if constexpr (kInt2) *reinterpret_cast<float*>(to + Layout::value_at(1, row, dim)) = coded_[k];
    });
  }
  // Of a head that no other warp has a part of.
  __device__ __forceinline__ void write_output(const DecodeParams& p, std::uint32_t worker, const HeadSpan& span, int lane,
                                               const State& state) {
    const int rows = rows_of(p, span.first_row);
    // f(column, the row's output, factor) of the lane's rows.
    const auto close = [&](auto&& f) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int row = State::head(lane, c);
        if (row >= rows) continue;
        const OutputRow to(p, span.sequence, span.kv, span.first_row + row);
        const Closing closing(p, to, state.max[c], state.sum[c]);
        f(c, p.out + to.index * D, closing.factor);
        if (lane < 4 && p.lse != nullptr) p.lse[to.index] = closing.lse();
      }
    };
    if constexpr (kInt2) {
      auto* coded = reinterpret_cast<float*>(p.aside + worker * kAside);  // in the order of its dimensions
      float* model = coded + kRows * D;
      __syncwarp();
      close([&](int c, const __half*, float factor) {
#pragma unroll
        for (int k = c; k < kValues; k += kColumns) {
          const int at = State::head(lane, c) * D + k / kColumns * 8 + lane / 4;
          coded[at] = coded_[k] * factor;
          model[at] = model_[k] * factor;
        }
      });
      __syncwarp();
      turn_rows<D, kRows, 1>(p, span.kv, coded, D, rows, lane, 0, 1, [&](int row, int dim, float turned) {
        const OutputRow to(p, span.sequence, span.kv, span.first_row + row);
        p.out[to.index * D + dim] = __float2half_rn(model[row * D + dim] + turned);
      });
      __syncwarp();
    } else {
      close([&](int c, __half* out, float factor) {
#pragma unroll
        for (int k = c; k < kValues; k += kColumns) out[k / kColumns * 8 + lane / 4] = __float2half_rn(model_[k] * factor);
      });
    }
  }

 private:
  // f(number, i, r, column) of the lane's values.
  template <class F>
  static __device__ __forceinline__ void each(F&& f) {
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) f((2 * i + r) * kColumns + c, i, r, c);
      }
    }
  }
  // From the Hadamard basis of a pattern to the model's, but for signs and the factor 1 / sqrt(D): butterflies within a lane,
  // then across lanes.
  __device__ __forceinline__ void turn_back(int lane) {
#pragma unroll
    for (int d = kColumns; d < kValues; d *= 2) {
#pragma unroll
      for (int k = 0; k < kValues; ++k) {
        if ((k & d) == 0) {
          const float a = model_[k];
          const float b = model_[k + d];
          model_[k] = a + b;
          model_[k + d] = a - b;
        }
      }
    }
#pragma unroll
    for (int d = 4; d < 32; d *= 2) {
      const float sign = (lane & d) == 0 ? 1.0F : -1.0F;
#pragma unroll
      for (int k = 0; k < kValues; ++k) model_[k] = fmaf(sign, model_[k], __shfl_xor_sync(~0U, model_[k], d));
    }
  }
  __device__ __forceinline__ void add_mean(const DecodeParams& p, int kv, int lane, const State& state) {
    float coded_sum[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      coded_sum[c] = State::sum_over_rows(state.sum[c]);
      if (aside_) coded_sum[c] -= aside_sum_[c] * exp2_fast(aside_max_[c] - state.max[c]);
    }
    const float* mean = p.layer.value_mean + kv * D + lane / 4;
    each([&](int k, int i, int r, int c) { model_[k] = fmaf(coded_sum[c], mean[16 * i + 8 * r], model_[k]); });
  }
  [[nodiscard]] static __device__ float4* aside(const DecodeParams& p, std::uint32_t worker, int lane) {
    return p.aside + worker * kAside + static_cast<std::uint32_t>(lane);
  }

  float model_[kValues] = {};
  float coded_[kInt2 ? kValues : 1] = {};
  float aside_max_[kColumns] = {};
  float aside_sum_[kInt2 ? kColumns : 1] = {};
  bool aside_ = false;
};

}  // namespace oscar::cuda
