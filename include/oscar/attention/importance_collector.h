// Collects the importance of one layer's keys (method/importance.h) from running attention.
//
// Cost: about 2 D multiply-adds and an exponential per query head and pair, and about 10 (D + n_rot)^2 per token and KV head.
// Memory: the sums per query head, the samples, and of the running sequence its keys at 2 bytes a value and 12 bytes per token
// and query head; beside that, per thread and not per layer, the exponentials of one block of queries with all keys.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "oscar/method/importance.h"

namespace oscar {

struct ImportanceConfig {
  std::int32_t sink = 64, recent = 256;
  std::int64_t max_samples = 2048;  // key rows kept per head; stride doubles when full
};

class ImportanceCollector {
 public:
  // output_metric: W_o^T W_o per query head, [n_head, v_dim, v_dim] row-major; null: identity.
  ImportanceCollector(LayerShape shape, ImportanceConfig config, std::shared_ptr<const std::vector<float>> output_metric);
  ~ImportanceCollector();

  // Queries of consecutive tokens of one sequence, and the whole past of that sequence: token 0 .. first + n - 1.
  struct Block {
    std::int64_t first = 0, n = 0;           // positions first .. first + n - 1; the sequence has been given from position 0 on
    const float *q = nullptr, *o = nullptr;  // [n, n_head, dim] with strides in floats
    std::int64_t q_token = 0, q_head = 0, o_token = 0, o_head = 0;
    const std::uint16_t *k = nullptr, *v = nullptr;  // cache, binary16: row of cell c at k + c * n_head_kv * k_dim
    const std::int64_t* cells = nullptr;             // [first + n] cell of each position
    float scale = 1.0F, softcap = 0.0F;
    const float* sinks = nullptr;  // [n_head] or null
  };
  // Query heads [head_begin, head_end) of [0, n_head): ranges may run on different threads, every range must see the same
  // blocks in the same order; results do not depend on the split. Blocks that begin and end at multiples of kMomentBlock give
  // the same bits however the host batches tokens; others differ by rounding.
  void add(const Block& block, int head_begin, int head_end);
  // Counts the running sequence and forgets its rows. Not concurrent with add().
  void end_sequence();

  [[nodiscard]] const LayerShape& shape() const { return shape_; }
  [[nodiscard]] std::span<HeadImportance> heads() { return heads_; }  // valid after end_sequence()

 private:
  class OffsetTurns;
  class BlockPass;
  struct QueryHead;
  void keep_keys(const Block& block, int kv_head);
  std::vector<float> gather(int kv_head, std::int64_t begin, std::int64_t end);
  void add_joint(int kv_head, std::int64_t first, int copy, const MatrixD& waves, std::span<const float> token_weight,
                 double share);

  LayerShape shape_;
  ImportanceConfig config_;
  Rope rope_;
  std::shared_ptr<const std::vector<float>> output_metric_;
  std::vector<HeadImportance> heads_;
  std::unique_ptr<const OffsetTurns> turns_;
  std::vector<std::vector<std::uint16_t>> keys_;  // [KV head][tokens, D] of the running sequence
  std::vector<QueryHead> running_;                // [n_head]
  std::int64_t seen_ = 0, stride_ = 1;            // keys offered as samples, and every how many-th is kept
};

}  // namespace oscar
