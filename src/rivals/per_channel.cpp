// Methods that quantise a channel of K over consecutive tokens, and their values.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "rivals/grids.h"
#include "rivals/simulation.h"

namespace oscar::rival {
namespace {

// Calls `quantize` with the [tokens, head_dim] block of each head.
Simulation per_head(int tokens, Shape shape, std::function<void(MatrixF&)> quantize) {
  return {tokens, false, [shape, quantize = std::move(quantize)](MatrixF& rows) {
            for (int h = 0; h < shape.n_head_kv; ++h) {
              MatrixF head = rows.middleCols(h * shape.head_dim, shape.head_dim);
              quantize(head);
              rows.middleCols(h * shape.head_dim, shape.head_dim) = head;
            }
          }};
}

std::vector<float> column(const MatrixF& m, Eigen::Index c) {
  const VectorF copy = m.col(c).transpose();
  return {copy.data(), copy.data() + copy.size()};
}

void min_max_channel(MatrixF& head, Eigen::Index channel, int bits) {
  std::vector<float> x = column(head, channel);
  min_max(x, bits);
  head.col(channel) = Eigen::Map<const VectorF>(x.data(), head.rows()).transpose();
}

// Indices of the `count` largest scores; of equal ones, the first.
std::vector<Eigen::Index> largest(const VectorF& scores, int count) {
  std::vector<Eigen::Index> order(static_cast<std::size_t>(scores.size()));
  std::iota(order.begin(), order.end(), Eigen::Index{0});
  std::stable_sort(order.begin(), order.end(), [&](Eigen::Index a, Eigen::Index b) { return scores[a] > scores[b]; });
  order.resize(std::min(order.size(), static_cast<std::size_t>(count)));
  return order;
}

Simulation values_per_token(Shape shape, int group) {
  return per_token(shape.head_dim, {}, [group](std::span<float> x) { min_max_groups(x, group, 2); });
}

// Scales that make the standard deviations of all rows and of all columns of a tile alike: alternating divisions by them,
// in the logarithm and bounded as in the released KVarN code; of all passes the most even one counts.
class Balance {
 public:
  explicit Balance(const MatrixD& tile) : row_(VectorD::Zero(tile.rows())), column_(VectorD::Zero(tile.cols())) {
    keep(unevenness(tile));
    for (int pass = 0; pass < kPasses; ++pass) {
      step(deviations(balanced(tile)), column_);
      step(deviations(balanced(tile).transpose()), row_);
      const double now = unevenness(balanced(tile));
      if (now <= best_) keep(now);
    }
  }
  [[nodiscard]] VectorD row() const { return best_row_.array().exp(); }
  [[nodiscard]] VectorD column() const { return best_column_.array().exp(); }

 private:
  static constexpr int kPasses = 16;
  static constexpr double kLeastDeviation = 1e-3, kMostDeviation = 1e3;
  static constexpr double kLeastLog = -0.3, kMostLog = 10.0;

  [[nodiscard]] MatrixD balanced(const MatrixD& tile) const {
    const VectorD rows = (-row_.array()).exp();
    const VectorD columns = (-column_.array()).exp();
    return rows.asDiagonal() * tile * columns.asDiagonal();
  }
  // Of each column, about its mean, unbiased.
  static VectorD deviations(const MatrixD& m) {
    const MatrixD centred = m.rowwise() - m.colwise().mean();
    return (centred.colwise().squaredNorm() / std::max(1.0, static_cast<double>(m.rows() - 1))).cwiseSqrt();
  }
  static double unevenness(const MatrixD& m) {
    const auto ratio = [](const VectorD& d) { return d.maxCoeff() / std::max(d.minCoeff(), 1e-8); };
    return ratio(deviations(m)) + ratio(deviations(m.transpose()));
  }
  static void step(const VectorD& deviation, VectorD& log_scale) {
    log_scale.array() += deviation.array().max(kLeastDeviation).min(kMostDeviation).log();
    log_scale = log_scale.cwiseMax(kLeastLog).cwiseMin(kMostLog);
  }
  void keep(double unevenness) {
    best_ = unevenness;
    best_row_ = row_;
    best_column_ = column_;
  }

