// The append kernel without a GPU: this file stands in for append.cu.
#include "emulated_gpu.h"

#include "cuda/append.cuh"

namespace oscar::cuda {

alignas(128) std::uint8_t append_shared[128 << 10];

namespace {

template <template <int, int> class Append, int D, int kRows>
void run(AppendParams& p) {
  p.tiles = (p.n_rows + kRows - 1) / kRows;
  Launch<AppendParams>::run(append_kernel<Append, D, kRows>, static_cast<unsigned>(p.tiles * p.layer.n_head_kv), kAppendThreads,
                            p);
}
// Both kinds of tiles occur in the quick cases.
template <template <int, int> class Append, int D>
void choose(AppendParams& p) {
  p.n_rows < 17 ? run<Append, D, kSmallTile>(p) : run<Append, D, kLargeTile>(p);
}
template <template <int, int> class Append>
void choose_dim(AppendParams& p) {
  switch (p.layer.head_dim) {
    case 64:
      choose<Append, 64>(p);
      break;
    case 128:
      choose<Append, 128>(p);
      break;
    default:
      choose<Append, 256>(p);
  }
}

}  // namespace

cudaError_t launch_append(AppendParams& p, const DeviceLimits& /*device*/, cudaStream_t /*stream*/) {
  p.layer.codec == paged::PageCodec::int2 ? choose_dim<Int2Append>(p) : choose_dim<SpectralAppend>(p);
  return cudaSuccess;
}

}  // namespace oscar::cuda
