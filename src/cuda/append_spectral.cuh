// Append of rows of codec `spectral`. What can be computed in any order is computed by all threads; of the sums over a row's
// coordinates only the additions remain for one lane per row.
#pragma once

#include "cuda/append_tile.cuh"
#include "cuda/gain_search.cuh"
#include "cuda/quantise.cuh"

namespace oscar::cuda {

template <int D, int kRows>
struct SpectralAppendShared : AppendTileShared<D, kRows> {
  // Small tiles have the matrix of the keys here, since each of their blocks reads it once; for large ones it stays in L1.
  static constexpr bool kHoldsMatrix = kRows == kSmallTile && D <= 128;
  float4 matrix[kHoldsMatrix ? D * D / 4 : 1];
  float gain[256];       // of a gain byte
  float factor[kRows];   // 1 / RMS of values
  int gain_byte[kRows];  // of g0 of keys, 0: not a number
  std::uint8_t key_gain[kRows];
};

template <int D, int kRows>
class SpectralAppend : AppendTile<D, kRows> {
  using Tile = AppendTile<D, kRows>;
  using Piece = typename Tile::Piece;

 public:
  using Shared = SpectralAppendShared<D, kRows>;

  __device__ SpectralAppend(const AppendParams& params, Shared& shared, int head) : Tile(params, shared, head), s_(shared) {}

  __device__ void run(int tile) {
    fetch_tables();
    if (thread_ < 32) find_rows(tile * kRows);
    __syncthreads();
    load_rows_of_tile();
    wait_for_copies();
    __syncthreads();
    if (p_.encoder.n_pairs > 0) {
      subtract_means();
      __syncthreads();
    }
    float y[Piece::kEach][Piece::kVectors][4] = {};
    if (is_key()) {
      transform(
          0, [&](int d, float4(&m)[Piece::kVectors]) { load_matrix_row(d, m); }, y);
    } else {
      transform_values(y);
    }
    __syncthreads();  // x is read; its place holds terms from now on
    if (is_key()) {
      norm_terms(y);
    } else {
      energy_terms(y);
    }
    __syncthreads();
    if (thread_ < 2 * kRows) scale_rows();
    __syncthreads();
    if (is_key()) {
      code_keys(y);
    } else {
      code_values(y);
    }
    __syncthreads();
    if (thread_ < 32) {
      store_key_gains();
    } else if (thread_ < 64) {
      store_value_gains();
    } else {
      store_digits();
    }
  }

 private:
  using Tile::fetch_lines;
  using Tile::find_rows;
  using Tile::head_;
  using Tile::is_key;
  using Tile::load_rows;
  using Tile::p_;
  using Tile::piece_;
  using Tile::store_digits;
  using Tile::subtract_means;
  using Tile::thread_;
  using Tile::transform;

  __device__ void fetch_tables() {
    static_assert(kAppendThreads == 256);
    s_.gain[thread_] = __ldg(p_.encoder.gain + thread_);
    const float4* matrix = matrix_of_keys();
    if constexpr (Shared::kHoldsMatrix) {
      for (int i = thread_; i < D * D / 4; i += kAppendThreads) copy_ahead(s_.matrix + i, matrix + i);
    } else {
      this->fetch_matrix(matrix);
    }
    const EncoderView& e = p_.encoder;
    fetch_lines(32, e.coordinate + head_ * D, 16 * D);
    fetch_lines(96, e.constant_mean + head_ * D, 8 * D);
#pragma unroll
    for (int pattern = 0; pattern < paged::kPatterns; ++pattern) fetch_lines(128 + 8 * pattern, value_factors(pattern), 4 * D);
    this->fetch_means_and_slots();
  }
  [[nodiscard]] __device__ const float4* matrix_of_keys() const {
    return reinterpret_cast<const float4*>(p_.encoder.transform) + static_cast<std::int64_t>(head_) * D * (D / 4);
  }

  [[nodiscard]] __device__ const float* value_factors(int pattern) const {
    return p_.encoder.value_factor + (pattern * p_.layer.n_head_kv + head_) * D;
  }

  // Keys without the constant mean, values times signs and 1 / sqrt(D).
  __device__ void load_rows_of_tile() {
    this->load([&](int r, int d, const float(&x)[8]) { this->store_key_row(r, d, x); },
               [&](int r, int d, const float(&x)[8]) {
                 const auto* factors = reinterpret_cast<const float4*>(value_factors(pattern_at(s_.row[r].position)) + d);
#pragma unroll
                 for (int j = 0; j < 2; ++j) {
                   const float4 four = __ldg(factors + j);
                   s_.x[1][d + 4 * j][r] = __fmul_rn(x[4 * j], four.x);
                   s_.x[1][d + 4 * j + 1][r] = __fmul_rn(x[4 * j + 1], four.y);
                   s_.x[1][d + 4 * j + 2][r] = __fmul_rn(x[4 * j + 2], four.z);
                   s_.x[1][d + 4 * j + 3][r] = __fmul_rn(x[4 * j + 3], four.w);
                 }
               });
  }

