#include "attention/key_mean.h"

#include <Eigen/QR>
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "oscar/base/matrix.h"

namespace oscar::attention {
namespace {

constexpr int kHalf = kTile / 2;

std::size_t size_of(int n) { return static_cast<std::size_t>(n); }

// Chebyshev polynomials over the second half of a tile, its middle at 0: kLane even ones, or the kLane odd ones.
MatrixD chebyshev(bool odd) {
  MatrixD t(kHalf, 2 * kLane);
  for (int j = 0; j < kHalf; ++j) {
    const double x = (j + 0.5) / (kHalf - 0.5);
    for (int k = 0; k < 2 * kLane; ++k) t(j, k) = (k == 0) ? 1.0 : (k == 1) ? x : 2.0 * x * t(j, k - 1) - t(j, k - 2);
  }
  return t(Eigen::all, Eigen::seqN(odd ? 1 : 0, kLane, 2));
}

// Several sums, which do not wait for each other.
float dot(const float* a, const std::vector<float>& b) {
  std::array<float, kLane> sums{};
  std::size_t d = 0;
  for (; d + kLane <= b.size(); d += kLane) {
    for (std::size_t i = 0; i < kLane; ++i) sums[i] += a[d + i] * b[d + i];
  }
  for (std::size_t i = 0; d < b.size(); ++d, ++i) sums[i] += a[d] * b[d];
  return std::accumulate(sums.begin(), sums.end(), 0.0F);
}

}  // namespace

RopeTable::RopeTable(std::span<const double> theta)
    : theta_(theta.begin(), theta.end()),
      order_(theta.size()),
      padded_pairs_(round_up(static_cast<int>(theta.size()), kPanel)) {
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(),
                   [&](int a, int b) { return std::abs(theta_[size_of(a)]) > std::abs(theta_[size_of(b)]); });
  make_phases();
  make_basis();
}

void RopeTable::make_phases() {
  phases_.reserve(size_of(kDigits * kRadix * 2 * padded_pairs_));
  float* row = phases_.data();
  std::int64_t unit = 1;
  for (int digit = 0; digit < kDigits; ++digit, unit *= kRadix) {
    for (int value = 0; value < kRadix; ++value, row += 2 * padded_pairs_) {
      const auto t = static_cast<double>(unit * value);
      for (int i = 0; i < n_pairs(); ++i) {
        row[i] = static_cast<float>(std::cos(t * theta(i)));
        row[padded_pairs_ + i] = static_cast<float>(std::sin(t * theta(i)));
      }
    }
  }
  to_middle_.reserve(size_of(2 * padded_pairs_));
  for (int i = 0; i < n_pairs(); ++i) {
    to_middle_.data()[i] = static_cast<float>(std::cos((kHalf - 0.5) * theta(i)));
    to_middle_.data()[padded_pairs_ + i] = static_cast<float>(std::sin((kHalf - 0.5) * theta(i)));
  }
}

void RopeTable::make_basis() {
  const std::array<MatrixD, 2> polynomials{chebyshev(false), chebyshev(true)};
  const std::array<Eigen::HouseholderQR<MatrixD>, 2> solver{Eigen::HouseholderQR<MatrixD>(polynomials[0]),
                                                            Eigen::HouseholderQR<MatrixD>(polynomials[1])};
  MatrixD wave(kHalf, 1);  // what Re w or Im w of a pair is multiplied with, and its polynomials
  MatrixD fit(kLane, 1);
  const auto find = [&](std::size_t part, int i) {
    for (int j = 0; j < kHalf; ++j) wave(j) = (part == 0) ? std::cos((j + 0.5) * theta(i)) : -std::sin((j + 0.5) * theta(i));
    fit = solver[part].solve(wave);
    return (polynomials[part] * fit - wave).cwiseAbs().maxCoeff() <= kFitError;
  };
  while (n_fast_ < n_pairs() && !(find(0, n_fast_) && find(1, n_fast_))) ++n_fast_;
  if (n_pairs() - n_fast_ <= kLane) n_fast_ = n_pairs();  // no fewer functions with polynomials
  const int slow = n_pairs() - n_fast_;
  slow_.reserve(size_of(2 * slow * kLane));
  basis_.reserve(size_of(2 * depth() * kHalf));
  float* coefficient = slow_.data();
  float* value = basis_.data();
  for (const std::size_t part : {0U, 1U}) {
    for (int i = 0; i < n_pairs(); ++i) {
      (void)find(part, i);
      if (i < n_fast_) {
        for (int j = 0; j < kHalf; ++j) *value++ = static_cast<float>(wave(j));
      } else {
        for (int k = 0; k < kLane; ++k) *coefficient++ = static_cast<float>(fit(k));
      }
    }
    for (int k = 0; k < depth() - n_fast_; ++k) {
      for (int j = 0; j < kHalf; ++j) *value++ = static_cast<float>(polynomials[part](j, k));
    }
  }
}

