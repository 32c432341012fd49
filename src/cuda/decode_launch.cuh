// Launches of the kernels of a decode, included once per codec.
#pragma once

#include <algorithm>

#include "cuda/attend.cuh"
#include "cuda/prepare.cuh"

namespace oscar::cuda {

inline std::uint32_t unsigned_of(int n) { return static_cast<std::uint32_t>(n); }

// Shared memory left to what prepares queries, here or in blocks of the kernel before; more would cost warps of heads with
// means.
template <int D, bool kWide>
inline constexpr std::uint32_t kBesideBytes = (D > 128 ? 20
                                               : kWide ? 26
                                                       : 18)
                                              << 10;

// overlaps: may start before its predecessor in the stream ended.
template <class Kernel>
cudaError_t launch(Kernel* kernel, int blocks, int threads, std::uint32_t shared, const DecodeParams& p, cudaStream_t stream,
                   bool overlaps) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned_of(blocks));
  config.blockDim = dim3(unsigned_of(threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = overlaps ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, p);
}

// Warps per block, ring stages and shared memory of the attention kernel, as the device allows.
template <int D, bool kWide, bool kMean, bool kInt2>
cudaError_t launch_both(DecodeParams& p, const DeviceLimits& device, cudaStream_t stream, bool* fits) {
  const std::uint32_t longest =
      std::max(paged::head_bytes(p.layer.max_slots, D, p.layer.codec), unsigned_of(kBlockTokens * D * 2));
  p.stage_bytes = (longest + 127U) / 128U * 128U;
  const std::uint32_t common = kGainTableBytes + (kMean ? RopeMeans<kWide>::table_bytes(p) : 0U);
  const std::uint32_t fixed = WarpAttention<D, kWide, kMean, kInt2>::slot_offset(p);
  const std::uint32_t least = fixed + 2 * p.stage_bytes;  // of a warp
  int warps = 0;
  std::uint32_t per_warp = 0;
  const auto share_out = [&](std::uint32_t beside, int least_warps) {
    const std::uint32_t taken = common + beside;
    const std::uint32_t room = unsigned_of(device.shared_bytes) - std::min(unsigned_of(device.shared_bytes), taken);
    warps = kAttendWarps<D, kWide>;
    while (warps > least_warps && unsigned_of(warps) * least > room) warps -= warps > 4 ? 4 : 2;
    per_warp = room / unsigned_of(warps);
    return per_warp >= least;
  };
  // GPUs with less shared memory may have none left for what prepares queries, or for more than two warps.
  const bool has_beside = share_out(kBesideBytes<D, kWide>, 4);
  *fits = has_beside || share_out(0, 2);
  if (!*fits) return cudaSuccess;
  p.stages = std::min(TileRing::kMaxStages, static_cast<int>((per_warp - fixed) / p.stage_bytes));
  p.warp_bytes = fixed + unsigned_of(p.stages) * p.stage_bytes;
  if (unsigned_of(p.stages) * p.stage_bytes < PartialLayout<D, kWide, kInt2>::kBytes) return cudaErrorInvalidConfiguration;
  const int blocks = std::min(device.multiprocessors, kMostBlocks);
  p.workers = unsigned_of(blocks * warps);
  // By bytes where those are the limit; an exact block has about half the instructions per byte.
  p.exact_cost = unsigned_of(D / (kMean || kWide ? 4 : 2));
  std::uint32_t shared = common + unsigned_of(warps) * p.warp_bytes;
  const int items = p.batch * p.heads;
  using Prepare = PrepareMemory<D, kWide ? 8 : 4>;
  // Many heads are prepared faster by blocks that are many at a time.
  p.inside = has_beside && kPreparesInside<D, kWide> && 32 * warps >= kPrepareThreads && items <= blocks;
  if (p.inside) shared += sizeof(Prepare);

  auto* kernel = attend_kernel<D, kWide, kMean, kInt2>;
  auto *prepare = prepare_kernel < D, kWide ? 8 : 4 > ;
  static OncePerDevice kernels;
  cudaError_t status = kernels(device.id, [&] {
    // A multiprocessor runs kernels side by side only when they want the same split between L1 and shared memory.
    for (const auto* each : {reinterpret_cast<const void*>(kernel), reinterpret_cast<const void*>(prepare)}) {
      const cudaError_t failure =
          cudaFuncSetAttribute(each, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
      if (failure != cudaSuccess) return failure;
    }
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_bytes);
  });
  const bool overlaps = device.major >= 9;
  if (status == cudaSuccess && !p.inside)
    status = launch(prepare, std::min(items, 4 * blocks), kPrepareThreads, 0, p, stream, overlaps && p.early);
  if (status == cudaSuccess) status = launch(kernel, blocks, 32 * warps, shared, p, stream, overlaps && (p.early || !p.inside));
  return status;
}

template <int D, bool kInt2>
cudaError_t choose(DecodeParams& p, const DeviceLimits& device, cudaStream_t stream, bool* fits) {
  const bool mean = p.layer.n_pairs > 0;
  if (p.columns > 4) {
    return mean ? launch_both<D, true, true, kInt2>(p, device, stream, fits)
                : launch_both<D, true, false, kInt2>(p, device, stream, fits);
  }
  return mean ? launch_both<D, false, true, kInt2>(p, device, stream, fits)
              : launch_both<D, false, false, kInt2>(p, device, stream, fits);
}
template <bool kInt2>
cudaError_t choose_dim(DecodeParams& p, const DeviceLimits& device, cudaStream_t stream, bool* fits) {
  switch (p.layer.head_dim) {
    case 64:
      return choose<64, kInt2>(p, device, stream, fits);
    case 128:
      return choose<128, kInt2>(p, device, stream, fits);
    default:
      return choose<256, kInt2>(p, device, stream, fits);
  }
}

}  // namespace oscar::cuda
