// Queries of the portable prefill kernel, as A fragments of m16n8k16 in shared memory: of a warp's 16 rows and 16 columns of
// the summed index, lane 4 g + t has 16 bytes: row g columns 2 t, 2 t + 1, row g + 8 the same, row g columns 2 t + 8, 2 t + 9,
// row g + 8 the same. They come in three forms:
//   model   in the model's basis, for exact rows, and what the other forms are made of
//   coded   in the basis of the codes, steps, digits' places and scale included: columns are slots. Rounded once.
//   pairs   for RoPE means: per step of 16 pairs and row g + 8 r, 16 bytes: first coordinates of pairs 2 t, 2 t + 1, second
//           ones, then of pairs 2 t + 8, 2 t + 9
#pragma once

#include "cuda/prefill_portable_memory.cuh"
#include "cuda/prefill_portable_products.cuh"
#include "cuda/warp_reduce.cuh"

namespace oscar::cuda {

template <int D, bool kInt2>
class PortableQueries {
  using Memory = PortableMemory<D, kInt2>;

 public:
  __device__ PortableQueries(const PrefillParams& p, const PrefillUnit& u, std::uint32_t shared, int warp, int lane)
      : p_(p), u_(u), shared_(shared), warp_(warp), lane_(lane), model_(shared + Memory::kQueries) {}

  // Addresses of the warp's fragments.
  [[nodiscard]] __device__ std::uint32_t own() const {
    return model_ + static_cast<std::uint32_t>(warp_) * Memory::kWarpQueries;
  }
  [[nodiscard]] __device__ std::uint32_t own_coded(int slots) const {
    return shared_ + Memory::kCoded + static_cast<std::uint32_t>(warp_) * Memory::warp_coded(slots);
  }

