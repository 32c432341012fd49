// Numbers of the rows of the exact pool. The lowest free number is taken first, so the memory behind them stays compact.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace oscar {

class SlotPool {
 public:
  std::int32_t acquire() {
    while (hint_ < words_.size() && words_[hint_] == ~std::uint64_t{0}) ++hint_;
    if (hint_ == words_.size()) words_.push_back(0);
    const int bit = std::countr_one(words_[hint_]);
    words_[hint_] |= std::uint64_t{1} << bit;
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
    hint_ = 0;
    in_use_ = 0;
  }

  [[nodiscard]] std::int64_t in_use() const { return in_use_; }
  [[nodiscard]] std::int64_t peak() const { return peak_; }
  [[nodiscard]] std::int64_t end() const {  // one past the highest slot in use
    std::size_t w = words_.size();
    while (w > 0 && words_[w - 1] == 0) --w;
    return w == 0 ? 0 : static_cast<std::int64_t>(w * 64) - std::countl_zero(words_[w - 1]);
  }
  [[nodiscard]] std::size_t memory_bytes() const { return words_.capacity() * sizeof(std::uint64_t); }

 private:
  std::vector<std::uint64_t> words_;  // bit = slot in use
  std::size_t hint_ = 0;              // no word before this one has a free bit
  std::int64_t in_use_ = 0;
  std::int64_t peak_ = 0;
};

}  // namespace oscar
