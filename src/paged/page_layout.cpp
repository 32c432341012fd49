#include "oscar/paged/page_layout.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "oscar/base/error.h"
#include "oscar/codec/spectral.h"

namespace oscar::paged {
namespace {

std::size_t size_of(int n) { return static_cast<std::size_t>(n); }

unsigned digit(const std::uint8_t* bytes, DigitPlace place) {
  return (static_cast<unsigned>(bytes[place.byte]) >> place.shift) & 3U;
}
void set_digit(std::uint8_t* bytes, DigitPlace place, unsigned value) {
  const unsigned cleared = static_cast<unsigned>(bytes[place.byte]) & ~(3U << place.shift);
  bytes[place.byte] = static_cast<std::uint8_t>(cleared | (value << place.shift));
}
// Digit i of a level of the CPU codec; a head's levels follow each other without gaps.
DigitPlace row_digit(int i) { return {static_cast<std::uint32_t>(i / 4), i % 4 * 2}; }

void check_sizes(const PageLayout& layout, std::size_t k, std::size_t v, std::size_t page, int position) {
  if (position < 0) fail("paged: position {} is in no page; positions begin at 0", position);
  if (k != layout.key_row_bytes() || v != layout.value_row_bytes() || page != layout.page_bytes) {
    fail("paged: rows of {} and {} bytes and a page of {}; expected {}, {} and {}", k, v, page, layout.key_row_bytes(),
         layout.value_row_bytes(), layout.page_bytes);
  }
}

// gains: of the values of all heads.
void check_patterns(std::span<const std::uint8_t> gains, int position) {
  for (std::size_t h = 0; h < gains.size(); ++h) {
    const int pattern = gains[h] / kValueGains;
    if (gains[h] == 0 || pattern == value_pattern(position)) continue;
    fail(
        "paged: the value of head {} at position {} was coded with signs {} at another position, its page is summed with signs "
        "{}; code the row again where it is now",
        h, position, pattern, value_pattern(position));
  }
}

}  // namespace

PageLayout::PageLayout(int dim, std::vector<int> slots)
    : n_head_kv(static_cast<int>(slots.size())), head_dim(dim), key_slots(std::move(slots)) {
  add_heads();
}
PageLayout PageLayout::int2(int dim, int heads) {
  PageLayout layout;
  layout.codec = PageCodec::int2;
  layout.n_head_kv = heads;
  layout.head_dim = dim;
  layout.key_slots.assign(size_of(std::max(heads, 0)), dim);
  layout.add_heads();
  return layout;
}
void PageLayout::add_heads() {
  if (!head_dim_fits(head_dim)) fail("paged: head_dim is {}; pages hold 64, 128 or 256", head_dim);
  if (n_head_kv < 1 || n_head_kv > kMaxHeadsKv) fail("paged: {} KV heads; pages hold 1 to {}", n_head_kv, kMaxHeadsKv);
  for (const int s : key_slots) {
    if (s < 0 || s % kSpectralSlots != 0 || s > kSpectralMaxWidth / 2 * head_dim) {
      fail("paged: a head has {} slots; a multiple of {} up to {} is possible", s, kSpectralSlots,
           kSpectralMaxWidth / 2 * head_dim);
    }
    head_offset.push_back(page_bytes);
    page_bytes += head_bytes(s, head_dim, codec);
  }
}

std::size_t PageLayout::key_row_bytes() const {
  if (codec == PageCodec::int2) return value_row_bytes();
  return static_cast<std::size_t>(std::accumulate(key_slots.begin(), key_slots.end(), 0)) / 4 + size_of(n_head_kv);
}
std::size_t PageLayout::value_row_bytes() const {
  return size_of(n_head_kv) * (size_of(head_dim) / 4 + (codec == PageCodec::int2 ? 4 : 1));
}

// Rows of `spectral` have the gains of all heads behind all digits, rows of `int2` each head's grid behind its digits.
void PageLayout::store_rows(std::span<const std::uint8_t> k_row, std::span<const std::uint8_t> v_row, int position,
                            std::span<std::uint8_t> page) const {
  check_sizes(*this, k_row.size(), v_row.size(), page.size(), position);
  if (codec == PageCodec::spectral) check_patterns(v_row.last(size_of(n_head_kv)), position);
  const int token = position % kPageTokens;
  const std::uint8_t* k = k_row.data();
  const std::uint8_t* v = v_row.data();
  for (int h = 0; h < n_head_kv; ++h) {
    const int slots = key_slots[size_of(h)];
    std::uint8_t* keys = page.data() + head_offset[size_of(h)];
    std::uint8_t* values = keys + key_bytes(slots);
    std::uint8_t* row_data = values + value_bytes(head_dim);
    for (int s = 0; s < slots; ++s) set_digit(keys, key_digit(slots, token, s), digit(k, row_digit(s)));
    for (int d = 0; d < head_dim; ++d) set_digit(values, value_digit(head_dim, token, d), digit(v, row_digit(d)));
    k += slots / 4;
    v += head_dim / 4;
    if (codec == PageCodec::int2) {
      std::memcpy(row_data + grid_byte(token), k, 4);
      std::memcpy(row_data + row_data_bytes(codec) + grid_byte(token), v, 4);
      k += 4;
      v += 4;
    } else {
      row_data[gain_byte(token)] = k_row[k_row.size() - size_of(n_head_kv - h)];
      row_data[kPageTokens + gain_byte(token)] = v_row[v_row.size() - size_of(n_head_kv - h)];
    }
  }
}

void PageLayout::load_rows(std::span<const std::uint8_t> page, int position, std::span<std::uint8_t> k_row,
                           std::span<std::uint8_t> v_row) const {
  check_sizes(*this, k_row.size(), v_row.size(), page.size(), position);
  const int token = position % kPageTokens;
  std::uint8_t* k = k_row.data();
  std::uint8_t* v = v_row.data();
  for (int h = 0; h < n_head_kv; ++h) {
    const int slots = key_slots[size_of(h)];
    const std::uint8_t* keys = page.data() + head_offset[size_of(h)];
    const std::uint8_t* values = keys + key_bytes(slots);
    const std::uint8_t* row_data = values + value_bytes(head_dim);
    for (int s = 0; s < slots; ++s) set_digit(k, row_digit(s), digit(keys, key_digit(slots, token, s)));
    for (int d = 0; d < head_dim; ++d) set_digit(v, row_digit(d), digit(values, value_digit(head_dim, token, d)));
    k += slots / 4;
    v += head_dim / 4;
    if (codec == PageCodec::int2) {
      std::memcpy(k, row_data + grid_byte(token), 4);
      std::memcpy(v, row_data + row_data_bytes(codec) + grid_byte(token), 4);
      k += 4;
      v += 4;
    } else {
      k_row[k_row.size() - size_of(n_head_kv - h)] = row_data[gain_byte(token)];
      v_row[v_row.size() - size_of(n_head_kv - h)] = row_data[kPageTokens + gain_byte(token)];
    }
  }
}

void KeyTables::set_means(const MatrixF& constant, const MatrixF& pre_rope, const Rope& rope) {
  const int heads = layout.n_head_kv;
  key_constant = constant.size() != 0 ? constant : MatrixF(MatrixF::Zero(heads, layout.head_dim));
  if (pre_rope.size() == 0) return;
  KeyMeanTables means;
  means.set_means(constant, pre_rope, rope, heads, layout.head_dim);
  theta = means.theta;
  pair_first = means.pair_first;
  pair_second = means.pair_second;
  const auto magnitude = static_cast<float>(means.magnitude);
  mean_first = magnitude * means.mean_first;
  mean_second = magnitude * means.mean_second;
  key_constant += means.rest;
}

void KeyMeanTables::set_means(const MatrixF& constant, const MatrixF& pre_rope, const Rope& rope, int n_head_kv, int head_dim) {
  offset = constant.size() != 0 ? constant : MatrixF(MatrixF::Zero(n_head_kv, head_dim));
  rest = MatrixF::Zero(n_head_kv, head_dim);
  if (pre_rope.size() == 0) return;
  const auto pairs = rope.theta().size();
  theta.assign(rope.theta().begin(), rope.theta().end());
  magnitude = rope.magnitude();
  mean_first.resize(n_head_kv, static_cast<Eigen::Index>(pairs));
  mean_second.resize(n_head_kv, static_cast<Eigen::Index>(pairs));
  for (std::size_t i = 0; i < pairs; ++i) {
    const std::size_t first = rope.first_of(i);
    const std::size_t second = rope.second_of(i);
    pair_first.push_back(static_cast<std::uint16_t>(first));
    pair_second.push_back(static_cast<std::uint16_t>(second));
    const auto column = static_cast<Eigen::Index>(i);
    mean_first.col(column) = pre_rope.col(static_cast<Eigen::Index>(first));
    mean_second.col(column) = pre_rope.col(static_cast<Eigen::Index>(second));
  }
  const Eigen::Index unturned = head_dim - static_cast<Eigen::Index>(2 * pairs);
  rest.rightCols(unturned) = pre_rope.rightCols(unturned);
}

}  // namespace oscar::paged
