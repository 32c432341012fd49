// Sets of small integers as bits: the cells of a sequence, the slots in use. Storage covers only the touched range, so that
// thousands of short sequences cost little.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace oscar {

class CellSet {
 public:
  [[nodiscard]] bool contains(std::int64_t cell) const { return ((word(cell >> 6) >> (cell & 63)) & 1U) != 0; }
  [[nodiscard]] std::int64_t size() const { return size_; }
  [[nodiscard]] bool empty() const { return size_ == 0; }

  bool insert(std::int64_t cell) {  // false: was in
    std::uint64_t& w = grow(cell >> 6);
    const std::uint64_t bit = std::uint64_t{1} << (cell & 63);
    if ((w & bit) != 0) return false;
    w |= bit;
    ++size_;
    return true;
  }
  bool erase(std::int64_t cell) {  // false: was not in
    if (!contains(cell)) return false;
    words_[index(cell >> 6)] &= ~(std::uint64_t{1} << (cell & 63));
    --size_;
    return true;
  }
  void clear() { *this = CellSet(); }

  // Words are numbered by absolute cell / 64; outside [first_word, end_word) all are 0.
  [[nodiscard]] std::int64_t first_word() const { return first_; }
  [[nodiscard]] std::int64_t end_word() const { return first_ + static_cast<std::int64_t>(words_.size()); }
  [[nodiscard]] std::uint64_t word(std::int64_t w) const {
    return (w < first_word() || w >= end_word()) ? 0 : words_[index(w)];
  }
  [[nodiscard]] std::size_t memory_bytes() const { return words_.capacity() * sizeof(std::uint64_t); }

  // f(cell), ascending. f may erase the cell it is given.
  template <class F>
  void for_each(F f) const {
    for (std::int64_t w = first_word(); w < end_word(); ++w) for_each_bit(word(w), w, f);
  }
  template <class F>
  static void for_each_bit(std::uint64_t bits, std::int64_t w, F&& f) {
    for (; bits != 0; bits &= bits - 1) f(w * 64 + std::countr_zero(bits));
  }

 private:
  [[nodiscard]] std::size_t index(std::int64_t w) const { return static_cast<std::size_t>(w - first_); }
  std::uint64_t& grow(std::int64_t w) {
    if (words_.empty()) first_ = w;
    if (w < first_) {
      words_.insert(words_.begin(), static_cast<std::size_t>(first_ - w), 0);
      first_ = w;
    }
    if (w >= end_word()) words_.resize(index(w) + 1, 0);
    return words_[index(w)];
  }

  std::int64_t first_ = 0;
  std::int64_t size_ = 0;
  std::vector<std::uint64_t> words_;
};

}  // namespace oscar
