#include "attention/integer_codes.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace oscar::attention {
namespace {

std::size_t size_of(int n) { return static_cast<std::size_t>(n); }

constexpr float kMaxByte = 127.0F;
constexpr float kMaxSum = 32767.0F;
constexpr float kRounder = 0x1.8p23F;  // added to a small number it leaves the nearest integer

}  // namespace

void integer_query(const CodeForm& form, const float* q, std::uint32_t* out, IntegerQuery& about) {
  const int coded = form.coded;
  std::fill_n(out, key_words(coded), 0U);
  about = {};
  // The scale is the smallest that keeps bytes in range, the centred sums over either half of the words in 16 bits, and the
  // product of a byte pair too. Rounding adds up to 1/2 per byte to a sum.
  std::array<float, 2> sum{}, slack{};
  float scale = 0.0F;
  bool finite = true;
  for (int d = 0; d < coded; ++d) {
    const float size = std::abs(q[d]);
    finite = finite && std::isfinite(size);
    const std::size_t half = size_of(d / 8 % 2);
    const float centre = form.centre[size_of(d)];
    sum[half] += size * centre;
    slack[half] += 0.5F * centre;
    scale = std::max(scale, size / kMaxByte);
    if (d % 8 < 4 && d + 4 < coded) {  // bytes of one pair: coordinates d and d + 4
      const float other = form.centre[size_of(d) + 4];
      scale = std::max(scale, (2.0F * size * centre + 2.0F * std::abs(q[d + 4]) * other) / (kMaxSum - centre - other));
    }
  }
  for (std::size_t half = 0; half < 2; ++half) scale = std::max(scale, sum[half] / (kMaxSum - 1.0F - slack[half]));
  if (!finite || !std::isfinite(scale)) {
    about.scale = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  const float inverse = 1.0F / scale;
  if (!(scale > 0.0F) || !std::isfinite(inverse)) return;  // zero, or next to it
  about.scale = scale;
  std::array<float, 2> centres{};
  std::array<std::int32_t, 2> sums{};
  for (int d = 0; d < coded; ++d) {
    const float nearest = (q[d] * inverse + kRounder) - kRounder;
    const int byte = static_cast<int>(std::clamp(nearest, -kMaxByte, kMaxByte));
    out[4 * (d / 16) + d % 4] |= static_cast<std::uint32_t>(byte & 0xFF) << (8 * (d / 4 % 4));
    centres[size_of(d / 8 % 2)] += static_cast<float>(byte) * form.centre[size_of(d)];
    sums[size_of(d / 8 % 2)] += byte;
  }
  about.centre = centres[0] + centres[1];
  about.even = static_cast<std::int16_t>(std::nearbyint(centres[0]));
  about.odd = static_cast<std::int16_t>(std::nearbyint(centres[1]));
  about.even_sum = sums[0];
  about.odd_sum = sums[1];
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
