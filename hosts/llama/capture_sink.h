// What the plug-in shows of a running attention operation to whoever collects moments (mode "capture").
//
// In capture mode llama.cpp computes and stores everything itself. Right after each FLASH_ATTN_EXT on a cache, before any
// other work of the graph, on_attention() runs on every thread of llama.cpp's pool; Q, the cache rows of this batch and the
// attention output are still in place then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "oscar/method/rope.h"

namespace oscar::llama {

// A ggml tensor without ggml: ne in elements, nb in bytes, fastest dimension first.
struct TensorView {
  const void* data = nullptr;
  std::int64_t ne[4] = {0, 0, 0, 0};
  std::size_t nb[4] = {0, 0, 0, 0};
};

struct CaptureEvent {
  int layer = 0;  // the model's layer number
  int n_head = 0, n_head_kv = 0, k_dim = 0, v_dim = 0;
  std::int64_t n_tokens = 0;   // of the whole batch, all streams
  std::int64_t n_streams = 1;  // tokens s * n_tokens / n_streams .. belong to the s-th stream of the batch

  float scale = 1.0F;     // q.k is multiplied by it
  float softcap = 0.0F;   // 0: none
  float max_bias = 0.0F;  // ALiBi; 0: none

  // Operands of the operation. q: F32 [k_dim, n_tokens / n_streams, n_head, n_streams]; k, v: F16 [dim, n_kv, n_head_kv,
  // n_streams]; mask: F16 [n_kv, >= n_tokens / n_streams, 1, n_streams], -inf = invisible (data null: none);
  // out: F32 [v_dim, n_head, n_tokens / n_streams, n_streams], already computed.
  TensorView q, k, v, mask, out;
  const float* sinks = nullptr;  // [n_head] or null

  // Cache rows, F16, llama.cpp's own memory: row of cell c starts at k_cache + c * n_head_kv * k_dim (K after RoPE), heads
  // ascending; the rows of this batch's tokens are those of `cells`.
  const std::uint16_t* k_cache = nullptr;
  const std::uint16_t* v_cache = nullptr;
  std::span<const std::int64_t> cells;      // [n_tokens]
  std::span<const std::int32_t> positions;  // [n_tokens]

  RopeParams rope;  // of K in this layer; pairing none: the layer has no RoPE (or none that could be found)
  // Evidence of a sliding window: cells the last token sees, against its position + 1 (equal: it sees all of its past).
  std::int64_t last_visible = 0;
};

class CaptureSink {
 public:
  virtual ~CaptureSink() = default;
  // Called by all nth threads of the pool, ith = 0 .. nth - 1, with the same event. Must not throw.
  virtual void on_attention(const CaptureEvent& event, int ith, int nth) = 0;
  // Called on one thread after the graph (or slice of a graph) that contained attention is complete. Must not throw.
  virtual void on_graph_end() {}
};

// The sink of this process; null (default): mode "capture" only forwards. Set it before tokens are decoded.
void set_capture_sink(CaptureSink* sink);
CaptureSink* capture_sink();

}  // namespace oscar::llama
