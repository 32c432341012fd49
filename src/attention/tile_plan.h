// What a block of query tokens does with one tile of cells: which cells it sees, and which tier of each it reads.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "attention/buffer.h"
#include "attention/kernels.h"
#include "attention/key_mean.h"
#include "oscar/attention/attention.h"

namespace oscar::attention {

// Query tokens first .. first + count - 1 of an operation.
struct TokenBlock {
  std::int64_t first = 0;
  int count = 0;
  std::int32_t oldest = 0, newest = 0;  // smallest and largest position
};

TokenBlock make_token_block(const AttentionArgs& args, std::int64_t first, int count);

class TilePlan {
 public:
  // Looks at mask columns column .. column + kTile - 1 (those below n_kv). False: nothing is visible, nothing else is valid.
  bool build(const AttentionArgs& args, const Kernels& kernels, const TokenBlock& block, std::int64_t column);

  [[nodiscard]] std::int64_t cell(int j) const { return first_cell_ + j; }
  [[nodiscard]] int n_cells() const { return n_cells_; }
  [[nodiscard]] std::int32_t position(int j) const { return position_[static_cast<std::size_t>(j)]; }
  // Whether some token of the block reads this tier of the cell.
  [[nodiscard]] bool reads_exact(int j) const { return (reads_[static_cast<std::size_t>(j)] & kExact) != 0; }
  [[nodiscard]] bool reads_code(int j) const { return (reads_[static_cast<std::size_t>(j)] & kCode) != 0; }
  // Of the cells whose code is read; only if any_code().
  [[nodiscard]] const TilePositions& code_positions() const { return code_positions_; }
  [[nodiscard]] bool any_exact() const { return any_exact_; }
  [[nodiscard]] bool any_code() const { return any_code_; }

  [[nodiscard]] bool visible(int token) const { return (flags_[static_cast<std::size_t>(token)] & kSomeVisible) != 0; }
  // [kTile] additive, -inf where the token sees nothing; null: all 0.
  [[nodiscard]] const float* bias(int token) const {
    return (flags_[static_cast<std::size_t>(token)] & kSomeBias) != 0 ? bias_.data() + token * kTile : nullptr;
  }
  // Only if any_exact() and any_code(): [kTile], all bits set where the token reads the code, else 0.
  [[nodiscard]] const std::uint32_t* select_code(int token) const { return select_.data() + token * kTile; }
  // (cell, token) pairs that wanted the exact row and found only the code.
  [[nodiscard]] std::uint64_t misses() const { return misses_; }

 private:
  static constexpr std::uint8_t kExact = 1;
  static constexpr std::uint8_t kCode = 2;
  enum class Tier : std::uint8_t { none, exact, code, by_token };

  void load_mask(const AttentionArgs& args, const Kernels& kernels, const TokenBlock& block, std::int64_t column);
  void load_causal(const AttentionArgs& args, const TokenBlock& block);
  void find_visible_cells(int tokens);
  void hide_cell(int tokens, int j);
  void choose_tiers(const AttentionArgs& args, const TokenBlock& block);
  bool all_coded(const KvCache::CellView& cells, const Windows& windows, const TokenBlock& block);
  void count_misses(const AttentionArgs& args, const TokenBlock& block, int j);
  void select_by_token(const AttentionArgs& args, const TokenBlock& block);

  std::int64_t first_cell_ = 0;
  int n_cells_ = 0;
  std::array<std::int32_t, kTile> position_{};
  TilePositions code_positions_;
  std::array<std::uint8_t, kTile> reads_{};
  std::array<Tier, kTile> tier_{};
  alignas(32) std::array<float, kTile> seen_{};  // largest bias over the block's tokens
  bool all_seen_ = false;                        // without a bias
  bool any_exact_ = false, any_code_ = false;
  std::uint64_t misses_ = 0;
  FloatBuffer bias_;                   // [tokens][kTile]
  std::vector<int> flags_;             // [tokens] of mask_row()
  std::vector<std::uint32_t> select_;  // [tokens][kTile]
};

}  // namespace oscar::attention
