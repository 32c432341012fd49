#include "fit_clip.h"

#include <array>
#include <limits>
#include <set>

#include "oscar/codec/int2.h"

namespace oscar {
namespace {

// Weakest first. Ratios that select the same order statistic of a row are tried once.
constexpr std::array<float, 13> kGrid = {0.0F,  1.0F,  0.99F, 0.98F, 0.97F, 0.96F, 0.95F,
                                         0.94F, 0.93F, 0.92F, 0.91F, 0.90F, 0.88F};

double energy(const MatrixF& rows, const MatrixD& metric) {
  const MatrixD e = rows.cast<double>();
  return metric.size() == 0 ? e.squaredNorm() : (e * metric).cwiseProduct(e).sum();
}

// What the codec loses of rows that are already centred and rotated.
MatrixF coding_errors(const MatrixF& rows, float clip, int group_size) {
  const auto dim = static_cast<std::size_t>(rows.cols());
  Int2Config config;
  config.n_head_kv = 1;
  config.head_dim = static_cast<int>(dim);
  config.group_size = group_size;
  config.clip = {clip};
  const auto codec = make_int2_codec(std::move(config));
  std::vector<std::uint8_t> code(codec->row_bytes());
  MatrixF errors(rows.rows(), rows.cols());
  EncodeStats stats;
  for (Eigen::Index i = 0; i < rows.rows(); ++i) {
    codec->encode({rows.row(i).data(), dim}, 0, code, stats);
    codec->decode_inner(0, code, {errors.row(i).data(), dim});
  }
  errors -= rows;
  return errors;
}

}  // namespace

float fit_clip(const std::vector<ClipSamples>& heads, int group_size) {
  if (heads.empty() || heads.front().rotated.rows() == 0) return 0.0F;
  const auto dim = static_cast<float>(heads.front().rotated.cols());
  float best_clip = 0.0F;
  double best_error = std::numeric_limits<double>::infinity();
  std::set<int> tried;
  for (const float clip : kGrid) {
    const int rank =
        clip <= 0.0F ? static_cast<int>(dim) - 1 : std::min(static_cast<int>(clip * dim), static_cast<int>(dim) - 1);
    if (!tried.insert(rank).second) continue;
    double error = 0.0;
    for (const ClipSamples& head : heads) {
      const double whole = energy(head.rotated, head.metric);
      if (whole > 0.0) error += energy(coding_errors(head.rotated, clip, group_size), head.metric) / whole;
    }
    if (error < best_error) {
      best_error = error;
      best_clip = clip;
    }
  }
  return best_clip;
}

}  // namespace oscar
