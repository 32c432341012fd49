// Decode attention on the paged 2-bit cache (format: oscar/paged/page_format.h), the last token or the last few tokens of each
// sequence, on an NVIDIA GPU. Raw device pointers and a stream: no framework. Both tiers, the RoPE-mean term and the merge of
// splits are included.
//
//   o = sum_t p_t v_t,  p = softmax over the tokens t up to the query's own of soft_cap(scale * q . k_t)  (+ a sink logit)
//
// Lengths and tables are read on the device and the grid depends on the shape alone: no host synchronisation, and a CUDA graph
// that holds a decode stays valid while sequences grow, up to what the page table has columns for. Results are bit-identical
// from run to run on one kind of GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "oscar/paged/id_table.h"
#include "oscar/paged/page_format.h"

namespace oscar::paged {
struct Int2Tables;
struct SpectralTables;
}  // namespace oscar::paged

namespace oscar::cuda {

// A layer's static tables in device memory (see paged::SpectralTables, paged::Int2Tables). Immutable; may serve many streams.
struct LayerView {
  paged::PageCodec codec = paged::PageCodec::spectral;
  int n_head_kv = 0, head_dim = 0;
  int n_pairs = 0;       // RoPE pairs that carry a mean, 0: none; padded to a multiple of 32 with zeros
  int n_fast_pairs = 0;  // the first ones: their table holds cos instead of cos - 1
  // The first ones, a multiple of 16: decode treats what the others add as polynomials over several pages, see mean_series.h.
  int n_turned_pairs = 0;
  int max_slots = 0;
  std::uint32_t page_bytes = 0;
  std::uint16_t slots[paged::kMaxHeadsKv] = {};
  std::uint32_t head_offset[paged::kMaxHeadsKv] = {};
  const float* query = nullptr;                // [n_head_kv, D, D] inner query = q * query
  const std::uint16_t* slot_source = nullptr;  // [n_head_kv, max_slots] coordinate + 4096 * level
  const float* query_peak = nullptr;           // [n_head_kv] largest |query[d, coordinate]| 4^level of a slot
  const float* key_constant = nullptr;         // [n_head_kv, D]
  const float* mean = nullptr;                 // [n_head_kv, n_pairs, 2] first, second
  const std::uint16_t* pair = nullptr;         // [n_pairs, 2] coordinates
  const double* turns = nullptr;               // [n_pairs] angle per position / 2 pi
  const std::uint16_t* mean_table =
      nullptr;  // [n_pairs / 16, 2 x cos, 2 x -sin, 32 lanes, 8] A fragments, see layer_tables.cpp
  const std::uint16_t* series_tables = nullptr;  // of pairs from n_turned_pairs on, null: there are none; see mean_series.h
  const float* value_unit = nullptr;             // [n_head_kv]
  const float* value_signs = nullptr;            // [kPatterns, n_head_kv, D]
  // Of `int2` only, instead of unit and signs.
  const float* value_output = nullptr;  // [n_head_kv, D, D]
  const float* value_mean = nullptr;    // [n_head_kv, D], or null
};

// Owner of a LayerView's memory. Throws Error when the device has too little.
class LayerTables {
 public:
  explicit LayerTables(const paged::SpectralTables& tables);
  explicit LayerTables(const paged::Int2Tables& tables);
  ~LayerTables();
  LayerTables(const LayerTables&) = delete;
  LayerTables& operator=(const LayerTables&) = delete;
  [[nodiscard]] const LayerView& view() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct DecodeArgs {
  const LayerView* layer = nullptr;  // host pointer
  int batch = 0;
  int group = 0;                // query heads per KV head, 1 .. 16; query head h reads KV head h / group
  int queries = 1;              // tokens per sequence, 1 .. 8: the last ones, as in checking a draft
  int sink = 64, recent = 256;  // window of 16-bit rows, see cache/windows.h; sink a multiple of 16
  float scale = 1.0F;
  float soft_cap = 0.0F;    // 0: none; else logit = soft_cap * tanh(scale * q . k / soft_cap)
  const void* q = nullptr;  // binary16 [batch, queries, n_head, D]
  // [batch] tokens of the sequence, the queries' own included, up to 64 page_columns; 0: no sequence
  const std::int32_t* lengths = nullptr;
  const void* pages = nullptr;  // [n_pages, page_bytes], 128-byte aligned
  // [batch, page_columns] page of positions 64 i .. 64 i + 63. All that hold a position which a query reads as codes are
  // needed: -1 is no page here.
  paged::IdTable page_table;
  int page_columns = 0;
  const void* blocks = nullptr;  // binary16 [n_blocks, n_head_kv, 2, 16, D], 128-byte aligned
  paged::IdTable block_table;    // [batch, sink / 16 + ring], see paged::block_column
  int ring = 0;                  // at least paged::ring_blocks(recent + queries - 1)
  const float* sinks = nullptr;  // [n_head] or null
  void* out = nullptr;           // binary16 [batch, queries, n_head, D], 4-byte aligned; zeros where a query sees nothing
  // [batch, queries, n_head] natural logarithm of the sum of exponentials, or null; -inf where a query sees nothing and there
  // is no sink logit
  float* lse = nullptr;
  // The work enqueued just before, and what that overlaps in turn, writes neither lengths nor tables, and of the pages only
  // positions that this decode does not read as codes (with recent >= 64 an append of the queries' own tokens does not). Tiles
  // are then fetched while it still runs (sm_90, programmatic dependent launch). The queries and the exact rows may be written
  // by it.
  bool overlaps_predecessor = false;
  // decode_workspace_bytes(), 256-byte aligned; of one decode at a time, of any shape and layer that it is large enough for.
  // Its first decode_control_bytes() must be zero before its first decode, and a decode leaves them zero; of the rest, contents
  // need not survive.
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
};

// Depends on the shape, not on lengths.
[[nodiscard]] std::size_t decode_workspace_bytes(const LayerView& layer, int batch, int group, int queries = 1);
// The same for all shapes.
[[nodiscard]] std::size_t decode_control_bytes();

// Enqueues one kernel or two. Throws Error on arguments outside the limits above or when the launch fails.
void decode(const DecodeArgs& args, cudaStream_t stream);

}  // namespace oscar::cuda
