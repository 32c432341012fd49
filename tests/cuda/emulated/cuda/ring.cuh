// Stands in for src/cuda/ring.cuh where kernels run on the CPU, see emulated_gpu.h: copies are there at once.
#pragma once

#include "cuda/primitives.cuh"

namespace oscar::cuda {

class TileRing {
 public:
  TileRing(std::uint32_t base, std::uint32_t /*barriers*/, int stages, std::uint32_t stage_bytes, int /*lane*/)
      : base_(base), stage_bytes_(stage_bytes), stages_(stages) {}

  [[nodiscard]] int stages() const { return stages_; }
  void issue(const std::uint8_t* from, std::uint32_t bytes) {
    if (pending_ == stages_ || bytes > stage_bytes_ || bytes % 16 != 0) std::abort();
    ++pending_;
    std::memcpy(emulated_shared + base_ + static_cast<std::uint32_t>(issue_stage_) * stage_bytes_, from, bytes);
    issue_stage_ = issue_stage_ + 1 == stages_ ? 0 : issue_stage_ + 1;
  }
  std::uint32_t acquire() {
    if (pending_ == 0) std::abort();
    return base_ + static_cast<std::uint32_t>(stage_) * stage_bytes_;
  }
  void release() {
    Block::running().meet_warp();
    --pending_;
    stage_ = stage_ + 1 == stages_ ? 0 : stage_ + 1;
  }

  static constexpr int kMaxStages = 4;

 private:
  std::uint32_t base_, stage_bytes_;
  int stages_;
  int issue_stage_ = 0, stage_ = 0, pending_ = 0;
};

}  // namespace oscar::cuda
