// The kernel of an append. A block codes one tile of rows of one KV head: four warps its keys, four its values.
//
// The codec's sums have a fixed order, and its roundings are its own, so tensor cores cannot take part: a product of a row with
// a matrix is a multiplication and an addition per term, neither fused. What can be computed in any order is computed by all
// threads; of the sums over a row's coordinates only the additions remain for one lane per row.
#pragma once

#include "cuda/append_params.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/fetch_ahead.cuh"
#include "cuda/gain_search.cuh"
#include "cuda/quantise.cuh"

namespace oscar::cuda {

using paged::kBlockTokens;
using paged::kPageTokens;

inline constexpr int kAppendThreads = 256;
inline constexpr int kLargeTile = 16;  // rows
inline constexpr int kSmallTile = 4;

// Where a row of the tile comes from and goes to.
struct AppendRow {
  int source;  // row of k and v, -1: none
  int sequence, position;
  std::uint8_t* page;  // head block, or null
  __half* block;       // keys of the head, or null
};

template <int D, int kRows>
struct AppendShared {
  static constexpr int kStride = D + 4;  // of a row of terms: no bank conflicts when lanes read rows side by side
  union {
    float x[2][D][kRows];           // keys, values; a coordinate of all rows together
    float term[2][kRows][kStride];  // of a sum over coordinates
  };
  // Small tiles have the matrix of the keys here, since each of their blocks reads it once; for large ones it stays in L1.
  static constexpr bool kHoldsMatrix = kRows == kSmallTile && D <= 128;
  float4 matrix[kHoldsMatrix ? D * D / 4 : 1];
  float gain[256];       // of a gain byte
  float factor[kRows];   // 1 / RMS of values
  int gain_byte[kRows];  // of g0 of keys, 0: not a number
  std::uint8_t key_gain[kRows];
  std::uint8_t code[2][kRows][D];
  AppendRow row[kRows];
};

// How the threads of four warps share [kRows, D] numbers.
template <int D, int kRows>
struct AppendPiece {
  static constexpr int kLanes = D / 4 < 32 ? D / 4 : 32;               // side by side on four coordinates each
  static constexpr int kVectors = D / (4 * kLanes);                    // of four coordinates, of a lane
  static constexpr int kGroups = 4 * 32 / kLanes;                      // groups of lanes
  static constexpr int kEach = kRows > kGroups ? kRows / kGroups : 1;  // rows of a group
  int lane, first_row;
  __device__ explicit AppendPiece(int thread) : lane(thread % kLanes), first_row(thread % 128 / kLanes * kEach) {}
  [[nodiscard]] __device__ bool works() const { return first_row < kRows; }
  [[nodiscard]] __device__ int column(int v) const { return 4 * (lane + kLanes * v); }
};

template <int D, int kRows>
class AppendTile {
  using Shared = AppendShared<D, kRows>;
  using Piece = AppendPiece<D, kRows>;

 public:
  __device__ AppendTile(const AppendParams& params, Shared& shared, int head)
      : p_(params), s_(shared), head_(head), thread_(static_cast<int>(threadIdx.x)), piece_(thread_) {}

