#include "fit_rotation.h"

#include "oscar/base/error.h"
#include "oscar/method/rotation.h"

namespace oscar {
namespace {

bool contains_hadamard(Composition composition) {
  return composition != Composition::plain && composition != Composition::pbr && composition != Composition::br;
}

// Data-free: H takes the place of R where the composition does not hold H already (H twice would cancel).
MatrixD hadamard_rotation(Composition composition, int dim) {
  if (contains_hadamard(composition)) return compose(composition, MatrixD::Identity(dim, dim));
  const MatrixD h = hadamard(dim);
  return composition == Composition::plain ? h : MatrixD(h * bit_reversal(dim));
}

// Empty, or a sentence about a moment that has no full set of directions of its own.
std::string degenerate(const Eigen2& eigen, const MatrixD& moment, const std::string& what) {
  const auto dim = moment.rows();
  const double largest = eigen.values[dim - 1];
  if (!(largest > 0.0)) return fmt::format("{} is zero everywhere: its rotation is arbitrary", what);
  std::string channels;
  for (Eigen::Index i = 0; i < dim; ++i) {
    if (moment(i, i) == 0.0) channels += fmt::format("{}{}", channels.empty() ? "" : ", ", i);
  }
  if (!channels.empty()) return fmt::format("{} has channels that are always zero: {}", what, channels);
  const auto rank = numerical_rank(eigen.values);
  if (rank < dim) return fmt::format("{} has rank {} of {}: the other directions are arbitrary", what, rank, dim);
  return {};
}

}  // namespace

MatrixD normalised_moment(const HeadMoments& head, std::string_view moment, int layer) {
  const auto divided = [&](const MatrixD& sum, double weight) -> MatrixD {
    if (sum.size() == 0) fail("layer {}: the statistics for objective '{}' were not collected", layer, moment);
    return weight > 0.0 ? MatrixD(sum / weight) : MatrixD(MatrixD::Zero(sum.rows(), sum.cols()));
  };
  if (moment == "qqt") return divided(head.q_moment, static_cast<double>(head.queries));
  if (moment == "ktk") return divided(head.k_moment, static_cast<double>(head.tokens));
  if (moment == "vtv") return divided(head.v_moment, static_cast<double>(head.tokens));
  if (moment == "oot") return divided(head.o_moment, static_cast<double>(head.queries));
  if (moment == "sst") return divided(head.sst_moment, head.sst_weight);
  fail("layer {}: objective '{}' is not a moment", layer, moment);
}

MatrixD shared_moment(std::span<const HeadMoments> heads, std::string_view moment, int layer) {
  MatrixD sum = normalised_moment(heads.front(), moment, layer);
  for (const HeadMoments& head : heads.subspan(1)) sum += normalised_moment(head, moment, layer);
  return sum / static_cast<double>(heads.size());
}

FittedRotations fit_rotations(std::span<const HeadMoments> heads, const Objective& objective, int dim, bool per_head,
                              int layer) {
  const Composition composition = parse_composition(objective.composition);
  const std::size_t count = per_head ? heads.size() : 1;
  FittedRotations result;
  result.eigenvalues = MatrixF::Ones(static_cast<Eigen::Index>(count), dim);
  if (objective.moment == "hadamard") {
    result.rotation.assign(count, hadamard_rotation(composition, dim).cast<float>());
    return result;
  }
  for (std::size_t h = 0; h < count; ++h) {
    const MatrixD moment =
        per_head ? normalised_moment(heads[h], objective.moment, layer) : shared_moment(heads, objective.moment, layer);
    const std::string what = per_head ? fmt::format("layer {} head {}: the {} moment", layer, h, objective.moment)
                                      : fmt::format("layer {}: the {} moment", layer, objective.moment);
    if (moment.rows() != dim) fail("{} is {} x {}, not {} x {}", what, moment.rows(), moment.cols(), dim, dim);
    if (!moment.allFinite()) fail("{} contains NaN or infinite values", what);
    const Eigen2 eigen = symmetric_eigen(moment);
    std::string warning = degenerate(eigen, moment, what);
    if (!warning.empty()) result.warnings.push_back(std::move(warning));
    result.rotation.push_back(compose(composition, eigen.vectors).cast<float>());
    result.eigenvalues.row(static_cast<Eigen::Index>(h)) = eigen.values.cast<float>();
  }
  return result;
}

}  // namespace oscar
