// Host side of a prefill: checks, and the choice of the kernel. Kernels and their launches are in prefill_64.cu and
// prefill_128.cu (compute capability 9.0) and in prefill_portable_*.cu.
#include "oscar/cuda/prefill.h"

#include <cmath>

#include "cuda/arguments.h"
#include "cuda/prefill_params.h"
#include "cuda/runtime.h"

namespace oscar::cuda {
namespace {

constexpr int kMaxBatch = 1 << 16;
constexpr int kMaxTokens = 1 << 22;
constexpr int kMaxGroup = 16;
#ifdef OSCAR_CUDA_SM90A
constexpr bool kWgmmaBuilt = true;
#else
constexpr bool kWgmmaBuilt = false;  // its kernel has no code where sm_90a is not among the architectures built
#endif

void check_arguments(const PrefillArgs& a) {
  check_layer("prefill", a.layer);
  if (a.batch < 1 || a.batch > kMaxBatch)
    fail("cuda prefill: a batch of {} sequences; 1 to {} are possible", a.batch, kMaxBatch);
  if (a.n_tokens < 1 || a.n_tokens > kMaxTokens)
    fail("cuda prefill: {} query tokens; 1 to {} are possible", a.n_tokens, kMaxTokens);
  if (a.group < 1 || a.group > kMaxGroup)
    fail("cuda prefill: {} query heads per KV head; 1 to {} are possible", a.group, kMaxGroup);
  check_attention("prefill", a, 1);
  if (!(a.scale > 0.0F && std::isfinite(a.scale))) fail("cuda prefill: a scale of {}; it must be above 0 and finite", a.scale);
  const std::int64_t row = std::int64_t{a.layer->n_head_kv} * a.layer->head_dim;
  for (const std::int64_t stride : {a.k_stride, a.v_stride}) {
    if (stride != 0 && (stride < row || stride % 8 != 0))
      fail("cuda prefill: rows begin every {} values; 0 or a multiple of 8 from {} on is possible", stride, row);
  }
  check_tensors("prefill", {{"q", a.q, 16},
                            {"k", a.k, 16},
                            {"v", a.v, 16},
                            {"query_start", a.query_start, 4},
                            {"lengths", a.lengths, 4},
                            {"pages", a.pages, 128},
                            {"page_table", a.page_table.ids, 4},
                            {"blocks", a.blocks, 128},
                            {"block_table", a.block_table.ids, 4},
                            {"out", a.out, 4}});
}

cudaError_t launch(PrefillKernel kernel, PrefillParams& p, const DeviceLimits& device, cudaStream_t stream, bool* fits) {
  if (kernel == PrefillKernel::wgmma) {
    return p.layer.head_dim == 64 ? launch_prefill_64(p, device.id, stream, fits)
                                  : launch_prefill_128(p, device.id, stream, fits);
  }
  switch (p.layer.head_dim) {
    case 64:
      return launch_portable_prefill_64(p, device.id, stream, fits);
    case 128:
      return launch_portable_prefill_128(p, device.id, stream, fits);
    default:
      return launch_portable_prefill_256(p, device.id, stream, fits);
  }
}

}  // namespace

PrefillKernel choose_prefill_kernel(const LayerView& layer, int major, bool wgmma_built) {
  if (major < 8) fail("cuda prefill: a GPU of compute capability {}.x; 8.0 or later is needed", major);
  const bool served = layer.codec == paged::PageCodec::spectral && layer.head_dim <= 128;
  return wgmma_built && major == 9 && served ? PrefillKernel::wgmma : PrefillKernel::portable;
}

void prefill(const PrefillArgs& args, cudaStream_t stream) { prefill_with(std::nullopt, args, stream); }

void prefill_with(std::optional<PrefillKernel> kernel, const PrefillArgs& args, cudaStream_t stream) {
  check_arguments(args);
  PrefillParams p{};
  p.layer = *args.layer;
  p.batch = args.batch;
  p.group = args.group;
  p.n_tokens = args.n_tokens;
  p.sink = args.sink;
  p.recent = args.recent;
  p.ring = args.ring;
  p.page_columns = args.page_columns;
  p.scale = args.scale;
  p.soft_cap = args.soft_cap;
  const std::int64_t row = std::int64_t{p.layer.n_head_kv} * p.layer.head_dim;
  p.q = static_cast<const __half*>(args.q);
  p.k = static_cast<const __half*>(args.k);
  p.v = static_cast<const __half*>(args.v);
  p.k_stride = args.k_stride != 0 ? args.k_stride : row;
  p.v_stride = args.v_stride != 0 ? args.v_stride : row;
  p.query_start = args.query_start;
  p.lengths = args.lengths;
  p.pages = static_cast<const std::uint8_t*>(args.pages);
  p.page_table = IdWords(args.page_table);
  p.blocks = static_cast<const __half*>(args.blocks);
  p.block_table = IdWords(args.block_table);
  p.sinks = args.sinks;
  p.out = static_cast<__half*>(args.out);
  p.lse = args.lse;
  const DeviceLimits& device = current_device();
  p.shared_bytes = device.shared_bytes;
  const PrefillKernel by_device = choose_prefill_kernel(p.layer, device.major, kWgmmaBuilt);
  if (kernel == PrefillKernel::wgmma && by_device != PrefillKernel::wgmma)
    fail("cuda prefill: the wgmma kernel does not serve this layer on this GPU");
  bool fits = true;
  check(launch(kernel.value_or(by_device), p, device, stream, &fits), "the launch of a prefill");
  if (!fits && !kernel && by_device == PrefillKernel::wgmma)  // the portable kernel's pages take less
    check(launch(PrefillKernel::portable, p, device, stream, &fits), "the launch of a prefill");
  if (!fits)
    fail("cuda prefill: tiles of head_dim {} and {} slots do not fit the device's shared memory", p.layer.head_dim,
         p.layer.max_slots);
}

}  // namespace oscar::cuda