  __device__ void run(int tile) {
    fetch_tables();
    if (thread_ < 32) find_rows(tile * kRows);
    __syncthreads();
    load();
    wait_for_copies();
    __syncthreads();
    if (p_.encoder.n_pairs > 0) {
      subtract_means();
      __syncthreads();
    }
    float y[Piece::kEach][Piece::kVectors][4] = {};
    if (is_key()) {
      transform_keys(y);
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
  [[nodiscard]] __device__ bool is_key() const { return thread_ < kAppendThreads / 2; }

  // What is constant is on its way while rows are looked up: in a step of a model nothing of it is in the caches.
  __device__ void fetch_tables() {
    static_assert(kAppendThreads == 256);
    s_.gain[thread_] = __ldg(p_.encoder.gain + thread_);
    const float4* matrix = matrix_of_keys();
    if constexpr (Shared::kHoldsMatrix) {
      for (int i = thread_; i < D * D / 4; i += kAppendThreads) copy_ahead(s_.matrix + i, matrix + i);
    } else {
      for (int i = thread_; i < D * D / 32; i += kAppendThreads) prefetch(matrix + 8 * i);
    }
    const EncoderView& e = p_.encoder;
    const auto lines = [&](int first, const void* from, int bytes) {
      const int line = thread_ - first;
      if (line >= 0 && 128 * line < bytes) prefetch(static_cast<const std::uint8_t*>(from) + 128 * line);
    };
    lines(32, e.coordinate + head_ * D, 16 * D);
    lines(96, e.constant_mean + head_ * D, 8 * D);
#pragma unroll
    for (int pattern = 0; pattern < paged::kPatterns; ++pattern) lines(128 + 8 * pattern, value_factors(pattern), 4 * D);
    lines(160, e.mean + head_ * e.n_pairs, 8 * e.n_pairs);
    lines(168, p_.layer.slot_source + head_ * p_.layer.max_slots, 2 * p_.layer.slots[head_]);
    lines(192, e.theta, 8 * e.n_pairs);
    lines(224, e.pair, 4 * e.n_pairs);
  }
  [[nodiscard]] __device__ const float4* matrix_of_keys() const {
    return reinterpret_cast<const float4*>(p_.encoder.transform) + static_cast<std::int64_t>(head_) * D * (D / 4);
  }

  [[nodiscard]] __device__ const float* value_factors(int pattern) const {
    return p_.encoder.value_factor + (pattern * p_.layer.n_head_kv + head_) * D;
  }

  // By the first warp.
  __device__ void find_rows(int first) {
    const int lane = thread_;
    const int source = first + lane;
    int sequence = source;
    int last = source;  // row of the sequence
    if (p_.row_start != nullptr) {
      sequence = 0;
      for (int base = 0; base < p_.batch; base += 32) {
        const int begin = base + lane < p_.batch ? __ldg(p_.row_start + base + lane + 1) : 0x7FFFFFFF;
        for (int r = 0; r < kRows; ++r) {
          const int before = __popc(__ballot_sync(~0U, begin <= first + r));
          if (lane == r) sequence += before;
        }
        if (__any_sync(~0U, begin >= first + kRows)) break;
      }
    }
    if (lane >= kRows) return;
    AppendRow row{-1, sequence, -1, nullptr, nullptr};
    if (sequence < p_.batch && source < p_.n_rows) {
      if (p_.row_start != nullptr) last = __ldg(p_.row_start + sequence + 1) - 1;
      const int length = __ldg(p_.lengths + sequence);
      row.position = length - 1 - (last - source);
      if (row.position >= 0) {
        row.source = source;
        find_places(row, length);
      }
    }
    s_.row[lane] = row;
  }
  __device__ void find_places(AppendRow& row, int length) const {
    const int position = row.position;
    const std::int32_t page = __ldg(p_.page_table.at(row.sequence, p_.page_columns, position / kPageTokens));
    if (page >= 0) row.page = p_.pages + static_cast<std::uint64_t>(page) * p_.layer.page_bytes + p_.layer.head_offset[head_];
    if (position >= p_.sink && position / kBlockTokens <= (length - 1) / kBlockTokens - p_.ring) return;
    const std::int32_t block = __ldg(
        p_.block_table.at(row.sequence, p_.sink / kBlockTokens + p_.ring, paged::block_column(position, p_.sink, p_.ring)));
    if (block >= 0)
      row.block = p_.blocks + (static_cast<std::int64_t>(block) * p_.layer.n_head_kv + head_) * paged::exact_head_values(D);
  }

  // Rows to shared memory, as binary32 without the constant mean (keys) or times signs and 1 / sqrt(D) (values), and to the
  // exact tier as they are.
  __device__ void load() {
    constexpr int kPieces = kRows * D / 8;  // of 8 values, of keys
    for (int i = thread_; i < 2 * kPieces; i += kAppendThreads) {
      const bool key = i < kPieces;
      const int r = i % kRows;
      const int piece = i % kPieces / kRows;
      const AppendRow& row = s_.row[r];
      uint4 raw = make_uint4(0, 0, 0, 0);
      if (row.source >= 0) {
        const __half* from = (key ? p_.k + row.source * p_.k_stride : p_.v + row.source * p_.v_stride) + head_ * D + 8 * piece;
        raw = __ldg(reinterpret_cast<const uint4*>(from));
        if (row.block != nullptr) {
          const int at = static_cast<int>(paged::exact_index(D, row.position % kBlockTokens, 8 * piece));
          *reinterpret_cast<uint4*>(row.block + (key ? 0 : kBlockTokens * D) + at) = raw;
        }
      }
      const std::uint32_t word[4] = {raw.x, raw.y, raw.z, raw.w};
      float x[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        x[j] = __half2float(__ushort_as_half(static_cast<unsigned short>(word[j / 2] >> (16 * (j % 2)))));
        if (!(fabsf(x[j]) < INFINITY)) x[j] = 0.0F;
      }
      if (key) {
        const auto* means = reinterpret_cast<const float4*>(p_.encoder.constant_mean + head_ * D + 8 * piece);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float4 two = __ldg(means + j);
          s_.x[0][8 * piece + 2 * j][r] = __fsub_rn(__fsub_rn(x[2 * j], two.x), two.y);
          s_.x[0][8 * piece + 2 * j + 1][r] = __fsub_rn(__fsub_rn(x[2 * j + 1], two.z), two.w);
        }
      } else {
        const auto* factors = reinterpret_cast<const float4*>(value_factors(pattern_at(row.position)) + 8 * piece);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float4 four = __ldg(factors + j);
          s_.x[1][8 * piece + 4 * j][r] = __fmul_rn(x[4 * j], four.x);
          s_.x[1][8 * piece + 4 * j + 1][r] = __fmul_rn(x[4 * j + 1], four.y);
          s_.x[1][8 * piece + 4 * j + 2][r] = __fmul_rn(x[4 * j + 2], four.z);
          s_.x[1][8 * piece + 4 * j + 3][r] = __fmul_rn(x[4 * j + 3], four.w);
        }
      }
    }
  }

