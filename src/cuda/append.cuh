// The kernel of an append. A block codes one tile of rows of one KV head.
#pragma once

#include "cuda/append_int2.cuh"
#include "cuda/append_spectral.cuh"

namespace oscar::cuda {

// Append: SpectralAppend or Int2Append.
template <template <int, int> class Append, int D, int kRows>
__global__ void __launch_bounds__(kAppendThreads, D <= 128 ? 3 : 2) append_kernel(const __grid_constant__ AppendParams p) {
  extern __shared__ __align__(16) std::uint8_t append_shared[];
  let_successor_start();
  const int tile = static_cast<int>(blockIdx.x) % p.tiles;
  const int head = static_cast<int>(blockIdx.x) / p.tiles;  // neighbours share the matrix
  using Tile = Append<D, kRows>;
  Tile(p, *reinterpret_cast<typename Tile::Shared*>(append_shared), head).run(tile);
}

}  // namespace oscar::cuda