  // The warp's rows in the model's basis. logit: of its two rows with the constant of coded keys.
  __device__ __forceinline__ void load(float (&logit)[2]) {
    const float* constant = p_.layer.key_constant + u_.kv * D + lane_ % 4 * 2;
    const __half* const rows[2] = {row(0), row(1)};
    float squares[2] = {};
    logit[0] = logit[1] = 0;
    __syncwarp();
#pragma unroll 4
    for (int step = 0; step < D / 16; ++step) {
      std::uint32_t words[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int d = 16 * step + 8 * half;
        const float2 c = __ldg(reinterpret_cast<const float2*>(constant + d));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          std::uint32_t& word = words[2 * half + r];
          word = rows[r] != nullptr ? __ldg(reinterpret_cast<const std::uint32_t*>(rows[r] + d + lane_ % 4 * 2)) : 0U;
          const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&word));
          logit[r] += x.x * c.x + x.y * c.y;
          squares[r] += x.x * x.x + x.y * x.y;
        }
      }
      store_shared_16(own() + static_cast<std::uint32_t>(512 * step + 16 * lane_),
                      make_uint4(words[0], words[1], words[2], words[3]));
    }
    float most = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      logit[r] = quad_sum(logit[r]) * (p_.scale * kLog2E);
      const float norm = quad_sum(squares[r]);
      if (norm < 3e38F) most = fmaxf(most, norm);  // a query that is not finite is the only one that suffers
    }
    most = warp_max(most);
    if (lane_ == 0) store_shared_float(shared_ + Memory::kNorms + 4U * static_cast<std::uint32_t>(warp_), most);
    __syncwarp();
  }

  // Coded queries of all rows, by all warps; after load(), between two barriers of the block. Base-2 logits are their products
  // with digits times what is returned: a power of two, with which no coordinate of the block exceeds 2^15.
  __device__ __forceinline__ float transform(int slots) const {
    float norm = 0;
#pragma unroll
    for (int w = 0; w < kPortableWarps; ++w)
      norm = fmaxf(norm, load_shared_float(shared_ + Memory::kNorms + 4U * static_cast<std::uint32_t>(w)));
    const float peak = __ldg(p_.layer.query_peak + u_.kv);
    const float scale = p_.scale * kLog2E;
    const int exponent = exponent_of(sqrtf(norm * static_cast<float>(D)) * peak * scale) - 14;
    // The matrix as two binary16 numbers per entry, the larger ones about 2^10.
    const int matrix_exponent = exponent_of(peak) - 10;
    const float to_matrix = ldexpf(1.0F, -matrix_exponent);
    const float from_matrix = ldexpf(scale, matrix_exponent - exponent);
    const float* matrix = p_.layer.query + static_cast<std::int64_t>(u_.kv) * D * D + lane_ % 4 * 2 * D;
    const std::uint16_t* source = p_.layer.slot_source + u_.kv * p_.layer.max_slots;
#pragma unroll 1
    for (int step = warp_; step < slots / 16; step += kPortableWarps) {
      const float* column[2];
      float weight[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const unsigned from = __ldg(source + 16 * step + slot_of_column(lane_ / 4 + 8 * n));
        column[n] = matrix + static_cast<int>(from % 4096U);
        weight[n] = to_matrix * static_cast<float>(1U << (2 * (from / 4096U)));
      }
      float sum[kPortableWarps][2][4] = {};
#pragma unroll 2
      for (int d = 0; d < D; d += 16) {
        SplitFragment<D> b[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) b[n].load(column[n] + d * D, weight[n]);
#pragma unroll
        for (int w = 0; w < kPortableWarps; ++w) {
          const uint4 a = load_shared_16(model_ + static_cast<std::uint32_t>(w) * Memory::kWarpQueries +
                                         static_cast<std::uint32_t>(32 * d + 16 * lane_));
#pragma unroll
          for (int n = 0; n < 2; ++n) b[n].multiply(sum[w][n], a);
        }
      }
#pragma unroll
      for (int w = 0; w < kPortableWarps; ++w) {
        std::uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          words[i] = pack_half2(sum[w][i / 2][i % 2 * 2] * from_matrix, sum[w][i / 2][i % 2 * 2 + 1] * from_matrix);
        store_shared_16(shared_ + Memory::kCoded + static_cast<std::uint32_t>(w) * Memory::warp_coded(slots) +
                            static_cast<std::uint32_t>(512 * step + 16 * lane_),
                        make_uint4(words[0], words[1], words[2], words[3]));
      }
    }
    return ldexpf(1.0F, exponent);
  }
  // What logits of codes start from, of the warp's rows: logit, and the sums of coded queries, as they were rounded. After
  // transform() and a barrier of the block.
  __device__ __forceinline__ void store_rows(int slots, const float (&logit)[2]) const {
    float sum[4] = {};
    for (int step = 0; step < slots / 16; ++step) {
      const uint4 a = load_shared_16(own_coded(slots) + static_cast<std::uint32_t>(512 * step + 16 * lane_));
      mma(sum, a, kTwoOnes, kTwoOnes);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (lane_ % 4 != 0) continue;
      store_shared_float(row_data(r), logit[r]);
      store_shared_float(row_data(r) + 4U, sum[2 * r]);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void load_rows(float (&logit)[2], float (&sum)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint2 both = load_shared_8(row_data(r));
      logit[r] = __uint_as_float(both.x);
      sum[r] = __uint_as_float(both.y);
    }
  }

  // The warp's rows in the order of pairs, in place of the model's form.
  __device__ __forceinline__ void order_by_pairs() const {
    const std::uint16_t* pairs = p_.layer.pair + lane_ % 4 * 4;
    const __half* const rows[2] = {row(0), row(1)};
    __syncwarp();
    for (int step = 0; step < p_.layer.n_pairs / 16; ++step) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        std::uint32_t words[4] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (rows[r] == nullptr) continue;
          const ushort4 at = __ldg(reinterpret_cast<const ushort4*>(pairs + 32 * step + 16 * half));
          words[2 * half] = both(rows[r], at.x, at.z);
          words[2 * half + 1] = both(rows[r], at.y, at.w);
        }
        store_shared_16(own() + static_cast<std::uint32_t>((2 * step + r) * 512 + 16 * lane_),
                        make_uint4(words[0], words[1], words[2], words[3]));
      }
    }
    __syncwarp();
  }

 private:
  // The lane's row g + 8 r in q, null: none.
  [[nodiscard]] __device__ const __half* row(int r) const {
    const int row = 16 * warp_ + lane_ / 4 + 8 * r;
    if (row >= u_.rows) return nullptr;
    return p_.q + u_.row_index(p_, row) * D;
  }
  [[nodiscard]] __device__ std::uint32_t row_data(int r) const {
    return shared_ + Memory::kRows + static_cast<std::uint32_t>(8 * (16 * warp_ + lane_ / 4 + 8 * r));
  }
  static __device__ __forceinline__ std::uint32_t both(const __half* row, int low, int high) {
    const __half2 x = __halves2half2(__ldg(row + low), __ldg(row + high));
    return *reinterpret_cast<const std::uint32_t*>(&x);
  }

  const PrefillParams& p_;
  const PrefillUnit& u_;
  std::uint32_t shared_;
  int warp_, lane_;
  std::uint32_t model_;
};

}  // namespace oscar::cuda
