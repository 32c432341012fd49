// Online softmax of a block of query tokens over a run of cells.
//
// Rows of a block, per KV head, are r = token * group + head within the group. Two accumulators are kept, one in the model's
// basis for exact rows and one in the codec's terms for coded rows, so a coded row is only unpacked; queries go to the inner
// basis once per block and outputs come back once. Codes are attended as integers where the codec allows it
// (integer_codes.h), else decoded row by row.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "attention/buffer.h"
#include "attention/float_tile.h"
#include "attention/integer_codes.h"
#include "attention/kernels.h"
#include "attention/key_mean.h"
#include "attention/tile_plan.h"
#include "oscar/attention/attention.h"

namespace oscar::attention {

class HeadQueries;

// What all blocks of one operation share.
struct Operation {
  AttentionArgs args;
  std::uint64_t serial = 0;  // no two operations of a job have the same
  const Kernels* kernels = nullptr;
  const Codec* k_codec = nullptr;  // null: exact mode
  const Codec* v_codec = nullptr;
  bool integer = false;  // both codecs have a code form
  int n_head_kv = 0, group = 0;
  int k_dim = 0, v_dim = 0;
  int k_ld = 0, v_ld = 0;           // padded row sizes: k_dim to kLane, v_dim to kPanel
  int bases = 1;                    // of coded values, each with an accumulator of its own
  int code_ld = 0;                  // row size of such an accumulator
  const HeadMean* means = nullptr;  // [n_head_kv]
  HeadQueries* queries = nullptr;   // [n_head_kv] of the only block, loaded: only read; null: threads load what they need
};

// Numerator and denominator of a block's rows of one KV head over the cells seen so far; sums are relative to
// exp(reference).
struct BlockState {
  struct Row {
    float reference = 0.0F;                       // -inf before the first visible cell; NaN once a logit was
    double sum = 0.0;                             // of all probabilities
    double code_sum = 0.0;                        // of those of coded rows
    std::array<double, kMaxBases> code_weight{};  // integer codes: of their rounded weights, gains included, by basis
  };
  std::vector<Row> rows;
  // Accumulators are 0 from their first use on, and hold anything before: a short piece seldom uses all.
  bool any_exact = false;
  unsigned bases_used = 0;  // bit b: of `code`
  FloatBuffer exact;        // [rows][v_ld], model basis
  FloatBuffer code;         // [rows][bases][code_ld]: inner basis, or weighted codes

  void start(const Operation& op, int n_rows);
  void use_exact(const Operation& op);
  void use_bases(const Operation& op, unsigned bases);
};

// A block's query rows of one KV head, ready for either tier.
class HeadQueries {
 public:
  void load(const Operation& op, int kv_head, const TokenBlock& block);
  // Only when the first coded row is met: short contexts have none.
  void load_code(const Operation& op);
  [[nodiscard]] int rows() const { return rows_; }

 private:
  friend class BlockWorker;
  std::uint64_t serial_ = 0;
  std::int64_t first_token_ = -1;
  int kv_head_ = -1, rows_ = 0;
  bool has_code_ = false;
  FloatBuffer q_;       // [rows][k_ld], times scale
  FloatBuffer code_q_;  // [rows][k_ld]: inner basis
  WordBuffer words_;    // [rows][key_words]: the same as integers
  std::vector<IntegerQuery> integer_;
  std::vector<Kernels::KeyWord> key_plan_;
  MeanTerm mean_;
};

// One thread's workspace.
class BlockWorker {
 public:
  // Runs the tiles of columns from `begin` on, `step` columns apart, below `end`, for KV heads [first_head, first_head +
  // n_heads) into states [n_heads]; begin and step are multiples of kTile.
  void run(const Operation& op, int first_head, int n_heads, const TokenBlock& block, std::int64_t begin, std::int64_t end,
           std::int64_t step, BlockState* states);
  // Query row r of a block from all cells: the sum of `n` states, `step` apart, in their order. Sinks, normalisation, back to
  // the model's basis, into args.out.
  void finish(const Operation& op, int kv_head, const TokenBlock& block, int r, const BlockState* states, std::int64_t n,
              std::int64_t step);

 private:
  void fetch_rows(std::int64_t column, int kv_head, int part, int parts) const;
  void fetch_books(std::int64_t column) const;
  void attend_tile(HeadQueries& queries, BlockState& state);
  void score_codes(const HeadQueries& queries, float* s);
  void load_values(const HeadQueries& queries);
  void softmax_token(const HeadQueries& queries, int token, BlockState& state);
  void merge_tiers(int token, int row);
  void rescale(BlockState& state, int row, float reference) const;
  void add_values(const HeadQueries& queries, BlockState& state);

  const Operation* op_ = nullptr;
  TokenBlock block_;
  TilePlan plan_;
  TilePhase phase_;
  std::vector<HeadQueries> heads_;  // by KV head, where the operation has none
  RowPointers k_rows_{}, v_rows_{};
  FloatTile exact_tile_, code_tile_;
  IntegerTile integer_tile_;
  bool weighing_ = false;  // softmax makes the integer tile's weights: nobody else wants probabilities
  FloatBuffer scores_, code_scores_,
      mean_scores_;  // [rows][kTile]; logits, then probabilities, of the exact and the coded tier
  // Rows that finish() adds up, and what they are multiplied with.
  struct Terms {
    std::vector<const float*> rows;
    std::vector<float> weights;
    void clear();
    void add(const float* row, float weight);
    void sum(const Kernels& kernels, int columns, FloatBuffer& out) const;
  };
  Terms exact_terms_;
  std::array<Terms, kMaxBases> code_terms_;
  FloatBuffer merged_;
  std::vector<float> head_row_;
};

}  // namespace oscar::attention
