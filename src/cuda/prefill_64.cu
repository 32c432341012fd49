#include "cuda/prefill_launch.cuh"

namespace oscar::cuda {

cudaError_t launch_prefill_64(PrefillParams& p, int device, cudaStream_t stream, bool* fits) {
  return choose_blocks<64>(p, device, stream, fits);
}

}  // namespace oscar::cuda
