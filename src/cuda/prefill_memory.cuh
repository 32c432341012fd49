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
  // Rings of barriers: keys of tiles, values of tiles (of each kFull and kEmpty; of keys also: empty in the other block of the
  // cluster); pages.
  static constexpr std::uint32_t kKeyRing = 0, kValueRing = 96;
  static constexpr std::uint32_t kFull = 0, kEmpty = 32, kPeerEmpty = 64;
  static constexpr std::uint32_t kPage = 160, kPageEmpty = 192;
  static constexpr std::uint32_t kReaders = 256;                     // threads that give a tile or a page back, each for itself
  static constexpr std::uint32_t kScalars = 224;                     // float: unit of the product of keys
  static constexpr std::uint32_t kUnit = 240;                        // PrefillUnit
  static constexpr std::uint32_t kTurns = 384;                       // float2 [16 tokens, D / 2]: see mean_place()
  static constexpr std::uint32_t kMeans = kTurns + 16 * D * 4;       // float2 [4 warps, D / 2]
  static constexpr std::uint32_t kKeyGains = kMeans + 4 * D * 4;     // float [256]
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
    return basis(slots) + static_cast<std::uint32_t>(slots == 0 ? 1 : (slots + 63) / 64) * D * 128U;
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

// Where a group is in a ring of barriers and what they guard.
class RingPlace {
 public:
  [[nodiscard]] __device__ std::uint32_t stage() const { return static_cast<std::uint32_t>(stage_); }
  [[nodiscard]] __device__ std::uint32_t offset() const { return 8U * stage(); }
  // Of the place before.
  [[nodiscard]] __device__ std::uint32_t last_offset(int stages) const {
    return 8U * static_cast<std::uint32_t>((stage_ == 0 ? stages : stage_) - 1);
  }
  [[nodiscard]] __device__ std::uint32_t parity() const { return round_ & 1U; }  // of what comes
  // What stage held so far.
  [[nodiscard]] __device__ std::uint32_t uses(int stage) const { return round_ + (stage < stage_ ? 1U : 0U); }
  // Until what was there before has been used.
  __device__ __forceinline__ void wait_empty(std::uint32_t empty) const {
    if (round_ > 0) barrier_await(empty + offset(), (round_ - 1U) & 1U);
  }
  __device__ void next(int stages) {
    if (++stage_ < stages) return;
    stage_ = 0;
    ++round_;
  }

 private:
  int stage_ = 0;
  std::uint32_t round_ = 0;
};

}  // namespace oscar::cuda
