// What an append does with a tile of rows of one KV head whatever the codec: where rows go, loading, the means of keys, the
// product with a matrix, storing digits. A block codes one tile: four warps its keys, four its values.
//
// The codec's sums have a fixed order, and its roundings are its own, so tensor cores cannot take part: a product of a row with
// a matrix is a multiplication and an addition per term, neither fused.
#pragma once

#include "cuda/append_params.h"
#include "cuda/dependent_launch.cuh"
#include "cuda/fetch_ahead.cuh"

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
struct AppendTileShared {
  static constexpr int kStride = D + 4;  // of a row of terms: no bank conflicts when lanes read rows side by side
  union {
    float x[2][D][kRows];           // keys, values; a coordinate of all rows together
    float term[2][kRows][kStride];  // of a sum over coordinates
  };
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
 protected:
  using TileShared = AppendTileShared<D, kRows>;
  using Piece = AppendPiece<D, kRows>;

  __device__ AppendTile(const AppendParams& params, TileShared& shared, int head)
      : p_(params), t_(shared), head_(head), thread_(static_cast<int>(threadIdx.x)), piece_(thread_) {}

  [[nodiscard]] __device__ bool is_key() const { return thread_ < kAppendThreads / 2; }

  // What is constant is on its way while rows are looked up: in a step of a model nothing of it is in the caches. The lines of
  // [from, from + bytes), by as many threads from number `first` on.
  __device__ void fetch_lines(int first, const void* from, int bytes) const {
    const int line = thread_ - first;
    if (line >= 0 && 128 * line < bytes) prefetch(static_cast<const std::uint8_t*>(from) + 128 * line);
  }
  __device__ void fetch_matrix(const float4* matrix) const {
    for (int i = thread_; i < D * D / 32; i += kAppendThreads) prefetch(matrix + 8 * i);
  }
  // Threads 160 to 255.
  __device__ void fetch_means_and_slots() const {
    const EncoderView& e = p_.encoder;
    fetch_lines(160, e.mean + head_ * e.n_pairs, 8 * e.n_pairs);
    fetch_lines(168, p_.layer.slot_source + head_ * p_.layer.max_slots, 2 * p_.layer.slots[head_]);
    fetch_lines(192, e.theta, 8 * e.n_pairs);
    fetch_lines(224, e.pair, 4 * e.n_pairs);
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
    t_.row[lane] = row;
  }
  __device__ void find_places(AppendRow& row, int length) const {
    const int position = row.position;
    const int column = position / kPageTokens;
    // A sequence that has outgrown its columns must not write into the next one's pages.
    const std::int32_t page = column < p_.page_columns ? __ldg(p_.page_table.at(row.sequence, p_.page_columns, column)) : -1;
    if (page >= 0) row.page = p_.pages + static_cast<std::uint64_t>(page) * p_.layer.page_bytes + p_.layer.head_offset[head_];
    if (position >= p_.sink && position / kBlockTokens <= (length - 1) / kBlockTokens - p_.ring) return;
    const std::int32_t block = __ldg(
        p_.block_table.at(row.sequence, p_.sink / kBlockTokens + p_.ring, paged::block_column(position, p_.sink, p_.ring)));
    if (block >= 0)
      row.block = p_.blocks + (static_cast<std::int64_t>(block) * p_.layer.n_head_kv + head_) * paged::exact_head_values(D);
  }

