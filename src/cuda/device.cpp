#include "cuda/device.h"

#include "cuda/runtime.h"

namespace oscar::cuda {

const DeviceLimits& current_device() {
  static std::array<DeviceLimits, kMostDevices> devices;
  static std::array<std::once_flag, kMostDevices> known;
  int id = 0;
  check(cudaGetDevice(&id), "cudaGetDevice");
  if (id < 0 || id >= kMostDevices) fail("cuda: device {}; devices 0 to {} are possible", id, kMostDevices - 1);
  const auto at = static_cast<std::size_t>(id);
  std::call_once(known[at], [&] {
    DeviceLimits& d = devices[at];
    d.id = id;
    const auto ask = [&](int& value, cudaDeviceAttr attribute) {
      check(cudaDeviceGetAttribute(&value, attribute, id), "cudaDeviceGetAttribute");
    };
    ask(d.multiprocessors, cudaDevAttrMultiProcessorCount);
    ask(d.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    ask(d.major, cudaDevAttrComputeCapabilityMajor);
  });
  return devices[at];
}

}  // namespace oscar::cuda
