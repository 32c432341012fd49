#include "attention/integer_codes.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace oscar::attention {
namespace {

std::size_t size_of(int n) { return static_cast<std::size_t>(n); }

constexpr float kMaxByte = 127.0F;
constexpr float kMaxSum = 32767.0F;
constexpr float kRounder = 0x1.8p23F;  // added to a small number it leaves the nearest integer

// The coordinates of four words of a query, 0 beyond the coded ones.
constexpr int kQueryGroup = 16;
struct QueryGroup {
  std::array<float, kQueryGroup> q{}, centre{};
  QueryGroup(const CodeForm& form, const float* query, int first) {
    const int n = std::min(kQueryGroup, form.coded - first);
    std::copy_n(query + first, n, q.begin());
    std::copy_n(form.centre.begin() + first, n, centre.begin());
  }
};

}  // namespace

void integer_query(const CodeForm& form, const float* q, std::uint32_t* out, IntegerQuery& about) {
  std::fill_n(out, key_words(form.coded), 0U);
  about = {};
  // The scale is the smallest that keeps bytes in range, the centred sums over either half of the words in 16 bits, and the
  // product of a byte pair too. Rounding adds up to 1/2 per byte to a sum. Sixteen coordinates at a time, a sum for each of
  // them: of those, the first eight belong to one half.
  using Lanes = std::array<float, kQueryGroup>;
  Lanes sum{}, slack{}, probe{}, least{};
  for (int first = 0; first < form.coded; first += kQueryGroup) {
    const QueryGroup group(form, q, first);
    Lanes product;
    for (std::size_t i = 0; i < kQueryGroup; ++i) {
      const float size = std::abs(group.q[i]);
      product[i] = size * group.centre[i];
      sum[i] += product[i];
      slack[i] += 0.5F * group.centre[i];
      probe[i] += 0.0F * size;  // NaN if the size is no number, or infinite
      least[i] = std::max(least[i], size * (1.0F / kMaxByte));
    }
    for (const std::size_t half : {0U, 8U}) {
      for (std::size_t i = half; i < half + 4; ++i) {  // bytes of one pair: coordinates i and i + 4
        const float room = kMaxSum - group.centre[i] - group.centre[i + 4];
        least[i] = std::max(least[i], 2.0F * (product[i] + product[i + 4]) / room);
      }
    }
  }
  float scale = *std::max_element(least.begin(), least.end());
  for (const std::size_t half : {0U, 8U}) {
    const auto total = [&](const Lanes& lanes) { return std::accumulate(&lanes[half], &lanes[half] + 8, 0.0F); };
    scale = std::max(scale, total(sum) / (kMaxSum - 1.0F - total(slack)));
  }
  if (std::accumulate(probe.begin(), probe.end(), 0.0F) != 0.0F || !std::isfinite(scale)) {
    about.scale = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  const float inverse = 1.0F / scale;
  if (!(scale > 0.0F) || !std::isfinite(inverse)) return;  // zero, or next to it
  about.scale = scale;
  Lanes centres{};
  std::array<std::int32_t, kQueryGroup> sums{};
  for (int first = 0; first < form.coded; first += kQueryGroup) {
    const QueryGroup group(form, q, first);
    std::array<std::int32_t, kQueryGroup> byte;
    for (std::size_t i = 0; i < kQueryGroup; ++i) {
      const float nearest = (group.q[i] * inverse + kRounder) - kRounder;
      const float clamped = std::max(std::min(nearest, kMaxByte), -kMaxByte);
      byte[i] = static_cast<std::int32_t>(clamped);
      centres[i] += clamped * group.centre[i];
      sums[i] += byte[i];
    }
    for (std::size_t i = 0; i < 4; ++i) {
      const auto part = [&](std::size_t b) { return static_cast<std::uint32_t>(byte[4 * b + i] & 0xFF) << (8 * b); };
      out[first / 4 + static_cast<int>(i)] = part(0) | part(1) | part(2) | part(3);
    }
  }
  const float even = std::accumulate(centres.begin(), centres.begin() + 8, 0.0F);
  const float odd = std::accumulate(centres.begin() + 8, centres.end(), 0.0F);
  about.centre = even + odd;
  about.even = static_cast<std::int16_t>(std::nearbyint(even));
  about.odd = static_cast<std::int16_t>(std::nearbyint(odd));
  about.even_sum = std::accumulate(sums.begin(), sums.begin() + 8, 0);
  about.odd_sum = std::accumulate(sums.begin() + 8, sums.end(), 0);
}

// Kernels take kTile rows; behind the last cells of a cache there may be no memory.
const std::uint8_t* IntegerTile::whole(const std::uint8_t* row, std::size_t stride, int cells) {
  if (cells == kTile) return row;
  last_.assign(kTile * stride + kCodeSlack, 0);
  std::copy_n(row, size_of(cells) * stride, last_.begin());
  return last_.data();
}

std::vector<Kernels::KeyWord> key_word_plan(const CodeForm& form) {
  std::vector<Kernels::KeyWord> plan(size_of(key_words(form.coded) / 4));
  for (const CodePlane& plane : form.planes) {
    const int begin = static_cast<int>(plane.offset - form.planes.front().offset);
    for (int w = 0; 16 * w < plane.count; ++w) {
      Kernels::KeyWord& word = plan[size_of(w)];
      const auto level = size_of(word.levels++);
      word.at[level] = begin / 4 + w;
      word.shift[level] = 8 * (begin % 4);
      const int bytes = std::min(4, plane.count / 4 - 4 * w);
      word.keep[level] = 0xFFFFFFFFU >> (8 * (4 - bytes));
    }
  }
  return plan;
}

void IntegerTile::load_keys(const Kernels& kernels, const CodeForm& form, std::span<const Kernels::KeyWord> plan,
                            const std::uint8_t* row, std::size_t stride, int cells) {
  row = whole(row, stride, cells);
  kernels.look_up(row + form.gain_offset, stride, form.gain.data(), gain_.data());
  n_words_ = key_words(form.coded);
  plan_ = plan;
  if (form.planes.empty()) return;
  const std::size_t base = form.planes.front().offset;
  const CodePlane& last = form.planes.back();
  const int packed = static_cast<int>(last.offset - base + size_of(last.count) / 4 + 3) / 4;
  words_.reserve(size_of((round_up(packed, 4) + 1) * kTile));  // one more: the last plane may end within a word
  kernels.transpose_words(row + base, stride, packed, words_.data());
}

void IntegerTile::load_values(const Kernels& kernels, const CodeForm& form, const std::uint8_t* row, std::size_t stride,
                              int cells) {
  row = whole(row, stride, cells);
  const std::uint8_t* gains = row + form.gain_offset;
  find_bases(form, gains, stride, kernels.look_up(gains, stride, form.gain.data(), gain_.data()));
  lanes_ = value_lanes(form.coded);
  words_.reserve(size_of(kTile / 4 * (lanes_ + 16)));
  const CodePlane& front = form.planes.front();
  packed_ = form.planes.size() == 1 && front.bits == 2;
  if (packed_) {
    kernels.interleave(row + front.offset, stride, front.count / 4, lanes_, words_.data());
    return;
  }
  const int cols = 4 * lanes_;
  tile_.reserve(size_of(kTile / 4 * cols));
  aligned_.reserve(size_of(kTile / 4 * lanes_));
  largest_ = 0;
  int covered = 0;  // coordinates below it have bits already
  for (const CodePlane& plane : form.planes) {
    const int bytes = plane.count * plane.bits / 8;
    const int ld = round_up(bytes, 16);
    kernels.interleave(row + plane.offset, stride, bytes, ld, words_.data());
    Kernels::Spread how{plane.count / 4, ld, cols, lanes_, plane.bits, plane.shift, plane.first < covered};
    const std::uint32_t* in = words_.data();
    if (plane.bits == 1) {  // a byte holds eight coordinates: two lanes of four
      how.ldi = lanes_;
      for (int t = 0; t < kTile / 4; ++t) {
        for (int i = 0; i < bytes; ++i) {
          const std::uint32_t word = words_.data()[t * ld + i];
          aligned_.data()[t * lanes_ + 2 * i] = word;
          aligned_.data()[t * lanes_ + 2 * i + 1] = word >> 4;
        }
      }
      in = aligned_.data();
    }
    kernels.spread(in, how, tile_.data() + plane.first / 4);
    covered = std::max(covered, plane.first + plane.count);
    largest_ |= ((1 << plane.bits) - 1) << plane.shift;
  }
}

void IntegerTile::score(const Kernels& kernels, const std::uint32_t* q, const IntegerQuery* query, int rows, bool add,
                        float* s) {
  const auto plan_words = static_cast<int>(plan_.size());
  if (kernels.packed_key_scores != nullptr && rows <= kFewRows) {
    kernels.packed_key_scores(q, n_words_, query, rows, words_.data(), plan_.data(), plan_words, gain_.data(), add, s);
    return;
  }
  tile_.reserve(size_of(n_words_ * kTile));
  kernels.unpack_keys(words_.data(), plan_.data(), plan_words, tile_.data());
  kernels.key_scores(q, n_words_, query, rows, n_words_, tile_.data(), gain_.data(), add, s);
}

void IntegerTile::add_values(const Kernels& kernels, const float* p, int rows, float* sums, double* weight,
                             std::ptrdiff_t weight_stride) {
  start_weights(rows);
  alignas(64) std::array<float, kTile> gain;
  for (int b = 0; b < bases_; ++b) {
    if ((bases_used_ >> b & 1U) == 0) continue;
    const bool all = one_basis();
    for (std::size_t j = 0; j < gain.size(); ++j) gain[j] = all || basis_[j] == b ? gain_[j] : 0.0F;
    for (int r = 0; r < rows; ++r) {
      std::int32_t total = 0;
      const float scale = kernels.quantise_weights(p + r * kTile, gain.data(), weights_.data() + r * kTile, &total);
      scales_[size_of(r)] = scale;
      weight[r * weight_stride + b] += static_cast<double>(scale) * total;
    }
    add_basis(kernels, b, rows, sums);
  }
}

void IntegerTile::start_weights(int rows) {
  weights_.resize(size_of(rows * kTile));
  scales_.resize(size_of(rows));
}

float IntegerTile::weigh(const Kernels& kernels, int r, const float* s, float max, double* weight) {
  std::int32_t total = 0;
  float& scale = scales_[size_of(r)];
  const float sum = kernels.weigh(s, max, gain_.data(), weights_.data() + r * kTile, &scale, &total);
  weight[std::countr_zero(bases_used_)] += static_cast<double>(scale) * total;
  return sum;
}

void IntegerTile::weigh_nothing(int r) {
  scales_[size_of(r)] = 0.0F;
  std::fill_n(weights_.begin() + r * kTile, kTile, std::uint8_t{0});
}

void IntegerTile::add_weighed(const Kernels& kernels, int rows, float* sums) {
  add_basis(kernels, std::countr_zero(bases_used_), rows, sums);
}

void IntegerTile::add_basis(const Kernels& kernels, int b, int rows, float* sums) {
  const int cols = 4 * lanes_;
  float* to = sums + b * cols;
  if (packed_ && kernels.packed_value_sums != nullptr && rows <= kFewRows) {
    kernels.packed_value_sums(weights_.data(), scales_.data(), rows, words_.data(), lanes_, to, bases_ * cols);
    return;
  }
  if (packed_) {
    tile_.reserve(size_of(kTile / 4 * cols));
    kernels.spread(words_.data(), {lanes_, lanes_, cols, lanes_, 2, 0, false}, tile_.data());
    largest_ = 3;
    packed_ = false;
  }
  kernels.value_sums(weights_.data(), scales_.data(), rows, tile_.data(), cols, largest_, to, bases_ * cols);
}

// A tile of a sequence whose positions were never shifted has rows of one basis only. `bits`: what look_up() said about the
// gains.
void IntegerTile::find_bases(const CodeForm& form, const std::uint8_t* gains, std::size_t stride, std::uint32_t bits) {
  bases_ = form.bases;
  bases_used_ = 1;
  if (bases_ == 1) return;
  const std::uint32_t both = (bits & 0xFFU) >> form.basis_shift;
  if (both == bits >> 8 >> form.basis_shift) {
    bases_used_ = 1U << both;
    return;
  }
  bases_used_ = 0;
  for (std::size_t j = 0; j < basis_.size(); ++j) {
    const unsigned byte = gains[j * stride];
    basis_[j] = static_cast<std::uint8_t>(byte >> form.basis_shift);
    if (byte != 0) bases_used_ |= 1U << basis_[j];  // rows of nothing are in none
  }
}

void sums_to_basis(const CodeForm& form, const float* sums, double weight, double factor, std::span<float> out) {
  const int lanes = value_lanes(form.coded);
  const auto weights = static_cast<float>(weight);
  const auto scale = static_cast<float>(factor);
  for (int d = 0; d < form.coded; d += 4) {
    for (int f = 0; f < 4; ++f) {
      const auto at = size_of(d + f);
      out[at] = scale * form.unit[at] * (sums[f * lanes + d / 4] - form.centre[at] * weights);
    }
  }
  std::fill(out.begin() + form.coded, out.end(), 0.0F);
}

}  // namespace oscar::attention
