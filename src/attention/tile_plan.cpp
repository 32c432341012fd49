#include "attention/tile_plan.h"

#include <algorithm>
#include <limits>

namespace oscar::attention {
namespace {

constexpr float kInvisible = -std::numeric_limits<float>::infinity();
constexpr std::uint16_t kInvisibleHalf = 0xFC00;

}  // namespace

TokenBlock make_token_block(const AttentionArgs& args, std::int64_t first, int count) {
  const auto [oldest, newest] = std::minmax_element(args.positions + first, args.positions + first + count);
  return {first, count, *oldest, *newest};
}

bool TilePlan::build(const AttentionArgs& args, const Kernels& kernels, const TokenBlock& block, std::int64_t column) {
  first_cell_ = args.first_cell + column;
  n_cells_ = static_cast<int>(std::min<std::int64_t>(kTile, args.n_kv - column));
  bias_.reserve(static_cast<std::size_t>(block.count * kTile));
  flags_.resize(static_cast<std::size_t>(block.count));
  if (args.mask != nullptr) {
    load_mask(args, kernels, block, column);
  } else {
    load_causal(args, block);
  }
  find_visible_cells(block.count);
  choose_tiers(args, block);
  return any_exact_ || any_code_;
}

void TilePlan::load_mask(const AttentionArgs& args, const Kernels& kernels, const TokenBlock& block, std::int64_t column) {
  std::array<std::uint16_t, kTile> padded;
  for (int t = 0; t < block.count; ++t) {
    const std::uint16_t* mask = args.mask + (block.first + t) * args.mask_token_stride + column;
    if (n_cells_ < kTile) {
      padded.fill(kInvisibleHalf);
      std::copy_n(mask, n_cells_, padded.begin());
      mask = padded.data();
    }
    flags_[static_cast<std::size_t>(t)] = kernels.mask_row(mask, bias_.data() + t * kTile);
  }
}

void TilePlan::load_causal(const AttentionArgs& args, const TokenBlock& block) {
  // Cells without a position are after everything.
  constexpr std::int32_t kNever = std::numeric_limits<std::int32_t>::max();
  std::array<std::int32_t, kTile> from;
  from.fill(kNever);
  for (int j = 0; j < n_cells_; ++j) {
    const std::int32_t p = args.cache->cells().position[cell(j)];
    if (p >= 0) from[static_cast<std::size_t>(j)] = p;
  }
  const auto [oldest, newest] = std::minmax_element(from.begin(), from.end());
  for (int t = 0; t < block.count; ++t) {
    const std::int32_t p = args.positions[block.first + t];
    float* bias = bias_.data() + t * kTile;
    for (int j = 0; j < kTile; ++j) bias[j] = (from[static_cast<std::size_t>(j)] <= p) ? 0.0F : kInvisible;
    flags_[static_cast<std::size_t>(t)] = (*oldest <= p ? kSomeVisible : 0) | (*newest > p ? kSomeBias : 0);
  }
}

void TilePlan::find_visible_cells(int tokens) {
  all_seen_ = false;
  seen_.fill(kInvisible);
  for (int t = 0; t < tokens; ++t) {
    if (!visible(t)) continue;
    if (bias(t) == nullptr) {
      all_seen_ = true;
      seen_.fill(0.0F);
      return;
    }
    const float* bias = bias_.data() + t * kTile;
    for (int j = 0; j < kTile; ++j) seen_.data()[j] = std::max(seen_.data()[j], bias[j]);
  }
}

// A column that the mask shows but that holds no row.
void TilePlan::hide_cell(int tokens, int j) {
  for (int t = 0; t < tokens; ++t) {
    float* bias = bias_.data() + t * kTile;
    bias[j] = kInvisible;
    const bool any = std::any_of(bias, bias + kTile, [](float x) { return x != kInvisible; });
    flags_[static_cast<std::size_t>(t)] = kSomeBias | (any ? kSomeVisible : 0);
  }
}

void TilePlan::choose_tiers(const AttentionArgs& args, const TokenBlock& block) {
  const KvCache::CellView cells = args.cache->cells();
  const Windows& windows = args.cache->windows();
  any_exact_ = any_code_ = false;
  misses_ = 0;
  if (all_coded(cells, windows, block)) return;
  tier_.fill(Tier::none);
  reads_.fill(0);
  bool by_token = false;
  for (int j = 0; j < n_cells_; ++j) {
    const auto at = static_cast<std::size_t>(j);
    if (seen_[at] == kInvisible) continue;
    const std::int32_t p = position_[at] = cells.position[cell(j)];
    const bool has_exact = cells.has_exact(cell(j));
    const bool has_code = p >= 0 && cells.has_code(cell(j));  // a code cannot be read without its position
    if (!has_exact && !has_code) {
      hide_cell(block.count, j);
      continue;
    }
    if (has_exact && (!has_code || windows.exact(p, block.newest))) {
      tier_[at] = Tier::exact;
    } else if (!has_exact) {
      tier_[at] = Tier::code;
      if (windows.exact(p, block.oldest)) count_misses(args, block, j);
    } else if (!windows.exact(p, block.oldest)) {
      tier_[at] = Tier::code;
    } else {
      tier_[at] = Tier::by_token;
      by_token = true;
    }
    if (tier_[at] == Tier::exact) reads_[at] = kExact;
    if (tier_[at] == Tier::code) reads_[at] = kCode;
    any_exact_ |= tier_[at] == Tier::exact;
    any_code_ |= tier_[at] == Tier::code;
  }
  if (by_token || (any_exact_ && any_code_)) select_by_token(args, block);
  if (!any_code_) return;
  for (int j = 0; j < kTile; ++j) code_positions_.at[static_cast<std::size_t>(j)] = reads_code(j) ? position(j) : -1;
  code_positions_.find_run();
}

// The usual tile of a long context: every cell has a code and no exact row, and no query wants one. Plain loops without
// branches; what the general way finds, sooner.
bool TilePlan::all_coded(const KvCache::CellView& cells, const Windows& windows, const TokenBlock& block) {
  if (n_cells_ < kTile) return false;
  const std::int32_t* position = cells.position + first_cell_;
  const std::int32_t* slot = cells.slot + first_cell_;
  const std::uint8_t* flags = cells.flags + first_cell_;
  std::int32_t slots = -1, least = position[0], most = position[0] + kTile - 1, off_run = 0;
  std::uint8_t coded = 1;
  for (int j = 0; j < kTile; ++j) slots &= slot[j];
  for (int j = 0; j < kTile; ++j) coded &= flags[j];
  for (int j = 0; j < kTile; ++j) off_run |= (position[j] - j) ^ position[0];
  if (off_run != 0) {
    least = *std::min_element(position, position + kTile);
    most = *std::max_element(position, position + kTile);
  }
  if (slots != -1 || coded == 0 || least < 0 || windows.exact(least, block.oldest) || windows.exact(most, block.oldest)) {
    return false;
  }
  if (all_seen_) {
    reads_.fill(kCode);
    std::copy_n(position, kTile, position_.begin());
    code_positions_.at = position_;
    code_positions_.run_start = position[0];
    any_code_ = true;
    if (off_run != 0) code_positions_.find_run();
    return true;
  }
  bool all = true;
  for (int j = 0; j < kTile; ++j) {
    const auto at = static_cast<std::size_t>(j);
    const bool seen = seen_[at] != kInvisible;
    reads_[at] = seen ? kCode : 0;
    position_[at] = position[j];
    code_positions_.at[at] = seen ? position[j] : -1;
    any_code_ |= seen;
    all &= seen;
  }
  code_positions_.run_start = position[0];
  if (any_code_ && (off_run != 0 || !all)) code_positions_.find_run();
  return true;
}

void TilePlan::count_misses(const AttentionArgs& args, const TokenBlock& block, int j) {
  for (int t = 0; t < block.count; ++t) {
    if (bias_.data()[t * kTile + j] == kInvisible) continue;
    if (args.cache->windows().exact(position_[static_cast<std::size_t>(j)], args.positions[block.first + t])) ++misses_;
  }
}

void TilePlan::select_by_token(const AttentionArgs& args, const TokenBlock& block) {
  select_.assign(static_cast<std::size_t>(block.count * kTile), 0);
  for (int t = 0; t < block.count; ++t) {
    const std::int32_t query = args.positions[block.first + t];
    const float* bias = bias_.data() + t * kTile;
    std::uint32_t* select = select_.data() + t * kTile;
    for (int j = 0; j < n_cells_; ++j) {
      const auto at = static_cast<std::size_t>(j);
      if (tier_[at] == Tier::code) {
        select[j] = ~0U;
      } else if (tier_[at] == Tier::by_token && bias[j] != kInvisible) {
        const bool exact = args.cache->windows().exact(position_[at], query);
        select[j] = exact ? 0U : ~0U;
        reads_[at] |= exact ? kExact : kCode;
        (exact ? any_exact_ : any_code_) = true;
      }
    }
  }
}

}  // namespace oscar::attention
