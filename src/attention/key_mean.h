// The mean terms of coded keys, prepared for tiles: RoPE_t(mean) as a row of real parts followed by a row of imaginary parts,
// so that q . RoPE_t(mean) is a plain dot product with a query whose coordinates were put in the same order.
//
// e^(i theta t) comes from tables indexed by the base-64 digits of t: their size does not depend on the context, and a row
// is a function of t alone (no recurrence whose rounding depends on where a task starts).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/buffer.h"
#include "attention/kernels.h"
#include "oscar/codec/codec.h"

namespace oscar::attention {

class RopeTable {
 public:
  explicit RopeTable(std::span<const double> theta);

  [[nodiscard]] bool same_angles(std::span<const double> theta) const;
  [[nodiscard]] int n_pairs() const { return n_pairs_; }            // n_rot / 2
  [[nodiscard]] int padded_pairs() const { return padded_pairs_; }  // n_pairs rounded up to kLane; the rest is 0
  // [2 * padded_pairs]: real, then imaginary parts of e^(i theta (t mod 64)).
  [[nodiscard]] const float* fine(std::int64_t t) const { return fine_.data() + (t % kRadix) * 2 * padded_pairs_; }
  // row [2 * n_pairs] (real, then imaginary) is multiplied by e^(i theta (t - t mod 64)). t >= 0.
  void turn_coarse(std::int64_t t, std::span<double> row) const;

  static constexpr int kRadix = 64;

 private:
  static constexpr int kDigits = 6;  // 64^6 > every 32-bit position
  std::vector<double> theta_;
  int n_pairs_ = 0, padded_pairs_ = 0;
  FloatBuffer fine_;            // [kRadix][2 * padded_pairs]
  std::vector<double> coarse_;  // [kDigits - 1][kRadix][2 * n_pairs]: digit 1 and up
};

// One KV head's mean terms. The spans of the codec must outlive it.
struct HeadMean {
  const RopeTable* table = nullptr;  // null: no pre-RoPE mean
  std::vector<int> first, second;    // coordinates of each pair
  std::vector<double> rotated;       // [2 * n_pairs] mean times magnitude: real, then imaginary
  std::vector<float> constant;  // [head_dim] what does not depend on the position: offset, and the mean beyond n_rot; or empty

  HeadMean() = default;
  HeadMean(const KeyMean& mean, const RopeTable* rope_table, int head_dim);

  [[nodiscard]] int row_size() const { return table != nullptr ? 2 * table->padded_pairs() : 0; }
  // out [row_size()]: q with its coordinates in the order of the mean rows; the padding is 0.
  void reorder_query(std::span<const float> q, float* out) const;
  [[nodiscard]] float constant_logit(std::span<const float> q) const;
};

// Makes mean rows of one head; neighbours in position share the coarse part.
class MeanRows {
 public:
  void start(const HeadMean* head);
  // out [head.row_size()] = RoPE_t(mean), t >= 0.
  void fill(const Kernels& kernels, std::int64_t t, float* out);

 private:
  const HeadMean* head_ = nullptr;
  std::int64_t block_ = -1;  // t / 64 of coarse_
  std::vector<double> exact_;
  FloatBuffer coarse_;
};

}  // namespace oscar::attention
