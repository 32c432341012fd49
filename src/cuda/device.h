// What is asked of a GPU, and set for a kernel on it, once per device of the process.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <mutex>

namespace oscar::cuda {

inline constexpr int kMostDevices = 64;

struct DeviceLimits {
  int id = 0, multiprocessors = 0, shared_bytes = 0, major = 0;  // shared_bytes: of a block, at most
};

// Of the current device.
const DeviceLimits& current_device();

// A kernel's attributes hold for one device: sets them on each when it is first used.
class OncePerDevice {
 public:
  // set() is called once per device; its result is what every call for that device returns.
  template <class Set>
  cudaError_t operator()(int device, Set&& set) {
    const auto at = static_cast<std::size_t>(device);
    std::call_once(done_[at], [&] { status_[at] = set(); });
    return status_[at];
  }

 private:
  std::array<std::once_flag, kMostDevices> done_;
  std::array<cudaError_t, kMostDevices> status_{};
};

}  // namespace oscar::cuda
