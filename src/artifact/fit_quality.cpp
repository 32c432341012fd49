#include "fit_quality.h"

#include <algorithm>

#include "fit_rotation.h"
#include "oscar/base/half.h"
#include "oscar/method/rotation.h"

namespace oscar {
namespace {

double ratio(double part, double whole) { return whole > 0.0 ? part / whole : 0.0; }

double energy(const MatrixF& rows, const MatrixD& metric) {
  const MatrixD e = rows.cast<double>();
  return (e * metric).cwiseProduct(e).sum();
}

// Decoded rows of all heads, one matrix [n, D] per head.
std::vector<MatrixF> round_trip(const Codec& codec, const std::vector<const MatrixF*>& rows,
                                const std::vector<std::int32_t>& positions) {
  const auto heads = static_cast<std::size_t>(codec.n_head_kv());
  const auto dim = static_cast<std::size_t>(codec.head_dim());
  std::vector<MatrixF> decoded;
  decoded.reserve(rows.size());
  for (const MatrixF* head : rows) decoded.emplace_back(head->rows(), head->cols());
  std::vector<float> row(heads * dim);
  std::vector<std::uint8_t> code(codec.row_bytes());
  EncodeStats stats;
  for (std::size_t i = 0; i < positions.size(); ++i) {
    const auto at = static_cast<Eigen::Index>(i);
    for (std::size_t h = 0; h < heads; ++h) std::copy_n(rows[h]->row(at).data(), dim, row.data() + h * dim);
    codec.encode(row, positions[i], code, stats);
    codec.decode(code, positions[i], row);
    for (std::size_t h = 0; h < heads; ++h) std::copy_n(row.data() + h * dim, dim, decoded[h].row(at).data());
  }
  return decoded;
}

// tr(metric E) per head, E the weighted covariance of what the codec loses on the importance samples.
std::vector<double> key_noise(const Codec& codec, std::span<const HeadMoments> heads) {
  std::vector<MatrixF> rows;
  std::vector<const MatrixF*> pointers;
  for (const HeadMoments& head : heads) {
    const HeadImportance& importance = head.importance;
    const Eigen::Index dim = codec.head_dim();
    MatrixF& keys = rows.emplace_back(static_cast<Eigen::Index>(importance.sample_positions.size()), dim);
    for (Eigen::Index i = 0; i < keys.size(); ++i)
      keys.data()[i] = half_to_float(importance.sample_keys[static_cast<std::size_t>(i)]);
  }
  pointers.reserve(rows.size());
  for (const MatrixF& keys : rows) pointers.push_back(&keys);
  const std::vector<MatrixF> decoded = round_trip(codec, pointers, heads.front().importance.sample_positions);
  std::vector<double> noise;
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const auto& weights = heads[h].importance.sample_weights;
    const Eigen::Map<const Eigen::VectorXf> weight(weights.data(), static_cast<Eigen::Index>(weights.size()));
    const MatrixD error = (decoded[h] - rows[h]).cast<double>();
    const double total = weight.cast<double>().sum();
    const MatrixD covariance = error.transpose() * weight.cast<double>().asDiagonal() * error;
    noise.push_back(total > 0 ? heads[h].importance.metric.cwiseProduct(covariance).sum() / total : 0.0);
  }
  return noise;
}

}  // namespace

MatrixF centred_keys(const MatrixF& rows, const std::vector<std::int32_t>& positions, const LayerArtifact& layer, int head,
                     MeanMode mode) {
  MatrixF centred = rows;
  if (mode == MeanMode::statical) centred.rowwise() -= layer.k_mean.row(head);
  if (mode != MeanMode::rope) return centred;
  const Rope rope(layer.shape.rope, layer.shape.k_dim);
  VectorF mean(layer.shape.k_dim);
  for (Eigen::Index i = 0; i < rows.rows(); ++i) {
    mean = layer.k_mean_pre_rope.row(head);
    rope.apply({mean.data(), static_cast<std::size_t>(mean.size())}, positions[static_cast<std::size_t>(i)]);
    centred.row(i) -= mean;
  }
  return centred;
}

std::vector<HeadQuality> measure(const LayerArtifact& layer, const Recipe& recipe, std::span<const HeadMoments> heads) {
  const LayerCodecs codecs = make_codecs(layer, recipe);
  const Rope rope(layer.shape.rope, layer.shape.k_dim);
  const std::vector<std::int32_t>& positions = heads.front().sample_positions;
  std::vector<const MatrixF*> keys;
  std::vector<const MatrixF*> values;
  for (const HeadMoments& head : heads) {
    keys.push_back(&head.k_samples);
    values.push_back(&head.v_samples);
  }
  const std::vector<MatrixF> decoded_keys = round_trip(*codecs.k, keys, positions);
  const std::vector<MatrixF> decoded_values = round_trip(*codecs.v, values, positions);

  std::vector<HeadQuality> result(heads.size());
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const HeadMoments& head = heads[h];
    const MatrixD metric = normalised_moment(head, "qqt", layer.shape.layer);
    const double lost = energy(decoded_keys[h] - head.k_samples, metric);
    const MatrixF varying = centred_keys(head.k_samples, positions, layer, static_cast<int>(h), MeanMode::rope);
    VectorF mean = layer.k_mean_pre_rope.row(static_cast<Eigen::Index>(h));
    rope.apply({mean.data(), static_cast<std::size_t>(mean.size())}, 0);  // its length does not depend on the position
    result[h].k_error = ratio(lost, energy(head.k_samples, metric));
    result[h].k_varying_error = ratio(lost, energy(varying, metric));
    result[h].v_error =
        ratio((decoded_values[h] - head.v_samples).cast<double>().squaredNorm(), head.v_samples.cast<double>().squaredNorm());
    result[h].mean_share = ratio(mean.cast<double>().squaredNorm() * static_cast<double>(head.tokens), head.k_moment.trace());
  }
  if (heads.front().importance.empty()) return result;
  const std::vector<double> noise = key_noise(*codecs.k, heads);
  for (std::size_t h = 0; h < heads.size(); ++h) {
    result[h].key_noise = noise[h];
    result[h].output_energy = heads[h].importance.output_energy;
  }
  return result;
}

std::vector<double> head_overlaps(std::span<const HeadMoments> heads, int layer) {
  const auto dim = heads.front().q_moment.rows();
  const Eigen::Index top = std::max<Eigen::Index>(1, dim / 4);
  const MatrixD shared = symmetric_eigen(shared_moment(heads, "qqt", layer)).vectors.rightCols(top);
  std::vector<double> overlaps;
  for (const HeadMoments& head : heads) {
    const MatrixD own = symmetric_eigen(normalised_moment(head, "qqt", layer)).vectors.rightCols(top);
    overlaps.push_back((own.transpose() * shared).squaredNorm() / static_cast<double>(top));
  }
  return overlaps;
}

}  // namespace oscar