  // Row d of the matrix, the thread's columns.
  __device__ __forceinline__ void load_matrix_row(int d, float4 (&m)[Piece::kVectors]) const {
#pragma unroll
    for (int v = 0; v < Piece::kVectors; ++v) {
      const int at = this->matrix_place(d, v);
      if constexpr (Shared::kHoldsMatrix) {
        m[v] = s_.matrix[at];
      } else {
        m[v] = __ldg(matrix_of_keys() + at);
      }
    }
  }
  // y_j = sum over i of +- x_i, - where i and j share an odd number of bits. Four i at a time: of their sign, what the low two
  // bits decide is known here, the rest is a factor of 1 or -1 of the lane. Times that, a fused addition rounds as any other.
  __device__ __forceinline__ void transform_values(float (&y)[Piece::kEach][Piece::kVectors][4]) const {
    if (!piece_.works()) return;
#pragma unroll 4
    for (int quad = 0; quad < D / 4; ++quad) {
      float sign[Piece::kVectors];
#pragma unroll
      for (int v = 0; v < Piece::kVectors; ++v) {
        const int shared_bits = __popc(static_cast<unsigned>(quad & (piece_.lane + Piece::kLanes * v)));
        sign[v] = __uint_as_float(0x3F800000U | static_cast<std::uint32_t>(shared_bits) << 31);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x[Piece::kEach];
        load_rows(1, 4 * quad + i, x);
#pragma unroll
        for (int r = 0; r < Piece::kEach; ++r) {
#pragma unroll
          for (int v = 0; v < Piece::kVectors; ++v) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              const bool negative = ((i & j & 1) ^ ((i & j) >> 1)) != 0;
              y[r][v][j] = __fmaf_rn(negative ? -x[r] : x[r], sign[v], y[r][v][j]);
            }
          }
        }
      }
    }
  }

  // Writes term(r, v, j) of the thread's numbers.
  template <class Term>
  __device__ __forceinline__ void store_terms(int which, Term&& term) {
    if (!piece_.works()) return;
#pragma unroll
    for (int r = 0; r < Piece::kEach; ++r) {
#pragma unroll
      for (int v = 0; v < Piece::kVectors; ++v) {
        *reinterpret_cast<float4*>(&s_.term[which][piece_.first_row + r][piece_.column(v)]) =
            make_float4(term(r, v, 0), term(r, v, 1), term(r, v, 2), term(r, v, 3));
      }
    }
  }
  __device__ void norm_terms(const float (&z)[Piece::kEach][Piece::kVectors][4]) {
    float inverse_sigma[Piece::kVectors][4];
#pragma unroll
    for (int v = 0; v < Piece::kVectors; ++v) {
#pragma unroll
      for (int j = 0; j < 4; ++j) inverse_sigma[v][j] = coordinate(v, j).x;
    }
    store_terms(0, [&](int r, int v, int j) {
      const float ratio = __fmul_rn(z[r][v][j], inverse_sigma[v][j]);
      return __fmul_rn(ratio, ratio);
    });
  }
  __device__ void energy_terms(const float (&y)[Piece::kEach][Piece::kVectors][4]) {
    store_terms(1, [&](int r, int v, int j) { return __fmul_rn(y[r][v][j], y[r][v][j]); });
  }
  [[nodiscard]] __device__ float4 coordinate(int v, int j) const {
    return __ldg(p_.encoder.coordinate + head_ * D + piece_.column(v) + j);
  }

  // Sum of a row's terms in ascending order.
  [[nodiscard]] __device__ float sum(int which, int r) const {
    const auto* from = reinterpret_cast<const float4*>(s_.term[which][r]);
    float all = 0.0F;
#pragma unroll 8
    for (int i = 0; i < D / 4; ++i) {
      const float4 four = from[i];
      all = __fadd_rn(__fadd_rn(__fadd_rn(__fadd_rn(all, four.x), four.y), four.z), four.w);
    }
    return all;
  }
  // One lane per row, keys then values: where the search for a gain begins, and what a row of values is divided by.
  __device__ void scale_rows() {
    const int r = thread_ % kRows;
    const bool key = thread_ < kRows;
    const float all = sum(key ? 0 : 1, r);
    if (key) {
      const float norm = fmaxf(kLeastNorm, __fsqrt_rn(__fdiv_rn(all, __ldg(p_.encoder.norm_count + head_))));
      s_.gain_byte[r] = all < INFINITY ? key_gain_code(norm, p_.encoder.key_gain_edge) : 0;
      return;
    }
    // Nothing, or too little for binary32: NaN makes all codes and the gain 0, as the codec has it.
    const float inverse = __fsqrt_rn(__fdiv_rn(static_cast<float>(D), all));
    s_.factor[r] = all > 0.0F && inverse < INFINITY ? inverse : NAN;
  }

  // Gains of the thread's rows and their codes; the lanes of a row decide alike.
  __device__ void code_keys(float (&z)[Piece::kEach][Piece::kVectors][4]) {
    if (!piece_.works()) return;
    KeyGrid grid[Piece::kVectors][4];
#pragma unroll
    for (int v = 0; v < Piece::kVectors; ++v) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float4 c = coordinate(v, j);
        grid[v][j] = {c.y, c.z, c.w};
      }
    }
    float energy[Piece::kEach], least[Piece::kEach];
    int centre[Piece::kEach], best[Piece::kEach];