  // Keys minus the RoPE-rotated mean.
  __device__ void subtract_means() {
    const EncoderView& e = p_.encoder;
    for (int i = thread_; i < e.n_pairs * kRows; i += kAppendThreads) {
      const int pair = i / kRows;
      const int r = i % kRows;
      if (s_.row[r].source < 0) continue;
      double sine, cosine;
      sincos(__dmul_rn(static_cast<double>(s_.row[r].position), __ldg(e.theta + pair)), &sine, &cosine);
      const float c = __double2float_rn(__dmul_rn(cosine, e.magnitude));
      const float s = __double2float_rn(__dmul_rn(sine, e.magnitude));
      const ushort2 at = e.pair[pair];
      const float2 mean = __ldg(e.mean + head_ * e.n_pairs + pair);
      float& first = s_.x[0][at.x][r];
      float& second = s_.x[0][at.y][r];
      first = __fsub_rn(first, __fsub_rn(__fmul_rn(mean.x, c), __fmul_rn(mean.y, s)));
      second = __fsub_rn(second, __fadd_rn(__fmul_rn(mean.x, s), __fmul_rn(mean.y, c)));
    }
  }

  // Coordinate d of the thread's rows.
  __device__ __forceinline__ void load_rows(int which, int d, float (&x)[Piece::kEach]) const {
    const float* from = &s_.x[which][d][piece_.first_row];
    if constexpr (Piece::kEach == 4) {
      const float4 four = *reinterpret_cast<const float4*>(from);
      x[0] = four.x;
      x[1] = four.y;
      x[2] = four.z;
      x[3] = four.w;
    } else if constexpr (Piece::kEach == 2) {
      const float2 two = *reinterpret_cast<const float2*>(from);
      x[0] = two.x;
      x[1] = two.y;
    } else {
      x[0] = *from;
    }
  }

