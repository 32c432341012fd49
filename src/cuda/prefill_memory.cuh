// Shared memory of a block of a prefill, and the tables that its warps fill first.
#pragma once

#include "cuda/prefill_rows.cuh"
#include "cuda/wgmma.cuh"

namespace oscar::cuda {

// Groups of four warps: one makes tiles of keys, one of values, two consume them.
inline constexpr int kPrefillThreads = 512;
inline constexpr int kMakers = 256;
inline constexpr int kPageStages = 4;
inline constexpr int kMostTileStages = 4;

// Values of coded tiles are (code - 1.5) 2^((n - 40) / 8) of these units: what multiplies a subnormal digit stays below 2^16.
inline constexpr float kValueUnit = 0x1p-11F;

// Offsets in bytes from a 1024-byte aligned start.
template <int D>
struct PrefillMemory {
  static_assert(sizeof(PrefillUnit) <= 80);
  static constexpr std::uint32_t kHalfTile = kPageTokens * D * 2;  // keys [64, D], or values [D, 64]
  static constexpr std::uint32_t kTile = 2 * kHalfTile;
  static constexpr std::uint32_t kQuery = kPrefillRows * D * 2;
  // Barriers: of tiles (keys and values each arrive once), empty, empty in the other block of the cluster; of pages.
  static constexpr std::uint32_t kFull = 0, kEmpty = 32, kPeerEmpty = 64, kPage = 96, kPageEmpty = 128;
  static constexpr std::uint32_t kScalars = 160;                     // float: unit of the product of keys
  static constexpr std::uint32_t kUnit = 176;                        // PrefillUnit
  static constexpr std::uint32_t kColumns = 256;                     // float4 [D / 2]: of two columns, the product's start
  static constexpr std::uint32_t kTurns = kColumns + D / 2 * 16;     // float2 [D / 2]
  static constexpr std::uint32_t kKeyGains = kTurns + D / 2 * 8;     // float [256]
  static constexpr std::uint32_t kValueGains = kKeyGains + 256 * 4;  // float [64]
  static constexpr std::uint32_t kOrder = kValueGains + 64 * 4;      // u16 [D] coordinate of a key's column
  static constexpr std::uint32_t kWork = kOrder + D * 2;             // 64 words
  static constexpr std::uint32_t kRowShift = kWork + 256;            // float [128] of a query row: logit of the key constant
  static constexpr std::uint32_t kPages = (kRowShift + 4 * kPrefillRows + 127) / 128 * 128;

  __host__ __device__ static constexpr std::uint32_t page_stage(int slots) {
    return (paged::head_bytes(slots, D) + 127U) / 128U * 128U;
  }
  __host__ __device__ static constexpr std::uint32_t queries(int slots) {
    return (kPages + kPageStages * page_stage(slots) + 1023U) / 1024U * 1024U;
  }
  __host__ __device__ static constexpr std::uint32_t basis(int slots) { return queries(slots) + kQuery; }
  __host__ __device__ static constexpr std::uint32_t tiles(int slots) {
    return basis(slots) + static_cast<std::uint32_t>((slots + 63) / 64) * D * 128U;
  }
  __host__ __device__ static constexpr std::uint32_t bytes(int slots, int stages) {
    return tiles(slots) + static_cast<std::uint32_t>(stages) * kTile + 1024U;
  }
  // Tiles of a head of so many slots that fit, 0: fewer than two.
  __host__ __device__ static constexpr int stages(int slots, int shared_bytes) {
    for (int n = kMostTileStages; n > 1; --n) {
      if (bytes(slots, n) <= static_cast<std::uint32_t>(shared_bytes)) return n;
    }
    return 0;
  }
};

// Where a group is in the ring of pages.
class PageRing {
 public:
  [[nodiscard]] __device__ int stage() const { return stage_; }
  [[nodiscard]] __device__ std::uint32_t offset() const { return 8U * static_cast<std::uint32_t>(stage_); }
  [[nodiscard]] __device__ std::uint32_t round() const { return round_; }
  [[nodiscard]] __device__ std::uint32_t parity() const { return round_ & 1U; }
  __device__ void next() {
    if (++stage_ == kPageStages) {
      stage_ = 0;
      ++round_;
    }
  }

 private:
  int stage_ = 0;
  std::uint32_t round_ = 0;
};

// Where a maker is in the ring of tiles.
template <int D>
class MakerRing {
 public:
  __device__ MakerRing(std::uint32_t shared, std::uint32_t tiles, int stages)
      : shared_(shared), tiles_(shared + tiles), stages_(stages) {}
  [[nodiscard]] __device__ std::uint32_t tile() const {
    return tiles_ + static_cast<std::uint32_t>(stage_) * PrefillMemory<D>::kTile;
  }
  [[nodiscard]] __device__ std::uint32_t barrier(std::uint32_t kind) const {
    return shared_ + kind + 8U * static_cast<std::uint32_t>(stage_);
  }
  [[nodiscard]] __device__ std::uint32_t round() const { return round_; }
  [[nodiscard]] __device__ int stages() const { return stages_; }
  // Tiles that stage held so far.
  [[nodiscard]] __device__ std::uint32_t uses(int stage) const { return round_ + (stage < stage_ ? 1U : 0U); }
  __device__ __forceinline__ void wait_empty() const {
    if (round_ > 0) barrier_await(barrier(PrefillMemory<D>::kEmpty), (round_ - 1U) & 1U);
  }
  __device__ void next() {
    if (++stage_ == stages_) {
      stage_ = 0;
      ++round_;
    }
  }

 private:
  std::uint32_t shared_, tiles_;
  int stages_, stage_ = 0;
  std::uint32_t round_ = 0;
};

}  // namespace oscar::cuda