#pragma unroll
    for (int r = 0; r < Piece::kEach; ++r) {
      float squares[Piece::kVectors][4];
#pragma unroll
      for (int v = 0; v < Piece::kVectors; ++v) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (!(grid[v][j].centre > 0.0F)) z[r][v][j] = 0.0F;
          squares[v][j] = __fmul_rn(z[r][v][j], z[r][v][j]);
        }
      }
      energy[r] = fold<Piece::kLanes>(squares);
      least[r] = INFINITY;
      best[r] = centre[r] = s_.gain_byte[piece_.first_row + r];
    }
    const auto attempt = [&](int distance) {
#pragma unroll
      for (int r = 0; r < Piece::kEach; ++r) {
        const int byte = centre[r] + distance;
        const bool exists = byte >= 1 && byte <= 255;
        const float cost = gain_cost<Piece::kLanes>(z[r], grid, energy[r], s_.gain[exists ? byte : 1]);
        if (!exists || !(cost < least[r])) continue;
        least[r] = cost;
        best[r] = byte;
      }
    };
#pragma unroll 1
    for (int k = kGainFirst; k <= kGainLast; k += kGainStride) attempt(k);
#pragma unroll
    for (int r = 0; r < Piece::kEach; ++r) centre[r] = best[r];
#pragma unroll 1
    for (int k = -kGainFine; k <= kGainFine; ++k) {
      if (k != 0) attempt(k);
    }
#pragma unroll
    for (int r = 0; r < Piece::kEach; ++r) {
      const int row = piece_.first_row + r;
      // Byte 0: the norm was no number.
      const bool coded = best[r] > 0 && energy[r] > 0.0F && energy[r] < INFINITY;
      const float scale = __fdiv_rn(1.0F, s_.gain[best[r]]);
#pragma unroll
      for (int v = 0; v < Piece::kVectors; ++v) {
        std::uint32_t codes = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const auto code = static_cast<std::uint32_t>(key_code(key_y(z[r][v][j], scale, grid[v][j]), grid[v][j]));
          codes |= (coded ? code : 0U) << (8 * j);
        }
        *reinterpret_cast<std::uint32_t*>(&s_.code[0][row][piece_.column(v)]) = codes;
      }
      if (piece_.lane == 0) s_.key_gain[row] = coded ? static_cast<std::uint8_t>(best[r]) : std::uint8_t{0};
    }
  }
  __device__ void code_values(const float (&y)[Piece::kEach][Piece::kVectors][4]) {
    if (!piece_.works()) return;
    const EncoderView& e = p_.encoder;
#pragma unroll
    for (int v = 0; v < Piece::kVectors; ++v) {
#pragma unroll
      for (int r = 0; r < Piece::kEach; ++r) {
        const int row = piece_.first_row + r;
        const float factor = s_.factor[row];
        float product[4];
        std::uint32_t codes = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float u = __fmul_rn(y[r][v][j], factor);
          const int code = grid_code(__fadd_rn(__fmul_rn(u, e.value_inverse_step), 2.0F), 4.0F);
          const float level =
              code < 2 ? (code < 1 ? e.value_level[0] : e.value_level[1]) : (code < 3 ? e.value_level[2] : e.value_level[3]);
          codes |= static_cast<std::uint32_t>(code) << (8 * j);
          product[j] = __fmul_rn(u, level);
        }
        *reinterpret_cast<std::uint32_t*>(&s_.code[1][row][piece_.column(v)]) = codes;
        *reinterpret_cast<float4*>(&s_.term[1][row][piece_.column(v)]) =
            make_float4(product[0], product[1], product[2], product[3]);
      }
    }
  }

  // Gains of keys, by the first warp, and of values, by the second.
  [[nodiscard]] __device__ std::uint8_t* gains(const AppendRow& row) const {
    return this->row_data(row) + paged::gain_byte(row.position % kPageTokens);
  }
  __device__ void store_key_gains() {
    if (thread_ >= kRows) return;
    const AppendRow& row = s_.row[thread_];
    if (row.source >= 0 && row.page != nullptr) *gains(row) = s_.key_gain[thread_];
  }
  __device__ void store_value_gains() {
    const int r = thread_ - 32;
    if (r >= kRows) return;
    const AppendRow& row = s_.row[r];
    if (row.source < 0 || row.page == nullptr) return;
    const float product = sum(1, r);
    const float gain = __fdiv_rn(static_cast<float>(D), __fmul_rn(s_.factor[r], product));
    const float scaled = __fdiv_rn(gain, __ldg(p_.encoder.value_scale + head_));
    gains(row)[kPageTokens] = static_cast<std::uint8_t>(value_gain_code(scaled, p_.encoder.value_gain_edge, row.position));
  }

  Shared& s_;
};

}  // namespace oscar::cuda