bool RopeTable::same_angles(std::span<const double> theta) const {
  return std::equal(theta.begin(), theta.end(), theta_.begin(), theta_.end());
}

void RopeTable::phase(const Kernels& kernels, std::int64_t t, float* out) const {
  const auto entry = [&](int digit, std::int64_t value) {
    return phases_.data() + (digit * kRadix + value) * 2 * padded_pairs_;
  };
  std::copy_n(entry(0, t % kRadix), 2 * padded_pairs_, out);
  int digit = 1;
  for (t /= kRadix; t != 0; t /= kRadix, ++digit) {
    if (t % kRadix != 0) kernels.complex_multiply(out, 1, entry(digit, t % kRadix), padded_pairs_, out);
  }
}

void RopeTable::logits(const Kernels& kernels, float* w, const float* constant, int rows, float* s) const {
  const int ld = 2 * padded_pairs_;
  if (has_slow()) {
    // Polynomials take the places of the first slow pairs.
    kernels.project(w + n_fast_, ld, padded_pairs_, rows, n_pairs() - n_fast_, slow_.data());
    for (int r = 0; r < rows; ++r) w[r * ld + n_fast_] += constant[r];
  }
  kernels.mirrored_multiply(w, ld, padded_pairs_, rows, depth(), basis_.data(), s);
  if (has_slow()) return;
  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < kTile; ++j) s[r * kTile + j] += constant[r];
  }
}

HeadMean::HeadMean(const KeyMean& key_mean, const RopeTable* rope_table, int head_dim) {
  constant.assign(size_of(head_dim), 0.0F);
  if (!key_mean.offset.empty()) std::copy(key_mean.offset.begin(), key_mean.offset.end(), constant.begin());
  if (!key_mean.pre_rope.empty()) {
    table = rope_table;
    const RopeParams& p = key_mean.rope->params();
    const int n = table->n_pairs();
    const int padded = table->padded_pairs();
    mean.reserve(size_of(2 * padded));
    for (const int i : table->order()) {
      const auto at = [&](int d) {
        return static_cast<float>(static_cast<double>(key_mean.pre_rope[size_of(d)]) * key_mean.rope->magnitude());
      };
      const std::size_t pair = first.size();
      first.push_back(p.pairing == RopePairing::norm ? 2 * i : i);
      second.push_back(p.pairing == RopePairing::norm ? 2 * i + 1 : i + n);
      const float re = at(first.back());
      const float im = at(second.back());
      const float* turn = table->to_middle() + pair;
      mean.data()[pair] = re * turn[0] - im * turn[padded];
      mean.data()[size_of(padded) + pair] = re * turn[padded] + im * turn[0];
    }
    for (int d = 2 * n; d < head_dim; ++d) constant[size_of(d)] += key_mean.pre_rope[size_of(d)];
  }
  if (std::all_of(constant.begin(), constant.end(), [](float x) { return x == 0.0F; })) constant.clear();
}

