// Append of rows of codec `int2`: rotation, clipping, grid and codes, by the operations of paged::Int2EncodeTables. The lanes
// of a row hold all of it, so nothing goes through shared memory after the rotation.
#pragma once

#include "cuda/append_tile.cuh"

namespace oscar::cuda {

template <int D, int kRows>
struct Int2AppendShared : AppendTileShared<D, kRows> {
  std::uint32_t grid[2][kRows];  // step and, in the upper half, lo
};

template <int D, int kRows>
class Int2Append : AppendTile<D, kRows> {
  using Tile = AppendTile<D, kRows>;
  using Piece = typename Tile::Piece;

 public:
  using Shared = Int2AppendShared<D, kRows>;

  __device__ Int2Append(const AppendParams& params, Shared& shared, int head) : Tile(params, shared, head), s_(shared) {}

  __device__ void run(int tile) {
    fetch_tables();
    if (thread_ < 32) this->find_rows(tile * kRows);
    __syncthreads();
    const float* value_mean = p_.encoder.value_mean + head_ * D;
    this->load([&](int r, int d, const float(&x)[8]) { this->store_key_row(r, d, x); },
               [&](int r, int d, const float(&x)[8]) {
#pragma unroll
                 for (int j = 0; j < 8; ++j) s_.x[1][d + j][r] = __fsub_rn(x[j], __ldg(value_mean + d + j));
               });
    __syncthreads();
    if (p_.encoder.n_pairs > 0) {
      this->subtract_means();
      __syncthreads();
    }
    const int which = this->is_key() ? 0 : 1;
    if (piece_.works()) {
      float y[Piece::kEach][Piece::kVectors][4] = {};
      rotate(which, y);
      code(which, y);
    }
    __syncthreads();
    if (thread_ < 64) {
      store_grids(thread_ / 32, thread_ % 32);
    } else {
      this->store_digits();
    }
  }

 private:
  using Tile::head_;
  using Tile::p_;
  using Tile::piece_;
  using Tile::thread_;

  // Of keys or values; null: none.
  [[nodiscard]] __device__ const float4* rotation(int which) const {
    const float* all = which == 0 ? p_.encoder.transform : p_.encoder.value_transform;
    if (all == nullptr) return nullptr;
    return reinterpret_cast<const float4*>(all) + static_cast<std::int64_t>(head_) * D * (D / 4);
  }
  __device__ void fetch_tables() const {
    if (rotation(0) != nullptr) this->fetch_matrix(rotation(0));
    if (rotation(1) != nullptr) this->fetch_matrix(rotation(1));
    this->fetch_lines(32, p_.encoder.value_mean + head_ * D, 4 * D);
    this->fetch_lines(96, p_.encoder.constant_mean + head_ * D, 8 * D);
    this->fetch_means_and_slots();
  }

  __device__ void rotate(int which, float (&y)[Piece::kEach][Piece::kVectors][4]) const {
    const float4* matrix = rotation(which);
    if (matrix != nullptr) {
      const auto load_row = [&](int d, float4(&m)[Piece::kVectors]) {
#pragma unroll
        for (int v = 0; v < Piece::kVectors; ++v) m[v] = __ldg(matrix + this->matrix_place(d, v));
      };
      this->transform(which, load_row, y);
      return;
    }
#pragma unroll
    for (int v = 0; v < Piece::kVectors; ++v) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int r = 0; r < Piece::kEach; ++r) y[r][v][j] = s_.x[which][piece_.column(v) + j][piece_.first_row + r];
      }
    }
  }

  // Number `rank` of the row's |y| in ascending order: the largest number that at most `rank` of them are below, bit by bit.
  [[nodiscard]] __device__ float ranked(const float (&y)[Piece::kVectors][4], int rank) const {
    const unsigned lanes = Piece::kLanes == 32 ? ~0U : 0xFFFFU << (thread_ & 16);
    std::uint32_t found = 0;
#pragma unroll 1
    for (int bit = 30; bit >= 0; --bit) {
      const std::uint32_t trial = found | 1U << bit;
      int below = 0;
#pragma unroll
      for (int v = 0; v < Piece::kVectors; ++v) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          below += __popc(__ballot_sync(~0U, (__float_as_uint(y[v][j]) & 0x7FFFFFFFU) < trial) & lanes);
      }
      if (below <= rank) found = trial;
    }
    return __uint_as_float(found);
  }

  __device__ void code(int which, float (&y)[Piece::kEach][Piece::kVectors][4]) {
    const int rank = __ldg(p_.encoder.clip_rank + which * p_.layer.n_head_kv + head_);
#pragma unroll
    for (int r = 0; r < Piece::kEach; ++r) {
      float threshold = 65504.0F;
      if (rank >= 0) threshold = fminf(ranked(y[r], rank), threshold);
      // Of equal numbers the first one, since 0 and -0 are equal.
      float least = INFINITY;
      float largest = -INFINITY;
      int at = 0;
#pragma unroll
      for (int v = 0; v < Piece::kVectors; ++v) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float& x = y[r][v][j];
          x = x < -threshold ? -threshold : (threshold < x ? threshold : x);
          if (x < least) {
            least = x;
            at = piece_.column(v) + j;
          }
          largest = fmaxf(largest, x);
        }
      }
#pragma unroll
      for (int distance = Piece::kLanes / 2; distance > 0; distance /= 2) {
        const float other = __shfl_xor_sync(~0U, least, distance);
        const int other_at = __shfl_xor_sync(~0U, at, distance);
        if (other < least || (other == least && other_at < at)) {
          least = other;
          at = other_at;
        }
        largest = fmaxf(largest, __shfl_xor_sync(~0U, largest, distance));
      }
      const __half lo = __float2half_rn(least);
      const __half step = __float2half_rn(__fdiv_rn(__fsub_rn(largest, least), 3.0F));
      const float grid_lo = __half2float(lo);
      const float grid_step = __half2float(step);
      const int row = piece_.first_row + r;
#pragma unroll
      for (int v = 0; v < Piece::kVectors; ++v) {
        std::uint32_t codes = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float t = __fadd_rn(__fdiv_rn(__fsub_rn(y[r][v][j], grid_lo), grid_step), 0.5F);
          const float clamped = t < 0.0F ? 0.0F : (t > 3.0F ? 3.0F : t);
          codes |= (grid_step > 0.0F ? static_cast<std::uint32_t>(clamped) : 0U) << (8 * j);
        }
        *reinterpret_cast<std::uint32_t*>(&s_.code[which][row][piece_.column(v)]) = codes;
      }
      if (piece_.lane == 0) {
        s_.grid[which][row] =
            static_cast<std::uint32_t>(__half_as_ushort(step)) | static_cast<std::uint32_t>(__half_as_ushort(lo)) << 16;
      }
    }
  }

  // Of keys by the first warp, of values by the second.
  __device__ void store_grids(int which, int r) const {
    if (r >= kRows) return;
    const AppendRow& row = s_.row[r];
    if (row.source < 0 || row.page == nullptr) return;
    std::uint8_t* grids =
        this->row_data(row) + static_cast<std::uint32_t>(which) * paged::row_data_bytes(paged::PageCodec::int2);
    *reinterpret_cast<std::uint32_t*>(grids + paged::grid_byte(row.position % kPageTokens)) = s_.grid[which][r];
  }

  Shared& s_;
};

}  // namespace oscar::cuda
