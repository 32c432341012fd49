// Launch of the portable kernel of a prefill, included once per head_dim.
#pragma once

#include "cuda/prefill_portable.cuh"

namespace oscar::cuda {

template <int D, bool kInt2>
cudaError_t launch_portable(PrefillParams& p, int device, cudaStream_t stream, bool* fits) {
  const std::uint32_t bytes = PortableMemory<D, kInt2>::bytes(p.layer.max_slots);
  *fits = bytes <= static_cast<std::uint32_t>(p.shared_bytes);
  if (!*fits) return cudaSuccess;
  auto* kernel = portable_prefill_kernel<D, kInt2>;
  static OncePerDevice kernels;
  const cudaError_t raised = kernels(
      device, [&] { return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, p.shared_bytes); });
  if (raised != cudaSuccess) return raised;
  p.units = most_units(p, kPortableRows);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(p.units * p.layer.n_head_kv));
  config.blockDim = dim3(kPortableThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, p);
}

template <int D>
cudaError_t choose_codec(PrefillParams& p, int device, cudaStream_t stream, bool* fits) {
  return p.layer.codec == paged::PageCodec::int2 ? launch_portable<D, true>(p, device, stream, fits)
                                                 : launch_portable<D, false>(p, device, stream, fits);
}

}  // namespace oscar::cuda
