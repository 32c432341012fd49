#include <cuda_fp16.h>

#include "fill.h"

namespace oscar::bench {
namespace {

__device__ std::uint32_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return static_cast<std::uint32_t>(x ^ (x >> 33));
}
__device__ std::size_t first() { return blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; }
__device__ std::size_t stride() { return std::size_t{gridDim.x} * blockDim.x; }

__global__ void words_kernel(std::uint32_t* to, std::size_t n, std::uint64_t seed) {
  for (std::size_t i = first(); i < n; i += stride()) to[i] = mixed(i + seed);
}
__global__ void gains_kernel(std::uint8_t* pages, std::size_t n_pages, cuda::LayerView layer) {
  constexpr int kGains = 2 * paged::kPageTokens;
  for (std::size_t i = first(); i < n_pages * layer.n_head_kv * kGains; i += stride()) {
    const int head = static_cast<int>(i / kGains % layer.n_head_kv);
    const std::size_t page = i / kGains / layer.n_head_kv;
    const std::uint32_t gains = paged::key_bytes(layer.slots[head]) + paged::value_bytes(layer.head_dim);
    const bool key = i % kGains < paged::kPageTokens;
    pages[page * layer.page_bytes + layer.head_offset[head] + gains + i % kGains] =
        static_cast<std::uint8_t>(key ? 116 + mixed(i) % 24 : 34 + mixed(i) % 12);
  }
}
__global__ void grids_kernel(std::uint8_t* pages, std::size_t n_pages, cuda::LayerView layer) {
  constexpr int kGrids = 2 * paged::kPageTokens;
  for (std::size_t i = first(); i < n_pages * layer.n_head_kv * kGrids; i += stride()) {
    const int head = static_cast<int>(i / kGrids % layer.n_head_kv);
    const std::size_t page = i / kGrids / layer.n_head_kv;
    const std::uint32_t grids = paged::key_bytes(layer.slots[head]) + paged::value_bytes(layer.head_dim);
    auto* to = reinterpret_cast<__half2*>(pages + page * layer.page_bytes + layer.head_offset[head] + grids);
    const float step = 0.5F + static_cast<float>(mixed(i) % 64) / 64.0F;
    to[i % kGrids] = __floats2half2_rn(step, -1.5F * step);
  }
}
__global__ void halves_kernel(std::uint16_t* to, std::size_t n, std::uint64_t seed) {
  for (std::size_t i = first(); i < n; i += stride())
    to[i] = __half_as_ushort(__float2half(static_cast<float>(mixed(i + seed)) * 0x1p-30F - 2.0F));
}

__global__ void copy_kernel(uint4* __restrict__ to, const uint4* __restrict__ from, std::size_t n) {
  constexpr int kAtOnce = 4;
  const std::size_t base = blockIdx.x * std::size_t{blockDim.x} * kAtOnce + threadIdx.x;
  uint4 v[kAtOnce];
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    if (base + k * blockDim.x < n) v[k] = __ldcs(from + base + k * blockDim.x);
  }
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    if (base + k * blockDim.x < n) __stcs(to + base + k * blockDim.x, v[k]);
  }
}

constexpr int kBlocks = 1024;
constexpr int kThreads = 256;

}  // namespace

void fill_words(void* to, std::size_t bytes, std::uint64_t seed) {
  words_kernel<<<kBlocks, kThreads>>>(static_cast<std::uint32_t*>(to), bytes / 4, seed);
}
void fill_row_data(std::uint8_t* pages, std::size_t n_pages, const cuda::LayerView& layer) {
  if (layer.codec == paged::PageCodec::int2) {
    grids_kernel<<<kBlocks, kThreads>>>(pages, n_pages, layer);
  } else {
    gains_kernel<<<kBlocks, kThreads>>>(pages, n_pages, layer);
  }
}
void fill_halves(std::uint16_t* to, std::size_t n, std::uint64_t seed) { halves_kernel<<<kBlocks, kThreads>>>(to, n, seed); }

void copy(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
  const std::size_t n = bytes / sizeof(uint4);
  const auto blocks = static_cast<unsigned>((n + 4 * kThreads - 1) / (4 * kThreads));
  copy_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<uint4*>(to), static_cast<const uint4*>(from), n);
}

}  // namespace oscar::bench
