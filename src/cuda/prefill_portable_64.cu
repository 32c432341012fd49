#include "cuda/prefill_portable_launch.cuh"

namespace oscar::cuda {

cudaError_t launch_portable_prefill_64(PrefillParams& p, int device, cudaStream_t stream, bool* fits) {
  return choose_codec<64>(p, device, stream, fits);
}

}  // namespace oscar::cuda
