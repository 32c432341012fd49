#include "oscar/method/importance.h"

#include <algorithm>
#include <cmath>

#include "oscar/base/error.h"

namespace oscar {
namespace {

std::size_t size_of(std::int64_t n) { return static_cast<std::size_t>(n); }

std::uint64_t mixed_bits(std::uint64_t x) {  // splitmix64's finaliser
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

}  // namespace

int position_mix_index(std::int64_t position, int copy) {
  return static_cast<int>(mixed_bits(static_cast<std::uint64_t>(2 * position + copy)) % kMixOffsets);
}

std::int32_t position_mix_offset(std::int64_t position, int copy) {
  return position_mix_index(position, copy) * kMixOffsetStep;
}

void thin_samples(HeadImportance& head, std::int64_t keep) {
  const auto have = static_cast<std::int64_t>(head.sample_positions.size());
  if (keep >= have) return;
  const std::size_t dim = head.sample_keys.size() / size_of(have);
  for (std::int64_t i = 0; i < keep; ++i) {
    const std::size_t from = size_of(i * have / keep);
    std::copy_n(head.sample_keys.begin() + static_cast<std::ptrdiff_t>(from * dim), dim,
                head.sample_keys.begin() + static_cast<std::ptrdiff_t>(size_of(i) * dim));
    head.sample_weights[size_of(i)] = head.sample_weights[from];
    head.sample_positions[size_of(i)] = head.sample_positions[from];
  }
  head.sample_keys.resize(size_of(keep) * dim);
  head.sample_weights.resize(size_of(keep));
  head.sample_positions.resize(size_of(keep));
}

KeyCovariance covariance(const HeadImportance& head, const Rope& rope, const VectorD& pre_rope_mean) {
  const Eigen::Index dim = head.metric.rows();
  const auto pairs = static_cast<Eigen::Index>(rope.theta().size());
  const Eigen::Index one = dim + 2 * pairs;
  // x = a L: the key minus the turned mean, which is linear in the sines.
  MatrixD l = MatrixD::Zero(head.joint.rows(), dim);
  l.topRows(dim).setIdentity();
  std::vector<bool> turns(size_of(dim), false);
  for (Eigen::Index pair = 0; pair < pairs; ++pair) {
    const auto first = static_cast<Eigen::Index>(rope.first_of(size_of(pair)));
    const auto second = static_cast<Eigen::Index>(rope.second_of(size_of(pair)));
    l(dim + pair, first) = -pre_rope_mean[first];
    l(dim + pairs + pair, first) = pre_rope_mean[second];
    l(dim + pair, second) = -pre_rope_mean[second];
    l(dim + pairs + pair, second) = -pre_rope_mean[first];
    turns[size_of(first)] = turns[size_of(second)] = true;
  }
  for (Eigen::Index d = 0; d < dim; ++d) {
    if (!turns[size_of(d)]) l(one, d) = -pre_rope_mean[d];
  }
  const double weight = head.joint(one, one);
  KeyCovariance result{VectorD::Zero(dim), MatrixD::Zero(dim, dim)};
  if (!(weight > 0)) return result;
  const MatrixD second_moment = l.transpose() * head.joint * l / weight;
  result.mean = head.joint.row(one) * l / weight;
  result.covariance = second_moment - result.mean.transpose() * result.mean;
  return result;
}

void merge(HeadImportance& a, const HeadImportance& b) {
  if (a.metric.rows() != b.metric.rows() || a.joint.rows() != b.joint.rows())
    fail("importance of different layers cannot be merged");
  const auto have_a = static_cast<double>(a.sample_positions.size());
  const auto have_b = static_cast<double>(b.sample_positions.size());
  const auto tokens_a = static_cast<double>(a.tokens);
  const auto tokens_b = static_cast<double>(b.tokens);
  HeadImportance more = b;
  if (tokens_a > 0 && tokens_b > 0) {
    const double density = std::min({have_a / tokens_a, have_b / tokens_b, std::max(have_a, have_b) / (tokens_a + tokens_b)});
    thin_samples(a, static_cast<std::int64_t>(std::round(density * tokens_a)));
    thin_samples(more, static_cast<std::int64_t>(std::round(density * tokens_b)));
  }
  a.metric += b.metric;
  a.joint += b.joint;
  a.pair_weight += b.pair_weight;
  a.output_energy += b.output_energy;
  a.tokens += b.tokens;
  a.sample_keys.insert(a.sample_keys.end(), more.sample_keys.begin(), more.sample_keys.end());
  a.sample_weights.insert(a.sample_weights.end(), more.sample_weights.begin(), more.sample_weights.end());
  a.sample_positions.insert(a.sample_positions.end(), more.sample_positions.begin(), more.sample_positions.end());
}

}  // namespace oscar
