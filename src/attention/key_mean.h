// The mean terms of coded keys: logits q . RoPE_t(mean) for the tokens of a tile.
//
// With w = conj(q) c over the pairs of coordinates (c the mean's pairs, q the query's), the logit at position t is
//   Re sum_p w_p e^(i theta_p t).
// For a tile of consecutive positions, e^(i theta_p t) of its middle goes into w; what is left is a product with constant
// functions over a tile. About its middle cosines are even and sines are odd: Re w only meets even functions, Im w only odd
// ones, and both need to be summed over half of the tile only. Pairs that turn slowly are polynomials of low degree over a
// tile, so there is one function of either kind per fast pair and a few Chebyshev polynomials for all the slow ones.
//
// e^(i theta t) is a product of table entries indexed by the base-64 digits of t: tables do not grow with the context, and the
// value is a function of t alone (no recurrence whose rounding depends on where a task starts).
#pragma once

#include <array>
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
  [[nodiscard]] int n_pairs() const { return static_cast<int>(order_.size()); }  // n_rot / 2
  [[nodiscard]] int padded_pairs() const { return padded_pairs_; }               // rounded up to kPanel; the rest is 0
  [[nodiscard]] std::span<const int> order() const { return order_; }  // pairs, the fastest first: the order of all rows
  // out [2 * padded_pairs]: real, then imaginary parts of e^(i theta t), t >= 0.
  void phase(const Kernels& kernels, std::int64_t t, float* out) const;

  // [2 * padded_pairs]: e^(i theta (kTile - 1) / 2), from a tile's first position to its middle.
  [[nodiscard]] const float* to_middle() const { return to_middle_.data(); }
  // Even functions over a tile, and as many odd ones.
  [[nodiscard]] int depth() const { return n_fast_ + (has_slow() ? kLane : 0); }
  // s[r * kTile + j] from w [rows][2 * padded_pairs] at the tile's middle, which is used up; `constant` [rows] is added.
  void logits(const Kernels& kernels, float* w, const float* constant, int rows, float* s) const;

 private:
  static constexpr int kRadix = kTile;
  static constexpr int kDigits = 6;  // 64^6 > every 32-bit position
  static constexpr double kFitError = 2e-7;

  void make_phases();
  void make_basis();
  [[nodiscard]] bool has_slow() const { return n_fast_ < n_pairs(); }
  [[nodiscard]] double theta(int i) const { return theta_[static_cast<std::size_t>(order_[static_cast<std::size_t>(i)])]; }

  std::vector<double> theta_;
  std::vector<int> order_;
  int padded_pairs_ = 0, n_fast_ = 0;
  FloatBuffer phases_;     // [kDigits][kRadix][2 * padded_pairs]
  FloatBuffer to_middle_;  // [2 * padded_pairs]
  FloatBuffer basis_;      // [even, odd][depth][kTile / 2]: fast pairs, then polynomials, over the second half of a tile
  FloatBuffer slow_;       // [even, odd][n_pairs - n_fast][kLane]: pair -> polynomials
};

// One KV head's mean terms.
struct HeadMean {
  const RopeTable* table = nullptr;  // null: no pre-RoPE mean
  std::vector<int> first, second;    // coordinates of each pair, in the table's order
  FloatBuffer mean;                  // [2 * padded_pairs] times magnitude, turned to_middle
  std::vector<float> constant;  // [head_dim] what does not depend on the position: offset, and the mean beyond n_rot; or empty

  HeadMean() = default;
  HeadMean(const KeyMean& key_mean, const RopeTable* rope_table, int head_dim);
};

// Positions of a tile's coded tokens.
struct TilePositions {
  std::array<std::int32_t, kTile> at{};  // -1: not read
  std::int64_t run_start = -1;           // t0 if every token that is read has position t0 + j; -1: not so

  void find_run();  // from `at`
};

// What a thread needs for the tile that is worked on; heads share it.
struct TilePhase {
  const RopeTable* table = nullptr;
  std::int64_t t = -1;
  FloatBuffer row;     // [2 * padded_pairs] e^(i theta t)
  FloatBuffer turned;  // [rows][2 * padded_pairs], of one head
  FloatBuffer rows;    // [kTile][2 * padded_pairs], of scattered tokens

  const float* at(const Kernels& kernels, const RopeTable& of, std::int64_t position);
};

// One KV head's mean logits of a block of query rows.
class MeanTerm {
 public:
  // q [rows][ldq]. The mean must outlive the term.
  void start(const Kernels& kernels, const HeadMean& mean, const float* q, std::int64_t ldq, int rows);
  [[nodiscard]] bool empty() const { return rows_ == 0; }
  // s[r * kTile + j] = the term of coded token j for row r; tokens that are not read get anything finite.
  void logits(const Kernels& kernels, const TilePositions& positions, TilePhase& phase, float* s) const;

 private:
  void scattered(const Kernels& kernels, const TilePositions& positions, TilePhase& phase, float* s) const;

  const HeadMean* mean_ = nullptr;
  int rows_ = 0;
  std::vector<float> constant_;  // [rows]
  FloatBuffer w_;                // [rows][2 * padded_pairs], turned to_middle
};

}  // namespace oscar::attention
