// Launch of a prefill, included once per head_dim.
#pragma once

#include "cuda/prefill_attend.cuh"

namespace oscar::cuda {

template <int D, int kBlocks, bool kCap>
cudaError_t launch(PrefillParams& p, int device, cudaStream_t stream, bool* fits) {
  using Memory = PrefillMemory<D>;
  *fits = Memory::stages(p.layer.max_slots, p.shared_bytes) > 0;
  if (!*fits) return cudaSuccess;
  auto* kernel = prefill_kernel<D, kBlocks, kCap>;
  static OncePerDevice kernels;
  const cudaError_t raised = kernels(
      device, [&] { return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, p.shared_bytes); });
  if (raised != cudaSuccess) return raised;
  p.units = most_units(p, kPrefillRows * kBlocks);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(p.units * p.layer.n_head_kv * kBlocks));
  config.blockDim = dim3(kPrefillThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(p.shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = kBlocks;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = kBlocks > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, p);
}

template <int D, int kBlocks>
cudaError_t choose_cap(PrefillParams& p, int device, cudaStream_t stream, bool* fits) {
  return p.soft_cap > 0.0F ? launch<D, kBlocks, true>(p, device, stream, fits)
                           : launch<D, kBlocks, false>(p, device, stream, fits);
}
template <int D>
cudaError_t choose_blocks(PrefillParams& p, int device, cudaStream_t stream, bool* fits) {
  // The two blocks of a cluster share the making of keys, which takes twice the rows. Clusters of 4 share more, but as many as
  // a GPU holds at once leave more of it idle.
  const bool two = std::int64_t{p.n_tokens} * p.group >= std::int64_t{4} * kPrefillRows * p.batch;
  return two ? choose_cap<D, 2>(p, device, stream, fits) : choose_cap<D, 1>(p, device, stream, fits);
}

}  // namespace oscar::cuda
