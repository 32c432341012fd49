// A warp's own ring of tiles in shared memory: no other warp takes part, so the main loop has no block-wide barrier.
#pragma once

#include "cuda/primitives.cuh"

namespace oscar::cuda {

class TileRing {
 public:
  // base, barriers: shared addresses; barriers: one of 8 bytes per stage.
  __device__ TileRing(std::uint32_t base, std::uint32_t barriers, int stages, std::uint32_t stage_bytes, int lane)
      : base_(base), barriers_(barriers), stage_bytes_(stage_bytes), stages_(stages), lane_(lane) {
#if __CUDA_ARCH__ >= 900
    policy_ = read_once_policy();
    if (lane < stages) barrier_init(barriers + 8 * static_cast<std::uint32_t>(lane));
    barrier_init_visible();
    __syncwarp();
#endif
  }

  [[nodiscard]] __device__ int stages() const { return stages_; }

  // Starts the copy of the next tile. bytes is a multiple of 16; at most stages() tiles are on their way or in use.
  __device__ void issue(const std::uint8_t* from, std::uint32_t bytes) {
    const std::uint32_t to = base_ + static_cast<std::uint32_t>(issue_stage_) * stage_bytes_;
#if __CUDA_ARCH__ >= 900
    bulk_copy(to, from, bytes, barriers_ + 8 * static_cast<std::uint32_t>(issue_stage_), policy_);
#else
    for (std::uint32_t i = static_cast<std::uint32_t>(lane_) * 16; i < bytes; i += 512) copy_16(to + i, from + i);
    asm volatile("cp.async.commit_group;" ::: "memory");
    ++pending_;
#endif
    issue_stage_ = issue_stage_ + 1 == stages_ ? 0 : issue_stage_ + 1;
  }
  // Waits for the oldest tile; its shared address.
  __device__ std::uint32_t acquire() {
#if __CUDA_ARCH__ >= 900
    barrier_wait(barriers_ + 8 * static_cast<std::uint32_t>(stage_), parity_);
#else
    --pending_;
    if (pending_ == 0) {
      asm volatile("cp.async.wait_group 0;" ::: "memory");
    } else if (pending_ == 1) {
      asm volatile("cp.async.wait_group 1;" ::: "memory");
    } else if (pending_ == 2) {
      asm volatile("cp.async.wait_group 2;" ::: "memory");
    } else {
      asm volatile("cp.async.wait_group 3;" ::: "memory");
    }
    __syncwarp();
#endif
    return base_ + static_cast<std::uint32_t>(stage_) * stage_bytes_;
  }
  // The oldest tile was read by all lanes; its place may be filled again.
  __device__ void release() {
    __syncwarp();
    if (++stage_ == stages_) {
      stage_ = 0;
      parity_ ^= 1U;
    }
  }

  static constexpr int kMaxStages = 4;

 private:
  std::uint32_t base_, barriers_, stage_bytes_;
  int stages_, lane_;
  int issue_stage_ = 0, stage_ = 0;
  std::uint32_t parity_ = 0;
#if __CUDA_ARCH__ >= 900
  std::uint64_t policy_ = 0;
#else
  int pending_ = 0;
#endif
};

}  // namespace oscar::cuda
