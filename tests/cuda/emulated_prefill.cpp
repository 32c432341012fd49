// The portable kernel of a prefill without a GPU: this file stands in for prefill_portable_*.cu. The emulated GPU is one of
// compute capability 8.0, so that all cases take it.
#define OSCAR_EMULATED_MAJOR 8
#include "emulated_gpu.h"

#include "cuda/prefill_portable_launch.cuh"

namespace oscar::cuda {

cudaError_t launch_portable_prefill_64(PrefillParams& p, int device, cudaStream_t stream, bool* fits) {
  return choose_codec<64>(p, device, stream, fits);
}
cudaError_t launch_portable_prefill_128(PrefillParams& p, int device, cudaStream_t stream, bool* fits) {
  return choose_codec<128>(p, device, stream, fits);
}
cudaError_t launch_portable_prefill_256(PrefillParams& p, int device, cudaStream_t stream, bool* fits) {
  return choose_codec<256>(p, device, stream, fits);
}
// Of compute capability 9.0.
cudaError_t launch_prefill_64(PrefillParams&, int, cudaStream_t, bool*) { return cudaErrorNoKernelImageForDevice; }
cudaError_t launch_prefill_128(PrefillParams&, int, cudaStream_t, bool*) { return cudaErrorNoKernelImageForDevice; }

}  // namespace oscar::cuda
