// Host side of a decode: checks and workspace. The kernels and their launches are in decode.cu.
#include "oscar/cuda/decode.h"

#include <algorithm>
#include <cmath>

#include "cuda/arguments.h"
#include "cuda/decode_params.h"
#include "cuda/runtime.h"

namespace oscar::cuda {
namespace {

constexpr int kMaxBatch = 1 << 16;
constexpr int kMaxGroup = 16;
constexpr int kMaxQueries = 8;

std::uint32_t unsigned_of(int n) { return static_cast<std::uint32_t>(n); }

// The control words come first and lie where they lie for every shape: decodes of different shapes find them zero.
constexpr std::size_t kControlBytes = (2 * kMostBlocks + 1) * sizeof(std::uint32_t);

// Lays the workspace out from a null base or a real one; its size.
std::size_t lay_out(DecodeParams& p, void* workspace) {
  const std::size_t items = static_cast<std::size_t>(p.batch) * static_cast<std::size_t>(p.heads);
  const std::size_t dim = static_cast<std::size_t>(p.layer.head_dim);
  // Of the largest grid, so that the size does not depend on the device.
  constexpr std::size_t kWorkers = kMostBlocks * kMostWarps;
  const int vectors = p.layer.codec == paged::PageCodec::int2 ? 2 : 1;
  std::size_t at = 0;
  const auto take = [&](auto*& pointer, std::size_t bytes) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(static_cast<char*>(workspace) + at);
    at += (bytes + 255) / 256 * 256;
  };
  take(p.arrived, kControlBytes);
  p.ready = p.arrived + kMostBlocks;
  p.claimed = p.ready + kMostBlocks;
  take(p.headers, items * kHeaderFloats * sizeof(float));
  take(p.coded_query, items * p.query_bytes);
  take(p.exact_query, items * (dim / 16) * static_cast<std::size_t>(p.lanes) * 8);
  take(p.mean_query, items * static_cast<std::size_t>(p.layer.n_pairs / 16 * p.lanes * 2) * sizeof(float4));
  take(p.aside, kWorkers * static_cast<std::size_t>(vectors * p.tile_rows) * dim * sizeof(float));
  take(p.partials, (kWorkers + 3 * kMostBlocks) * partial_bytes(p.layer.head_dim, p.tile_rows, vectors));
  return at;
}

// What follows from the shape alone.
DecodeParams shape_params(const LayerView& layer, int batch, int group, int queries) {
  check_layer("decode", &layer);
  if (layer.max_slots > kMostSlots) fail("cuda decode: a head of {} slots; up to {} are possible", layer.max_slots, kMostSlots);
  if (batch < 1 || batch > kMaxBatch) fail("cuda decode: a batch of {} sequences; 1 to {} are possible", batch, kMaxBatch);
  if (group < 1 || group > kMaxGroup) fail("cuda decode: {} query heads per KV head; 1 to {} are possible", group, kMaxGroup);
  if (queries < 1 || queries > kMaxQueries)
    fail("cuda decode: {} query tokens per sequence; 1 to {} are possible", queries, kMaxQueries);
  DecodeParams p{};
  p.layer = layer;
  p.batch = batch;
  p.group = group;
  p.queries = queries;
  p.columns = queries * group;
  p.subgroups = (p.columns + kHeadsPerTile - 1) / kHeadsPerTile;
  p.heads = layer.n_head_kv * p.subgroups;
  p.lanes = p.columns <= 4 ? 16 : 32;
  p.tile_rows = p.columns <= 4 ? 4 : 8;
  // Exact queries use the same place.
  p.query_bytes = std::max(coded_query_bytes(layer.max_slots, p.lanes / 16), unsigned_of(layer.head_dim / 16 * p.lanes * 8));
  for (int h = 0; h < layer.n_head_kv; ++h)
    p.pages_cost += unsigned_of(p.subgroups) * paged::head_bytes(layer.slots[h], layer.head_dim, layer.codec) / kCostUnit;
  return p;
}

void check_arguments(const DecodeArgs& a, const DecodeParams& p) {
  check_attention("decode", a, a.queries);
  if (!std::isfinite(a.scale)) fail("cuda decode: a scale of {}; it must be finite", a.scale);
  check_tensors("decode", {{"q", a.q, 2},
                           {"lengths", a.lengths, 4},
                           {"pages", a.pages, 128},
                           {"page_table", a.page_table.ids, 4},
                           {"blocks", a.blocks, 128},
                           {"block_table", a.block_table.ids, 4},
                           {"out", a.out, 4},
                           {"workspace", a.workspace, 256}});
  // The line of work (decode_plan.cuh) is counted in 32 bits.
  const std::uint64_t exact_blocks = unsigned_of(a.sink / paged::kBlockTokens + paged::ring_blocks(a.recent + a.queries - 1));
  const std::uint64_t longest =
      std::uint64_t{unsigned_of(a.page_columns)} * p.pages_cost + exact_blocks * unsigned_of(p.heads * most_exact_cost(p));
  if (unsigned_of(a.batch) * longest > kMostCost)
    fail(
        "cuda decode: {} sequences of up to {} pages are too many for one decode of {} query rows per KV head; split the batch",
        a.batch, a.page_columns, p.columns);
}

}  // namespace

std::size_t decode_workspace_bytes(const LayerView& layer, int batch, int group, int queries) {
  DecodeParams p = shape_params(layer, batch, group, queries);
  return lay_out(p, nullptr);
}
std::size_t decode_control_bytes() { return kControlBytes; }

void decode(const DecodeArgs& args, cudaStream_t stream) {
  check_layer("decode", args.layer);
  DecodeParams p = shape_params(*args.layer, args.batch, args.group, args.queries);
  check_arguments(args, p);
  const std::size_t bytes = lay_out(p, args.workspace);
  if (args.workspace_bytes < bytes) fail("cuda decode: a workspace of {} bytes; {} are needed", args.workspace_bytes, bytes);
  p.sink = args.sink;
  p.recent = args.recent;
  p.ring = args.ring;
  p.page_columns = args.page_columns;
  p.scale = args.scale;
  p.soft_cap = args.soft_cap;
  p.early = args.overlaps_predecessor;
  p.q = static_cast<const __half*>(args.q);
  p.lengths = args.lengths;
  p.pages = static_cast<const std::uint8_t*>(args.pages);
  p.page_table = IdWords(args.page_table);
  p.blocks = static_cast<const std::uint8_t*>(args.blocks);
  p.block_table = IdWords(args.block_table);
  p.sinks = args.sinks;
  p.out = static_cast<__half*>(args.out);
  p.lse = args.lse;
  bool fits = true;
  const bool int2 = p.layer.codec == paged::PageCodec::int2;
  check(int2 ? launch_decode_int2(p, current_device(), stream, &fits)
             : launch_decode_spectral(p, current_device(), stream, &fits),
        "the launch of a decode");
  if (!fits)
    fail("cuda decode: tiles of head_dim {} and {} slots for {} query rows do not fit the device's shared memory",
         p.layer.head_dim, p.layer.max_slots, p.tile_rows);
}

}  // namespace oscar::cuda
