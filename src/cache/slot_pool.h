// Numbers of the rows of the exact pool. The lowest free number is taken first, so the memory behind them stays compact.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace oscar {

class SlotPool {
 public:
  std::int32_t acquire() {
    while (hint_ < words_.size() && words_[hint_] == ~std::uint64_t{0}) ++hint_;
    if (hint_ == words_.size()) {
      words_.push_back(0);
      touched_.push_back(0);
    }
    const int bit = std::countr_one(words_[hint_]);
    words_[hint_] |= std::uint64_t{1} << bit;
    touched_[hint_] |= std::uint64_t{1} << bit;
    ++in_use_;
    peak_ = std::max(peak_, in_use_);
    return static_cast<std::int32_t>(hint_ * 64) + bit;
  }
  void release(std::int32_t slot) {
    const auto w = static_cast<std::size_t>(slot) / 64;
    words_[w] &= ~(std::uint64_t{1} << (slot & 63));
    hint_ = std::min(hint_, w);
    --in_use_;
  }
  void clear() {
    words_ = {};
    touched_ = {};
    hint_ = 0;
    in_use_ = 0;
  }

  [[nodiscard]] std::int64_t in_use() const { return in_use_; }
  [[nodiscard]] std::int64_t peak() const { return peak_; }
  // Slots that are free but were used since the last forget_idle(): the memory behind them may be resident.
  [[nodiscard]] std::int64_t idle() const {
    std::int64_t n = 0;
    for (std::size_t w = 0; w < words_.size(); ++w) n += std::popcount(touched_[w] & ~words_[w]);
    return n;
  }
  // Runs [begin, end) of idle slots, ascending; from then on they count as untouched.
  std::vector<std::pair<std::size_t, std::size_t>> forget_idle() {
    std::vector<std::pair<std::size_t, std::size_t>> runs;
    for (std::size_t slot = 0; slot < words_.size() * 64; ++slot) {
      if (((touched_[slot / 64] & ~words_[slot / 64]) >> (slot % 64) & 1U) == 0) continue;
      if (runs.empty() || runs.back().second != slot) runs.emplace_back(slot, slot);
      runs.back().second = slot + 1;
    }
    touched_ = words_;
    return runs;
  }
  [[nodiscard]] std::size_t memory_bytes() const { return (words_.capacity() + touched_.capacity()) * sizeof(std::uint64_t); }

 private:
  std::vector<std::uint64_t> words_;    // bit = slot in use
  std::vector<std::uint64_t> touched_;  // bit = slot used since the last forget_idle()
  std::size_t hint_ = 0;                // no word before this one has a free bit
  std::int64_t in_use_ = 0;
  std::int64_t peak_ = 0;
};

}  // namespace oscar
