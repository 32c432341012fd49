#include "oscar/paged/spectral_pages.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "oscar/base/error.h"

namespace oscar::paged {
namespace {

static_assert(kPatterns == kSignPatterns && kPageTokens == kPatternPositions);
constexpr std::size_t kUnitGain = 40;  // of a value: 1

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

// Number of slots of a head and the stored coordinate and level of each, from the widths in T's order.
std::vector<std::uint16_t> slots_of(std::vector<int> width) {
  std::sort(width.begin(), width.end(), std::greater<>());
  std::vector<std::uint16_t> source;
  for (int level = 0; level < kSpectralMaxWidth / 2; ++level) {
    for (std::size_t d = 0; d < width.size() && width[d] > 2 * level; ++d)
      source.push_back(static_cast<std::uint16_t>(d + 4096 * size_of(level)));
  }
  return source;
}

void add_means(const SpectralKeyConfig& keys, SpectralTables& tables) {
  const int heads = keys.n_head_kv;
  tables.key_constant = keys.mean.size() != 0 ? keys.mean : MatrixF(MatrixF::Zero(heads, keys.head_dim));
  if (keys.mean_pre_rope.size() == 0) return;
  const auto pairs = keys.rope.theta().size();
  tables.theta.assign(keys.rope.theta().begin(), keys.rope.theta().end());
  tables.mean_first.resize(heads, static_cast<Eigen::Index>(pairs));
  tables.mean_second.resize(heads, static_cast<Eigen::Index>(pairs));
  const auto magnitude = static_cast<float>(keys.rope.magnitude());
  for (std::size_t i = 0; i < pairs; ++i) {
    const std::size_t first = keys.rope.first_of(i);
    const std::size_t second = keys.rope.second_of(i);
    tables.pair_first.push_back(static_cast<std::uint16_t>(first));
    tables.pair_second.push_back(static_cast<std::uint16_t>(second));
    const auto column = static_cast<Eigen::Index>(i);
    tables.mean_first.col(column) = magnitude * keys.mean_pre_rope.col(static_cast<Eigen::Index>(first));
    tables.mean_second.col(column) = magnitude * keys.mean_pre_rope.col(static_cast<Eigen::Index>(second));
  }
  const auto turned = static_cast<Eigen::Index>(2 * pairs);
  const Eigen::Index rest = keys.head_dim - turned;
  tables.key_constant.rightCols(rest) += keys.mean_pre_rope.rightCols(rest);
}

}  // namespace

PageLayout::PageLayout(int dim, std::vector<int> slots)
    : n_head_kv(static_cast<int>(slots.size())), head_dim(dim), key_slots(std::move(slots)) {
  if (!head_dim_fits(dim)) fail("paged: head_dim is {}; pages hold 64, 128 or 256", dim);
  if (n_head_kv < 1 || n_head_kv > kMaxHeadsKv) fail("paged: {} KV heads; pages hold 1 to {}", n_head_kv, kMaxHeadsKv);
  for (const int s : key_slots) {
    if (s < 0 || s % kSpectralSlots != 0 || s > kSpectralMaxWidth / 2 * dim) {
      fail("paged: a head has {} slots; a multiple of {} up to {} is possible", s, kSpectralSlots, kSpectralMaxWidth / 2 * dim);
    }
    head_offset.push_back(page_bytes);
    page_bytes += head_bytes(s, dim);
  }
}

std::size_t PageLayout::key_row_bytes() const {
  return static_cast<std::size_t>(std::accumulate(key_slots.begin(), key_slots.end(), 0)) / 4 + size_of(n_head_kv);
}
std::size_t PageLayout::value_row_bytes() const { return size_of(n_head_kv) * (size_of(head_dim) / 4 + 1); }

void PageLayout::store_rows(std::span<const std::uint8_t> k_row, std::span<const std::uint8_t> v_row, int position,
                            std::span<std::uint8_t> page) const {
  check_sizes(*this, k_row.size(), v_row.size(), page.size(), position);
  check_patterns(v_row.last(size_of(n_head_kv)), position);
  const int token = position % kPageTokens;
  const std::uint8_t* k = k_row.data();
  const std::uint8_t* v = v_row.data();
  for (int h = 0; h < n_head_kv; ++h) {
    const int slots = key_slots[size_of(h)];
    std::uint8_t* keys = page.data() + head_offset[size_of(h)];
    std::uint8_t* values = keys + key_bytes(slots);
    std::uint8_t* gains = values + value_bytes(head_dim);
    for (int s = 0; s < slots; ++s) set_digit(keys, key_digit(slots, token, s), digit(k, row_digit(s)));
    for (int d = 0; d < head_dim; ++d) set_digit(values, value_digit(head_dim, token, d), digit(v, row_digit(d)));
    gains[gain_byte(token)] = k_row[k_row.size() - size_of(n_head_kv - h)];
    gains[kPageTokens + gain_byte(token)] = v_row[v_row.size() - size_of(n_head_kv - h)];
    k += slots / 4;
    v += head_dim / 4;
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
    const std::uint8_t* gains = values + value_bytes(head_dim);
    for (int s = 0; s < slots; ++s) set_digit(k, row_digit(s), digit(keys, key_digit(slots, token, s)));
    for (int d = 0; d < head_dim; ++d) set_digit(v, row_digit(d), digit(values, value_digit(head_dim, token, d)));
    k_row[k_row.size() - size_of(n_head_kv - h)] = gains[gain_byte(token)];
    v_row[v_row.size() - size_of(n_head_kv - h)] = gains[kPageTokens + gain_byte(token)];
    k += slots / 4;
    v += head_dim / 4;
  }
}

SpectralTables spectral_tables(const SpectralKeyConfig& keys, const SpectralValueConfig& values) {
  const std::unique_ptr<Codec> key_codec = make_spectral_key_codec(keys);
  const std::unique_ptr<Codec> value_codec = make_spectral_value_codec(values);
  const int heads = keys.n_head_kv;
  const int dim = keys.head_dim;
  if (values.n_head_kv != heads || values.head_dim != dim) {
    fail("paged: keys are {} x {}, values {} x {}; pages need the same shape", heads, dim, values.n_head_kv, values.head_dim);
  }
  if (values.bits != 2) fail("paged: values of {} bits; pages hold 2", values.bits);

  SpectralTables tables;
  std::vector<int> slots;
  for (const SpectralKeyHead& head : keys.heads) {
    tables.slot_source.push_back(slots_of(head.width));
    slots.push_back(static_cast<int>(tables.slot_source.back().size()));
  }
  tables.layout = PageLayout(dim, std::move(slots));
  for (int h = 0; h < heads; ++h) {
    MatrixF& query = tables.query.emplace_back(dim, dim);
    std::vector<float> unit(size_of(dim), 0.0F);
    for (int d = 0; d < dim; ++d) {
      unit[size_of(d)] = 1.0F;
      key_codec->query_to_inner(h, unit, std::span(query.data() + d * dim, size_of(dim)));
      unit[size_of(d)] = 0.0F;
    }
  }
  add_means(keys, tables);
  // H takes the first coordinate to equal parts of all, so its image shows the signs.
  std::vector<float> first(size_of(dim), 0.0F);
  first[0] = 1.0F;
  std::vector<float> image(size_of(dim));
  tables.value_signs.resize(kPatterns * heads, dim);
  for (int h = 0; h < heads; ++h) {
    const CodeForm& form = *value_codec->code_form(h);
    tables.value_unit.push_back(form.unit[0] * form.gain[kUnitGain]);
    for (int p = 0; p < kPatterns; ++p) {
      std::fill(image.begin(), image.end(), 0.0F);
      value_codec->basis_to_output(h, p, first, image);
      for (int d = 0; d < dim; ++d) tables.value_signs(p * heads + h, d) = std::copysign(1.0F, image[size_of(d)]);
    }
  }
  return tables;
}

}  // namespace oscar::paged
