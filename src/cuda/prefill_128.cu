#include "cuda/prefill_launch.cuh"

namespace oscar::cuda {

cudaError_t launch_prefill_128(PrefillParams& p, int device, cudaStream_t stream, bool* fits) {
  return choose_blocks<128>(p, device, stream, fits);
}

}  // namespace oscar::cuda
