#include "attention/key_mean.h"

#include <algorithm>
#include <cassert>
#include <cmath>

namespace oscar::attention {
namespace {

// row *= factor, both [2 * n]: real, then imaginary parts.
void turn(std::span<double> row, const double* factor) {
  const std::size_t n = row.size() / 2;
  for (std::size_t i = 0; i < n; ++i) {
    const double re = row[i] * factor[i] - row[n + i] * factor[n + i];
    row[n + i] = row[i] * factor[n + i] + row[n + i] * factor[i];
    row[i] = re;
  }
}

}  // namespace

RopeTable::RopeTable(std::span<const double> theta)
    : theta_(theta.begin(), theta.end()),
      n_pairs_(static_cast<int>(theta.size())),
      padded_pairs_(round_up(static_cast<int>(theta.size()), kLane)) {
  fine_.reserve(static_cast<std::size_t>(kRadix * 2 * padded_pairs_));
  for (int t = 0; t < kRadix; ++t) {
    float* row = fine_.data() + t * 2 * padded_pairs_;
    for (int i = 0; i < n_pairs_; ++i) {
      const double angle = t * theta[static_cast<std::size_t>(i)];
      row[i] = static_cast<float>(std::cos(angle));
      row[padded_pairs_ + i] = static_cast<float>(std::sin(angle));
    }
  }
  std::int64_t unit = kRadix;
  for (int digit = 1; digit < kDigits; ++digit, unit *= kRadix) {
    for (int value = 0; value < kRadix; ++value) {
      const auto t = static_cast<double>(unit * value);
      for (const double angle : theta) coarse_.push_back(std::cos(t * angle));
      for (const double angle : theta) coarse_.push_back(std::sin(t * angle));
    }
  }
}

bool RopeTable::same_angles(std::span<const double> theta) const {
  return std::equal(theta.begin(), theta.end(), theta_.begin(), theta_.end());
}

void RopeTable::turn_coarse(std::int64_t t, std::span<double> row) const {
  assert(t >= 0 && row.size() == 2 * theta_.size());
  std::int64_t rest = t / kRadix;
  const double* table = coarse_.data();
  for (int digit = 1; digit < kDigits && rest != 0; ++digit, rest /= kRadix, table += kRadix * 2 * n_pairs_) {
    if (rest % kRadix != 0) turn(row, table + (rest % kRadix) * 2 * n_pairs_);
  }
}

HeadMean::HeadMean(const KeyMean& mean, const RopeTable* rope_table, int head_dim) {
  constant.assign(static_cast<std::size_t>(head_dim), 0.0F);
  if (!mean.offset.empty()) std::copy(mean.offset.begin(), mean.offset.end(), constant.begin());
  if (!mean.pre_rope.empty()) {
    table = rope_table;
    const RopeParams& p = mean.rope->params();
    const int n = table->n_pairs();
    rotated.resize(static_cast<std::size_t>(2 * n));
    for (int i = 0; i < n; ++i) {
      first.push_back(p.pairing == RopePairing::norm ? 2 * i : i);
      second.push_back(p.pairing == RopePairing::norm ? 2 * i + 1 : i + n);
      const auto at = [&](int d) {
        return static_cast<double>(mean.pre_rope[static_cast<std::size_t>(d)]) * mean.rope->magnitude();
      };
      rotated[static_cast<std::size_t>(i)] = at(first.back());
      rotated[static_cast<std::size_t>(n + i)] = at(second.back());
    }
    for (int d = 2 * n; d < head_dim; ++d) constant[static_cast<std::size_t>(d)] += mean.pre_rope[static_cast<std::size_t>(d)];
  }
  if (std::all_of(constant.begin(), constant.end(), [](float x) { return x == 0.0F; })) constant.clear();
}

void HeadMean::reorder_query(std::span<const float> q, float* out) const {
  if (table == nullptr) return;
  std::fill_n(out, row_size(), 0.0F);
  for (std::size_t i = 0; i < first.size(); ++i) {
    out[i] = q[static_cast<std::size_t>(first[i])];
    out[static_cast<std::size_t>(table->padded_pairs()) + i] = q[static_cast<std::size_t>(second[i])];
  }
}

float HeadMean::constant_logit(std::span<const float> q) const {
  double sum = 0.0;
  for (std::size_t d = 0; d < constant.size(); ++d) sum += static_cast<double>(q[d]) * static_cast<double>(constant[d]);
  return static_cast<float>(sum);
}

void MeanRows::start(const HeadMean* head) {
  head_ = head;
  block_ = -1;
  // Fresh memory every time: its padding must be 0 whatever size the last head had.
  coarse_ = FloatBuffer();
  coarse_.reserve(static_cast<std::size_t>(head->row_size()));
}

void MeanRows::fill(const Kernels& kernels, std::int64_t t, float* out) {
  const RopeTable& table = *head_->table;
  const int padded = table.padded_pairs();
  if (t / RopeTable::kRadix != block_) {
    block_ = t / RopeTable::kRadix;
    exact_.assign(head_->rotated.begin(), head_->rotated.end());
    table.turn_coarse(t, exact_);
    for (int i = 0; i < table.n_pairs(); ++i) {
      coarse_.data()[i] = static_cast<float>(exact_[static_cast<std::size_t>(i)]);
      coarse_.data()[padded + i] = static_cast<float>(exact_[static_cast<std::size_t>(table.n_pairs() + i)]);
    }
  }
  kernels.complex_multiply(coarse_.data(), table.fine(t), padded, out);
}

}  // namespace oscar::attention
