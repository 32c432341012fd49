#include "cuda/decode_launch.cuh"

namespace oscar::cuda {

cudaError_t launch_decode_int2(DecodeParams& p, const DeviceLimits& device, cudaStream_t stream, bool* fits) {
  return choose_dim<true>(p, device, stream, fits);
}

}  // namespace oscar::cuda
