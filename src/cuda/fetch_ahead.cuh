// Fetching what will be needed, without waiting for it. On the CPU (tests/cuda/emulated_append.cpp) nothing has to be waited
// for.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace oscar::cuda {

// Into L2, whenever it comes.
__device__ __forceinline__ void prefetch(const void* line) {
#if __CUDA_ARCH__ > 0
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
#else
  static_cast<void>(line);
#endif
}
// 16 bytes from global to shared memory, there after wait_for_copies() and a barrier.
__device__ __forceinline__ void copy_ahead(void* to, const void* from) {
#if __CUDA_ARCH__ > 0
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
#else
  *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
#endif
}
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ > 0
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

}  // namespace oscar::cuda
