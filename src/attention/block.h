// Online softmax of one block of queries (some tokens x the query heads of one KV head) over a run of cells.
//
// Rows of a block are r = token * group + head within the group. Two accumulators are kept, one in the model's basis for exact
// rows and one in the codec's inner basis for coded rows, so a coded row is only unpacked; queries go to the inner basis once
// per block and outputs come back once.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/buffer.h"
#include "attention/kernels.h"
#include "attention/key_mean.h"
#include "attention/tile_plan.h"
#include "oscar/attention/attention.h"

namespace oscar::attention {

// What all blocks of one operation share.
struct Operation {
  AttentionArgs args;
  const Kernels* kernels = nullptr;
  const Codec* k_codec = nullptr;  // null: exact mode
  const Codec* v_codec = nullptr;
  int n_head_kv = 0, group = 0;
  int k_dim = 0, v_dim = 0;
  int k_ld = 0, v_ld = 0;       // padded row sizes: k_dim to kLane, v_dim to kPanel
  std::vector<HeadMean> means;  // [n_head_kv]
};

// Numerator and denominator of a block's rows over the cells seen so far; the sums are relative to exp(max).
struct BlockState {
  struct Row {
    float max = 0.0F;
    double sum = 0.0;       // of all probabilities
    double code_sum = 0.0;  // of those of coded rows
  };
  std::vector<Row> rows;
  FloatBuffer exact;  // [rows][v_ld], model basis
  FloatBuffer code;   // [rows][v_ld], inner basis

  void start(int n_rows, int v_ld);
  // Adds the cells of `other`.
  void absorb(const BlockState& other, int v_ld);
};

// One thread's workspace.
class BlockWorker {
 public:
  // Runs columns [begin, end) for one KV head; begin is a multiple of kTile.
  void run(const Operation& op, int kv_head, const TokenBlock& block, std::int64_t begin, std::int64_t end, BlockState& state);
  // Sinks, normalisation, back to the model's basis, into args.out.
  void finish(const Operation& op, int kv_head, const TokenBlock& block, BlockState& state);

 private:
  void load_queries();
  void load_code_queries();
  void find_exact_rows(bool is_k, std::array<const std::uint16_t*, kTile>& rows) const;
  void load_exact(const std::array<const std::uint16_t*, kTile>& rows, int dim, int ld, FloatBuffer& tile) const;
  void load_code(bool is_k, int dim, int padded, int ld, FloatBuffer& tile);
  void load_keys();
  void load_values();
  void score(const FloatBuffer& queries, const FloatBuffer& keys, int dim, FloatBuffer& scores);
  void softmax_token(int token, BlockState& state);
  void merge_tiers(int token, int row);
  void rescale(BlockState& state, int row, float factor) const;
  void add_values(BlockState& state);
  [[nodiscard]] int code_dim() const { return op_->k_ld + op_->means[static_cast<std::size_t>(kv_head_)].row_size(); }

  const Operation* op_ = nullptr;
  int kv_head_ = 0;
  TokenBlock block_;
  int rows_ = 0;
  bool has_code_queries_ = false;
  TilePlan plan_;
  MeanRows mean_rows_;

  std::array<const std::uint16_t*, kTile> k_rows_{}, v_rows_{};  // exact rows of the tile, this head; null: not read
  FloatBuffer q_;                                                // [rows][k_ld], times scale
  FloatBuffer code_q_;                // [rows][code_dim]: inner basis, then in the order of the mean rows
  std::vector<float> constant_;       // [rows] logit of the mean's constant part
  FloatBuffer keys_, code_keys_;      // [kTile][k_ld], [kTile][code_dim]: inner row, then mean row
  FloatBuffer values_, code_values_;  // [kTile][v_ld]
  FloatBuffer panels_;                // keys transposed
  FloatBuffer scores_, code_scores_;  // [rows][kTile]; logits, then probabilities, of the exact and the coded tier
  std::vector<float> head_row_;
};

}  // namespace oscar::attention