void TilePositions::find_run() {
  run_start = -1;
  for (int j = kTile - 1; j >= 0; --j) {
    if (at[size_of(j)] >= 0) run_start = std::int64_t{at[size_of(j)]} - j;
  }
  for (int j = 0; j < kTile; ++j) {
    if (at[size_of(j)] >= 0 && at[size_of(j)] != run_start + j) run_start = -1;
  }
}

void MeanTerm::start(const Kernels& kernels, const HeadMean& mean, const float* q, std::int64_t ldq, int rows) {
  mean_ = &mean;
  rows_ = 0;
  if (mean.table == nullptr && mean.constant.empty()) return;
  rows_ = rows;
  constant_.resize(size_of(rows));
  for (int r = 0; r < rows; ++r) constant_[size_of(r)] = dot(q + r * ldq, mean.constant);
  if (mean.table == nullptr) return;
  const int padded = mean.table->padded_pairs();
  const std::size_t n = mean.first.size();
  w_.reserve(size_of(rows * 2 * padded));
  for (int r = 0; r < rows; ++r, q += ldq) {
    float* re = w_.data() + r * 2 * padded;
    float* im = re + padded;
    for (std::size_t i = 0; i < n; ++i) re[i] = q[mean.first[i]];
    for (std::size_t i = 0; i < n; ++i) im[i] = -q[mean.second[i]];
    std::fill(re + n, im, 0.0F);
    std::fill(im + n, im + padded, 0.0F);
  }
  kernels.complex_multiply(w_.data(), rows, mean.mean.data(), padded, w_.data());
}

const float* TilePhase::at(const Kernels& kernels, const RopeTable& of, std::int64_t position) {
  if (table != &of || t != position) {
    table = &of;
    t = position;
    row.reserve(size_of(2 * of.padded_pairs()));
    of.phase(kernels, position, row.data());
  }
  return row.data();
}

void MeanTerm::logits(const Kernels& kernels, const TilePositions& positions, TilePhase& phase, float* s) const {
  if (mean_->table != nullptr && positions.run_start >= 0) {
    const RopeTable& table = *mean_->table;
    phase.turned.reserve(size_of(rows_ * 2 * table.padded_pairs()));
    kernels.complex_multiply(w_.data(), rows_, phase.at(kernels, table, positions.run_start), table.padded_pairs(),
                             phase.turned.data());
    table.logits(kernels, phase.turned.data(), constant_.data(), rows_, s);
    return;
  }
  if (mean_->table == nullptr) {
    std::fill_n(s, rows_ * kTile, 0.0F);
  } else {
    scattered(kernels, positions, phase, s);
  }
  if (mean_->constant.empty()) return;
  for (int r = 0; r < rows_; ++r) {
    for (int j = 0; j < kTile; ++j) s[r * kTile + j] += constant_[size_of(r)];
  }
}

// Tokens whose positions do not follow each other.
void MeanTerm::scattered(const Kernels& kernels, const TilePositions& positions, TilePhase& phase, float* s) const {
  const RopeTable& table = *mean_->table;
  const int ld = 2 * table.padded_pairs();
  phase.rows.reserve(size_of(kTile * ld));
  for (int j = 0; j < kTile; ++j) {
    float* row = phase.rows.data() + j * ld;
    if (positions.at[size_of(j)] >= 0) {
      table.phase(kernels, positions.at[size_of(j)], row);
    } else {
      std::fill_n(row, ld, 0.0F);
    }
  }
  // Re(w phase) is the dot product with conj(w).
  const int half = table.padded_pairs();
  phase.turned.reserve(size_of(rows_ * ld));
  for (int r = 0; r < rows_; ++r) {
    const float* w = w_.data() + r * ld;
    float* conjugate = phase.turned.data() + r * ld;
    for (int i = 0; i < half; ++i) conjugate[i] = w[i];
    for (int i = half; i < ld; ++i) conjugate[i] = -w[i];
  }
  kernels.complex_multiply(phase.turned.data(), rows_, table.to_middle(), half,
                           phase.turned.data());  // back to the tile's first
  kernels.dots(phase.turned.data(), ld, rows_, phase.rows.data(), ld, ld, s);
}

}  // namespace oscar::attention
