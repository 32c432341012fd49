// What happens around one graph_compute() of a CPU backend: operations on a served cache become custom operations for this
// one call, so that the host runs them on its own threads between its own operations, and are restored afterwards (graphs
// are reused).
#pragma once

#include <deque>
#include <mutex>
#include <vector>

#include "cache_ops.h"
#include "host.h"
#include "kv_buffer.h"

namespace oscar::llama {

class GraphPass {
 public:
  using Compute = ggml_status (*)(ggml_backend_t, ggml_cgraph*);
  GraphPass(ggml_backend_t backend, Compute original) : backend_(backend), original_(original) {}
  ggml_status compute(ggml_cgraph* graph);

 private:
  enum class Use { set_rows, attention, shift, other };
  struct Touch {  // a node that works on a cache
    ggml_tensor* node = nullptr;
    int index = 0;
    Use use = Use::other;
    KvBuffer* buffer = nullptr;
    CacheTensor* tensor = nullptr;  // K of an attention, else the tensor written or read
  };
  struct Patch {  // what to put back
    ggml_tensor* node = nullptr;
    ggml_op op = GGML_OP_NONE;
    std::int32_t flags = 0;
    std::int32_t params[GGML_MAX_OP_PARAMS / sizeof(std::int32_t)] = {};
  };

  void collect(ggml_cgraph* graph);
  [[nodiscard]] bool whole_batch(const KvBuffer& buffer) const;
  void find_unknown_caches(const ggml_tensor* node);
  void process(KvBuffer& buffer, ggml_cgraph* graph);
  void learn(KvBuffer& buffer);
  void decide(KvBuffer& buffer);
  std::string obstacle(KvBuffer& buffer);
  std::string attention_obstacle(const KvBuffer& buffer, const Touch& touch) const;
  std::string verify(KvBuffer& buffer);
  void place(KvBuffer& buffer, const ggml_tensor* set_rows);
  void attend(KvBuffer& buffer, const Touch& touch);
  void serve(KvBuffer& buffer);
  void capture(KvBuffer& buffer, ggml_cgraph* graph);
  void patch(ggml_tensor* node, ggml_custom_op_t function, void* userdata);
  AttentionArgs attention_args(const KvBuffer& buffer, const Touch& touch, std::int64_t stream) const;

  ggml_backend_t backend_;
  Compute original_;
  std::vector<Touch> touches_;
  std::vector<Patch> patches_;
  std::vector<std::int32_t> positions_;  // of the running batch; survive slices of a graph that show no ROPE
  std::deque<RowsOp> rows_;
  std::deque<AttentionOp> attentions_;
  std::deque<ShiftOp> shifts_;
  std::deque<CaptureOp> captures_;
  AttentionScratch scratch_;
};

}  // namespace oscar::llama
