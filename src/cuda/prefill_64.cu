#include "cuda/prefill_launch.cuh"

namespace oscar::cuda {

cudaError_t launch_prefill_64(PrefillParams& p, cudaStream_t stream, bool* fits) { return choose_blocks<64>(p, stream, fits); }

}  // namespace oscar::cuda
