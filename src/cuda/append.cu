// Launch of the append.
#include "cuda/append.cuh"

namespace oscar::cuda {
namespace {

template <template <int, int> class Append, int D, int kRows>
cudaError_t launch(AppendParams& p, int device, cudaStream_t stream) {
  p.tiles = (p.n_rows + kRows - 1) / kRows;
  constexpr int kShared = static_cast<int>(sizeof(typename Append<D, kRows>::Shared));
  auto* kernel = append_kernel<Append, D, kRows>;
  static OncePerDevice kernels;
  const cudaError_t raised =
      kernels(device, [&] { return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared); });
  if (raised != cudaSuccess) return raised;
  kernel<<<static_cast<unsigned>(p.tiles * p.layer.n_head_kv), kAppendThreads, kShared, stream>>>(p);
  return cudaGetLastError();
}

// Small tiles, which take less time each, as long as all blocks run at once.
template <template <int, int> class Append, int D>
cudaError_t choose(AppendParams& p, const DeviceLimits& device, cudaStream_t stream) {
  const std::int64_t small = (std::int64_t{p.n_rows} + kSmallTile - 1) / kSmallTile * p.layer.n_head_kv;
  return small <= 2 * device.multiprocessors ? launch<Append, D, kSmallTile>(p, device.id, stream)
                                             : launch<Append, D, kLargeTile>(p, device.id, stream);
}
template <template <int, int> class Append>
cudaError_t choose_dim(AppendParams& p, const DeviceLimits& device, cudaStream_t stream) {
  switch (p.layer.head_dim) {
    case 64:
      return choose<Append, 64>(p, device, stream);
    case 128:
      return choose<Append, 128>(p, device, stream);
    default:
      return choose<Append, 256>(p, device, stream);
  }
}

}  // namespace

cudaError_t launch_append(AppendParams& p, const DeviceLimits& device, cudaStream_t stream) {
  return p.layer.codec == paged::PageCodec::int2 ? choose_dim<Int2Append>(p, device, stream)
                                                 : choose_dim<SpectralAppend>(p, device, stream);
}

}  // namespace oscar::cuda