  // Rows to the exact tier as they are, and to store_key(row, coordinate, x) and store_value(...), eight values from the
  // coordinate on, NaN and infinities replaced by 0.
  template <class StoreKey, class StoreValue>
  __device__ void load(StoreKey&& store_key, StoreValue&& store_value) {
    constexpr int kPieces = kRows * D / 8;  // of 8 values, of keys
    for (int i = thread_; i < 2 * kPieces; i += kAppendThreads) {
      const bool key = i < kPieces;
      const int r = i % kRows;
      const int piece = i % kPieces / kRows;
      const AppendRow& row = t_.row[r];
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
        store_key(r, 8 * piece, x);
      } else {
        store_value(r, 8 * piece, x);
      }
    }
  }
  // store_key of load(): keys without their constant means.
  __device__ void store_key_row(int r, int d, const float (&x)[8]) {
    const auto* means = reinterpret_cast<const float4*>(p_.encoder.constant_mean + head_ * D + d);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 two = __ldg(means + j);
      t_.x[0][d + 2 * j][r] = __fsub_rn(__fsub_rn(x[2 * j], two.x), two.y);
      t_.x[0][d + 2 * j + 1][r] = __fsub_rn(__fsub_rn(x[2 * j + 1], two.z), two.w);
    }
  }

  // Keys minus the RoPE-rotated mean.
  __device__ void subtract_means() {
    const EncoderView& e = p_.encoder;
    for (int i = thread_; i < e.n_pairs * kRows; i += kAppendThreads) {
      const int pair = i / kRows;
      const int r = i % kRows;
      if (t_.row[r].source < 0) continue;
      double sine, cosine;
      sincos(__dmul_rn(static_cast<double>(t_.row[r].position), __ldg(e.theta + pair)), &sine, &cosine);
      const float c = __double2float_rn(__dmul_rn(cosine, e.magnitude));
      const float s = __double2float_rn(__dmul_rn(sine, e.magnitude));
      const ushort2 at = e.pair[pair];
      const float2 mean = __ldg(e.mean + head_ * e.n_pairs + pair);
      float& first = t_.x[0][at.x][r];
      float& second = t_.x[0][at.y][r];
      first = __fsub_rn(first, __fsub_rn(__fmul_rn(mean.x, c), __fmul_rn(mean.y, s)));
      second = __fsub_rn(second, __fadd_rn(__fmul_rn(mean.x, s), __fmul_rn(mean.y, c)));
    }
  }

  // Coordinate d of the thread's rows.
  __device__ __forceinline__ void load_rows(int which, int d, float (&x)[Piece::kEach]) const {
    const float* from = &t_.x[which][d][piece_.first_row];
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

  // y = x times a matrix of which load_row(d, m) loads row d, the thread's columns.
  template <class LoadRow>
  __device__ __forceinline__ void transform(int which, LoadRow&& load_row, float (&z)[Piece::kEach][Piece::kVectors][4]) const {
    if (!piece_.works()) return;
    constexpr int kAtOnce = 4 / Piece::kVectors;  // rows; as many more are on their way
    float4 next[kAtOnce][Piece::kVectors];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) load_row(i, next[i]);
#pragma unroll 2
    for (int base = 0; base < D; base += kAtOnce) {
      float4 m[kAtOnce][Piece::kVectors];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int v = 0; v < Piece::kVectors; ++v) m[i][v] = next[i][v];
        if (base + kAtOnce < D) load_row(base + kAtOnce + i, next[i]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float x[Piece::kEach];
        load_rows(which, base + i, x);
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
  // Where in a row of a matrix the thread's vector v stands.
  [[nodiscard]] __device__ __forceinline__ int matrix_place(int d, int v) const {
    return d * (D / 4) + piece_.lane + Piece::kLanes * v;
  }

  // Gains or grids of the row's token, of keys; those of values are row_data_bytes() further.
  [[nodiscard]] __device__ std::uint8_t* row_data(const AppendRow& row) const {
    return row.page + paged::key_bytes(p_.layer.slots[head_]) + paged::value_bytes(D);
  }

  __device__ void store_digits() {
    const int slots = p_.layer.slots[head_];
    constexpr int kWarps = kAppendThreads / 32 - 2;
    for (int r = thread_ / 32 - 2; r < kRows; r += kWarps) {
      const AppendRow& row = t_.row[r];
      if (row.source < 0 || row.page == nullptr) continue;
      for (int word = thread_ % 32; word < slots / 4; word += 32) store_key_word(row, r, word, slots);
      for (int byte = thread_ % 32; byte < D / 4; byte += 32) store_value_byte(row, r, byte, slots);
    }
  }
  // Slots 4 word .. 4 word + 3: one field of each byte of a word. The other fields are those of tokens of the page's other
  // groups of 16, of this tile or another block's: a row changes its own ones only, by atomic operations.
  __device__ void store_key_word(const AppendRow& row, int r, int word, int slots) {
    const std::uint16_t* source = p_.layer.slot_source + head_ * p_.layer.max_slots + 4 * word;
    std::uint32_t digits = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const unsigned from = __ldg(source + k);
      digits |= (static_cast<std::uint32_t>(t_.code[0][r][from % 4096U]) >> (2U * (from / 4096U)) & 3U) << (8 * k);
    }
    const paged::DigitPlace place = paged::key_digit(slots, row.position % kPageTokens, 4 * word);
    auto* to = reinterpret_cast<unsigned*>(row.page + place.byte);
    atomicAnd(to, ~(0x03030303U << place.shift));
    atomicOr(to, digits << place.shift);
  }
  // Dimensions d, d + 16, d + 32 and d + 48: a byte of this token alone.
  __device__ void store_value_byte(const AppendRow& row, int r, int byte, int slots) {
    const int dim = byte / 16 * 64 + byte % 16;
    unsigned digits = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) digits |= static_cast<unsigned>(t_.code[1][r][dim + 16 * k]) << (2 * k);
    const std::uint32_t at = paged::key_bytes(slots) + paged::value_digit(D, row.position % kPageTokens, dim).byte;
    row.page[at] = static_cast<std::uint8_t>(digits);
  }

  const AppendParams& p_;
  TileShared& t_;
  int head_, thread_;
  Piece piece_;
};

}  // namespace oscar::cuda
