// Append of rows to the paged 2-bit cache (format: oscar/paged/page_format.h) on an NVIDIA GPU: decode batches, several rows
// per sequence, and prefill chunks, in one kernel. Raw device pointers and a stream: no framework.
//
// A row is coded once and for ever into its sequence's page, and copied in 16 bits into the exact tier while it is in the sink
// or the ring. Codes are those of the CPU codec, byte for byte: the same operations in the same order, nothing fused. The one
// thing that is not specified to the bit is the sine of a RoPE mean, which both sides round from binary64 to binary32.
//
// Positions are read on the device and the grid depends on the shape alone, so a CUDA graph stays valid while sequences grow.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "oscar/cuda/decode.h"
#include "oscar/paged/id_table.h"

namespace oscar::paged {
struct EncodeTables;
struct Int2EncodeTables;
}  // namespace oscar::paged

namespace oscar::cuda {

// paged::EncodeTables or paged::Int2EncodeTables in device memory. Immutable; may serve many streams.
struct EncoderView {
  paged::PageCodec codec = paged::PageCodec::spectral;
  int n_head_kv = 0, head_dim = 0;
  int n_pairs = 0;  // RoPE pairs that carry a mean, 0: none
  double magnitude = 1;
  const float* transform = nullptr;       // [n_head_kv, D, D] of keys; `int2`: their rotations, or null
  const float4* coordinate = nullptr;     // [n_head_kv, D] paged::KeyCoordinate
  const float* norm_count = nullptr;      // [n_head_kv]
  const float2* constant_mean = nullptr;  // [n_head_kv, D] offset, rest
  const double* theta = nullptr;          // [n_pairs]
  const ushort2* pair = nullptr;          // [n_pairs] coordinates
  const float2* mean = nullptr;           // [n_head_kv, n_pairs] first, second
  const float* value_factor = nullptr;    // [kPatterns, n_head_kv, D]
  const float* value_scale = nullptr;     // [n_head_kv]
  const float* gain = nullptr;            // [256] of a gain byte of keys
  float value_inverse_step = 0;
  float value_level[4] = {};
  float key_gain_edge[16] = {};
  float value_gain_edge[8] = {};
  // Of `int2` only.
  const float* value_transform = nullptr;   // [n_head_kv, D, D], or null
  const float* value_mean = nullptr;        // [n_head_kv, D]
  const std::int32_t* clip_rank = nullptr;  // [2, n_head_kv] of keys, of values; -1: not clipped
};

// Owner of an EncoderView's memory. Throws Error when the device has too little.
class EncoderTables {
 public:
  explicit EncoderTables(const paged::EncodeTables& tables);
  explicit EncoderTables(const paged::Int2EncodeTables& tables);
  ~EncoderTables();
  EncoderTables(const EncoderTables&) = delete;
  EncoderTables& operator=(const EncoderTables&) = delete;
  [[nodiscard]] const EncoderView& view() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct AppendArgs {
  const LayerView* layer = nullptr;      // host pointers
  const EncoderView* encoder = nullptr;  // of the same layer
  int batch = 0;
  int n_rows = 0;  // rows that k and v have room for; those from row_start[batch] on are not read
  int sink = 64;   // tokens, a multiple of 16, as in DecodeArgs
  // binary16 rows [n_rows, n_head_kv, D], K after RoPE; a row begins k_stride (v_stride) values after the one before, a
  // multiple of 8, 0: rows without gaps. 16-byte aligned.
  const void* k = nullptr;
  const void* v = nullptr;
  std::int64_t k_stride = 0, v_stride = 0;
  // [batch + 1], ascending from 0: rows row_start[b] .. row_start[b + 1] - 1 are the last ones of sequence b. Null: one row per
  // sequence, and n_rows is batch.
  const std::int32_t* row_start = nullptr;
  const std::int32_t* lengths = nullptr;  // [batch] tokens of the sequence, the new rows included; 0: no sequence
  void* pages = nullptr;                  // see DecodeArgs
  // [batch, page_columns]; -1: rows of these positions are not coded, nor are those beyond the columns
  paged::IdTable page_table;
  int page_columns = 0;
  void* blocks = nullptr;
  // [batch, sink / 16 + ring]; -1: not copied. Of more rows than the ring holds, the last ones are copied: an attention that
  // needs the exact rows before a chunk reads them before the append, or has a longer ring.
  paged::IdTable block_table;
  int ring = 0;
};

// Enqueues one kernel. Throws Error on arguments outside the limits above or when the launch fails.
void append(const AppendArgs& args, cudaStream_t stream);

}  // namespace oscar::cuda