  // Row d of the matrix, the thread's columns.
  __device__ __forceinline__ void load_matrix_row(int d, float4 (&m)[Piece::kVectors]) const {
#pragma unroll
    for (int v = 0; v < Piece::kVectors; ++v) {
      const int at = d * (D / 4) + piece_.lane + Piece::kLanes * v;
      if constexpr (Shared::kHoldsMatrix) {
        m[v] = s_.matrix[at];
      } else {
        m[v] = __ldg(matrix_of_keys() + at);
      }
    }
  }
  __device__ __forceinline__ void transform_keys(float (&z)[Piece::kEach][Piece::kVectors][4]) const {
    if (!piece_.works()) return;
    constexpr int kAtOnce = 4 / Piece::kVectors;  // rows; as many more are on their way
    float4 next[kAtOnce][Piece::kVectors];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) load_matrix_row(i, next[i]);
#pragma unroll 2
    for (int base = 0; base < D; base += kAtOnce) {
      float4 m[kAtOnce][Piece::kVectors];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int v = 0; v < Piece::kVectors; ++v) m[i][v] = next[i][v];
        if (base + kAtOnce < D) load_matrix_row(base + kAtOnce + i, next[i]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float x[Piece::kEach];
        load_rows(0, base + i, x);
#pragma unroll
        for (int r = 0; r < Piece::kEach; ++r) {
#pragma unroll
          for (int v = 0; v < Piece::kVectors; ++v) {
            z[r][v][0] = __fadd_rn(z[r][v][0], __fmul_rn(x[r], m[i][v].x));
            z[r][v][1] = __fadd_rn(z[r][v][1], __fmul_rn(x[r], m[i][v].y));
            z[r][v][2] = __fadd_rn(z[r][v][2], __fmul_rn(x[r], m[i][v].z));
            z[r][v][3] = __fadd_rn(z[r][v][3], __fmul_rn(x[r], m[i][v].w));
          }
        }
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
    return row.page + paged::key_bytes(p_.layer.slots[head_]) + paged::value_bytes(D) +
           paged::gain_byte(row.position % kPageTokens);
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

  // A token shares every byte of its digits with the token eight rows further in its group of 16. Where both are in the tile,
  // one row writes for both; where not, a row changes its own fields only, by atomic operations, since the other token may
  // belong to another block.
  __device__ void store_digits() {
    const int slots = p_.layer.slots[head_];
    constexpr int kWarps = kAppendThreads / 32 - 2;
    for (int r = thread_ / 32 - 2; r < kRows; r += kWarps) {
      const AppendRow& row = s_.row[r];
      if (row.source < 0 || row.page == nullptr) continue;
      int other = r + (row.position ^ 8) - row.position;
      if (other < 0 || other >= kRows || s_.row[other].source < 0 || s_.row[other].sequence != row.sequence) other = -1;
      if (other >= 0 && other < r) continue;
      // A word has two bytes of a token.
      for (int word = thread_ % 32; word < slots / 4; word += 32) store_key_word(row, r, other, word, slots);
      for (int word = thread_ % 32; word < D / 4; word += 32) store_value_word(row, r, other, word);
    }
  }
  // Fields of two bytes; those of one token cover half of each.
  struct Fields {
    std::uint32_t value[2] = {0, 0};
    std::uint32_t mask[2] = {0, 0};
    __device__ void add(int byte, int shift, std::uint32_t digit) {
      value[byte] |= digit << shift;
      mask[byte] |= 3U << shift;
    }
  };
  // to[0] and to[distance].
  static __device__ void store(const Fields& f, std::uint8_t* to, int distance, bool both) {
    if (both) {
      to[0] = static_cast<std::uint8_t>(f.value[0]);
      to[distance] = static_cast<std::uint8_t>(f.value[1]);
      return;
    }
    const auto address = reinterpret_cast<std::uintptr_t>(to);
    auto* word = reinterpret_cast<unsigned*>(address & ~std::uintptr_t{3});
    const int first = static_cast<int>(address & 3U) * 8;
    const int second = first + 8 * distance;
    atomicAnd(word, ~(f.mask[0] << first | f.mask[1] << second));
    atomicOr(word, f.value[0] << first | f.value[1] << second);
  }
  // Slots 16 step + 2 q + {0, 1, 8, 9}: bytes of two half-words.
  __device__ void store_key_word(const AppendRow& row, int r, int other, int word, int slots) {
    const std::uint16_t* source = p_.layer.slot_source + head_ * p_.layer.max_slots;
    const int slot = word / 4 * 16 + word % 4 * 2;
    Fields f;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int s = slot + k % 2 + k / 2 * 8;
      const unsigned from = __ldg(source + s);
      const auto add = [&](int tile_row, int token) {
        const std::uint32_t code = s_.code[0][tile_row][from % 4096U];
        f.add(k % 2, paged::key_digit(slots, token, s).shift, code >> (2U * (from / 4096U)) & 3U);
      };
      const int token = row.position % kPageTokens;
      add(r, token);
      if (other >= 0) add(other, token ^ 8);
    }
    store(f, row.page + paged::key_digit(slots, row.position % kPageTokens, slot).byte, 2, other >= 0);
  }
  // Dimensions 32 w + u + {0, 8, 16, 24}: the bytes of a half-word.
  __device__ void store_value_word(const AppendRow& row, int r, int other, int word) {
    const int dim = word / 8 * 32 + word % 8;
    const int token = row.position % kPageTokens;
    Fields f;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int d = dim + 8 * k;
      f.add(k / 2, paged::value_digit(D, token, d).shift, s_.code[1][r][d]);
      if (other >= 0) f.add(k / 2, paged::value_digit(D, token ^ 8, d).shift, s_.code[1][other][d]);
    }
    store(f, row.page + paged::key_bytes(p_.layer.slots[head_]) + paged::value_digit(D, token, dim).byte, 1, other >= 0);
  }

  const AppendParams& p_;
  Shared& s_;
  int head_, thread_;
  Piece piece_;
};

template <int D, int kRows>
__global__ void __launch_bounds__(kAppendThreads, D <= 128 ? 3 : 2) append_kernel(const __grid_constant__ AppendParams p) {
  extern __shared__ __align__(16) std::uint8_t append_shared[];
  let_successor_start();
  const int tile = static_cast<int>(blockIdx.x) % p.tiles;
  const int head = static_cast<int>(blockIdx.x) / p.tiles;  // neighbours share the matrix
  AppendTile<D, kRows>(p, *reinterpret_cast<AppendShared<D, kRows>*>(append_shared), head).run(tile);
}

}  // namespace oscar::cuda
