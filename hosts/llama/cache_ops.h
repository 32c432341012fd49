// The bodies of the custom operations, run by every thread of the host's pool.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "capture_sink.h"
#include "host.h"
#include "oscar/attention/attention.h"
#include "oscar/cache/kv_cache.h"

namespace oscar::llama {

// SET_ROWS into the cache: F32 rows src0 [n_embd, n] go to cells src1 [n] (I64 or I32).
struct RowsOp {
  KvCache* cache = nullptr;
  const ggml_tensor* node = nullptr;
  int layer_index = 0;
  bool is_k = false;
  static void run(ggml_tensor*, int ith, int nth, void* userdata);
};

// Buffers shared by all attention operations of a backend, which run one after another.
struct AttentionScratch {
  std::vector<std::unique_ptr<AttentionJob>> jobs;  // one per stream
};

struct AttentionOp {
  std::vector<AttentionArgs> streams;
  std::vector<float> slopes;  // ALiBi
  AttentionScratch* scratch = nullptr;
  bool check = false;
  bool perturb_q = false;
  // The first thread to arrive prepares: memory of the operation's operands is only valid now, not before the graph runs.
  std::atomic<int> stage{0};  // 0 nobody, 1 being prepared, 2 ready
  std::atomic<int> finished{0};
  static void run(ggml_tensor*, int ith, int nth, void* userdata);
};

// ROPE in place on the K cache: src1 holds one delta per cell.
struct ShiftOp {
  KvCache* cache = nullptr;
  const ggml_tensor* node = nullptr;
  int layer_index = 0;
  static void run(ggml_tensor*, int ith, int nth, void* userdata);
};

struct CaptureOp {
  CaptureEvent event;
  CaptureSink* sink = nullptr;
  static void run(ggml_tensor*, int ith, int nth, void* userdata);
};

[[nodiscard]] std::int64_t row_index(const ggml_tensor* indices, std::int64_t i);

}  // namespace oscar::llama