  VectorD row_, column_, best_row_, best_column_;  // logarithms
  double best_ = 0.0;
};

// One head's page: every row of `tile` gets its own grid after balancing, whose step and offset carry the row's scale.
void kvarn_tile(MatrixD& tile, int bits) {
  const Balance balance(tile);
  const VectorD row = balance.row();
  const VectorD scale = balance.column();
  const double most = (1 << bits) - 1;
  for (Eigen::Index r = 0; r < tile.rows(); ++r) {
    const VectorD y = tile.row(r).array() / (row[r] * scale.array());
    const double lo = y.minCoeff();
    const double step = std::max((y.maxCoeff() - lo) / most, 1e-10);
    const auto stored_step = static_cast<double>(round_half(static_cast<float>(row[r] * step)));
    const auto stored_lo = static_cast<double>(round_half(static_cast<float>(row[r] * lo)));
    for (Eigen::Index c = 0; c < tile.cols(); ++c) {
      const double code = std::clamp(std::nearbyint((y[c] - lo) / step), 0.0, most);
      tile(r, c) = (stored_lo + stored_step * code) * static_cast<double>(round_half(static_cast<float>(scale[c])));
    }
  }
}

}  // namespace

int kitty_boosted_channels(int head_dim) { return std::max(1, head_dim / 8); }

Simulation kivi(bool is_k, Shape shape, int group) {
  if (!is_k) return values_per_token(shape, group);
  return per_head(group, shape, [](MatrixF& head) {
    for (Eigen::Index c = 0; c < head.cols(); ++c) min_max_channel(head, c, 2);
  });
}

Simulation ott(bool is_k, Shape shape) {
  if (!is_k) return values_per_token(shape, kPage);
  return per_head(kPage, shape, [](MatrixF& head) {
    const VectorF smallness = -head.cwiseAbs().rowwise().sum().transpose();
    const std::vector<Eigen::Index> outliers = largest(smallness, kOttOutliers);
    const MatrixF before = head;
    for (Eigen::Index c = 0; c < head.cols(); ++c) {
      // In the quantised page an outlier's place holds the mean of the others, which leaves their range alone.
      const float sum = std::accumulate(outliers.begin(), outliers.end(), before.col(c).sum(),
                                        [&](float rest, Eigen::Index t) { return rest - before(t, c); });
      const auto others = static_cast<float>(head.rows() - static_cast<Eigen::Index>(outliers.size()));
      for (const Eigen::Index t : outliers) head(t, c) = sum / others;
      min_max_channel(head, c, 2);
    }
    for (const Eigen::Index t : outliers) head.row(t) = before.row(t).unaryExpr(&round_half);
  });
}

Simulation kitty(bool is_k, Shape shape) {
  if (!is_k) return values_per_token(shape, shape.head_dim);
  return per_head(kPage, shape, [](MatrixF& head) {
    const VectorF magnitude = head.cwiseAbs().colwise().sum();
    std::vector<int> bits(static_cast<std::size_t>(head.cols()), 2);
    for (const Eigen::Index c : largest(magnitude, kitty_boosted_channels(static_cast<int>(head.cols()))))
      bits[static_cast<std::size_t>(c)] = 4;
    for (Eigen::Index c = 0; c < head.cols(); ++c) min_max_channel(head, c, bits[static_cast<std::size_t>(c)]);
  });
}

Simulation kvarn(bool is_k, Shape shape, int k_bits) {
  const MatrixD rotation = hadamard_blocks(shape.head_dim, kPage).cast<double>();
  return per_head(kPage, shape, [is_k, k_bits, rotation](MatrixF& head) {
    // K: one grid per channel. V: one per token.
    const MatrixD rotated = head.cast<double>() * rotation;
    MatrixD tile = is_k ? MatrixD(rotated.transpose()) : rotated;
    kvarn_tile(tile, is_k ? k_bits : 2);
    const MatrixD back = is_k ? MatrixD(tile.transpose()) : tile;
    head = (back * rotation.transpose()).cast<float>();
  });
}

}  // namespace oscar::rival
