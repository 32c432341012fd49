// The kernels of a decode without a GPU: this file stands in for decode.cu and decode_int2.cu.
#include "emulated_gpu.h"

// Of the kernels, a block at a time runs.
#undef __shared__
#define __shared__ static
#include "cuda/decode_launch.cuh"

namespace oscar::cuda {

cudaError_t launch_decode_spectral(DecodeParams& p, const DeviceLimits& device, cudaStream_t stream, bool* fits) {
  return choose_dim<false>(p, device, stream, fits);
}
cudaError_t launch_decode_int2(DecodeParams& p, const DeviceLimits& device, cudaStream_t stream, bool* fits) {
  return choose_dim<true>(p, device, stream, fits);
}

}  // namespace oscar::cuda
