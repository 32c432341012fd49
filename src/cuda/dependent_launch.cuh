// Programmatic dependent launch: a kernel may start before its predecessor ended; what the predecessor wrote may be read after
// wait_for_predecessor() only.
#pragma once

namespace oscar::cuda {

__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_successor_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace oscar::cuda
