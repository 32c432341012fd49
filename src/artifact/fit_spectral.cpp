#include "fit_spectral.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "oscar/base/error.h"
#include "oscar/base/half.h"
#include "oscar/codec/spectral.h"
#include "oscar/method/rotation.h"

namespace oscar {
namespace {

constexpr double kNoVariance = 1e-12;  // of the keys' energy: below what binary16 keys can show, above binary64's rounding
// Variance that rounding to binary16 leaves in a value, relative to its square: uniform within half a unit of the last of 11
// bits.
constexpr double kHalfRounding = 1.0 / (3.0 * (1 << 22));
constexpr double kTinySigma = 1e-9;  // of the layer's largest: such a coordinate holds nothing
// Steps of the best uniform quantisers of a unit Gaussian at 2, 4, 6, 8 bits: where the search starts.
constexpr std::array<float, 4> kGaussianStep = {0.9957F, 0.3352F, 0.1041F, 0.0308F};
constexpr int kStepTries = 33;  // factors 0.6 .. 2.2

std::size_t size_of(Eigen::Index n) { return static_cast<std::size_t>(n); }

struct Basis {
  MatrixD transform, inverse;
  VectorD sigma;  // descending
  VectorD mean;
};

// T before the layer's common scale.
Basis make_basis(const HeadImportance& head, const Rope& rope, const VectorD& pre_rope_mean, const std::string& what,
                 std::vector<std::string>& warnings) {
  const Eigen::Index dim = head.metric.rows();
  const KeyCovariance keys = covariance(head, rope, pre_rope_mean);
  MatrixD metric = head.metric;
  if (!(metric.trace() > 0)) {
    warnings.push_back(what + ": no attention reached coded keys: its keys are measured by their plain squared error");
    metric.setIdentity();
  }
  const VectorD directions = symmetric_eigen(metric).values;
  if (const auto rank = numerical_rank(directions); rank < dim) {
    warnings.push_back(
        fmt::format("{}: its queries reach coded keys in {} of {} directions only: errors in the others are held small by "
                    "the ridge alone",
                    what, rank, dim));
  }
  metric.diagonal().array() += kSpectralRidge * metric.trace() / static_cast<double>(dim);
  const Eigen2 m = symmetric_eigen(metric);
  const VectorD root = m.values.cwiseSqrt();
  const MatrixD half = m.vectors * root.asDiagonal() * m.vectors.transpose();
  const MatrixD back = m.vectors * root.cwiseInverse().asDiagonal() * m.vectors.transpose();
  const Eigen2 klt = symmetric_eigen(half * keys.covariance * half);
  const MatrixD u = klt.vectors.rowwise().reverse();
  Basis basis;
  basis.transform = half * u;
  basis.inverse = u.transpose() * back;
  basis.sigma = klt.values.reverse().cwiseMax(0.0).cwiseSqrt();
  basis.mean = keys.mean;
  const double weight = head.joint(head.joint.rows() - 1, head.joint.cols() - 1);
  const double energy = metric.cwiseProduct(head.joint.topLeftCorner(dim, dim)).sum();
  if (!(basis.sigma[0] * basis.sigma[0] * weight > kNoVariance * energy)) {
    warnings.push_back(what + ": its keys do not vary: they are stored as their mean");
    basis.sigma.setZero();
    return basis;
  }
  const double rounding = kHalfRounding * head.joint.topLeftCorner(dim, dim).trace() / weight / static_cast<double>(dim);
  const VectorD least = rounding * basis.transform.colwise().squaredNorm();
  if (const auto rank = (basis.sigma.array().square() > least.array()).count(); rank < dim) {
    warnings.push_back(fmt::format(
        "{}: its keys vary in {} of {} directions, the others are within the rounding of a 16-bit cache", what, rank, dim));
  }
  return basis;
}

// Sample rows in the new basis, gains divided out: z / g0; offset 0 and turned, as in the statistics.
MatrixF whitened_samples(const HeadImportance& head, const Rope& rope, const VectorD& pre_rope_mean, const MatrixF& transform,
                         const VectorD& mean, const VectorF& inverse_sigma) {
  const Eigen::Index dim = transform.rows();
  const auto n = static_cast<Eigen::Index>(head.sample_positions.size());
  const int copies = rope.theta().empty() ? 1 : 2;
  MatrixF rows(n * copies, dim);
  VectorF turned(dim);
  for (Eigen::Index i = 0; i < n; ++i) {
    const std::int64_t position = head.sample_positions[size_of(i)];
    for (int copy = 0; copy < copies; ++copy) {
      auto row = rows.row(i * copies + copy);
      for (Eigen::Index d = 0; d < dim; ++d) row[d] = half_to_float(head.sample_keys[size_of(i * dim + d)]);
      turned = pre_rope_mean.cast<float>();
      if (copies == 2) {
        const std::int64_t offset = copy == 0 ? 0 : position_mix_offset(position, 0);
        rope.shift({row.data(), size_of(dim)}, offset);
        rope.apply({turned.data(), size_of(dim)}, position + offset);
      }
      row -= turned + mean.cast<float>();
    }
  }
  MatrixF z = rows * transform;
  const auto norm_coordinates = static_cast<float>((inverse_sigma.array() > 0.0F).count());
  for (Eigen::Index i = 0; i < z.rows(); ++i) {
    const float square = z.row(i).cwiseProduct(inverse_sigma).squaredNorm();
    z.row(i) /= std::max(kSpectralMinNorm, std::sqrt(square / std::max(1.0F, norm_coordinates)));
  }
  return z;
}

// Weighted squared error of one coordinate's samples under a uniform quantiser; `count` is a multiple of kRun. Half of the time
// of a fit is spent here: sums stand side by side, so that the compiler can vectorise.
constexpr Eigen::Index kRun = 64;
double coding_error(const float* z, const float* weight, Eigen::Index count, float step, int width) {
  constexpr int kSums = 8;
  const float half = static_cast<float>(1 << (width - 1));
  const float top = 2.0F * half - 1.0F;
  const float inverse = 1.0F / step;
  double error = 0;
  for (Eigen::Index begin = 0; begin < count; begin += kRun) {
    std::array<float, kSums> sums{};
    for (Eigen::Index i = begin; i < begin + kRun; i += kSums) {
      for (int l = 0; l < kSums; ++l) {
        const float t = std::min(std::max(z[i + l] * inverse + half, 0.0F), top);
        const float decoded = (static_cast<float>(static_cast<int>(t)) + 0.5F - half) * step;
        const float e = z[i + l] - decoded;
        sums[static_cast<std::size_t>(l)] += weight[i + l] * e * e;
      }
    }
    for (const float sum : sums) error += static_cast<double>(sum);
  }
  return error;
}

// Best steps of a head's coordinates and the errors they leave; error[d][0] is the coordinate's energy.
struct Steps {
  MatrixF step;                              // [4, D]
  std::vector<std::array<double, 5>> error;  // [D]
};

Steps search_steps(const MatrixF& z, const Eigen::ArrayXf& weight) {
  Steps result;
  result.step.resize(4, z.cols());
  result.error.resize(size_of(z.cols()));
  const Eigen::Index count = (z.rows() + kRun - 1) / kRun * kRun;  // what is added weighs nothing
  Eigen::ArrayXf column = Eigen::ArrayXf::Zero(count);
  Eigen::ArrayXf weights = Eigen::ArrayXf::Zero(count);
  weights.head(z.rows()) = weight;
  for (Eigen::Index d = 0; d < z.cols(); ++d) {
    column.head(z.rows()) = z.col(d).array();
    auto& error = result.error[size_of(d)];
    error[0] = static_cast<double>((weights * column.square()).sum());
    const float sigma = std::max(1e-12F, std::sqrt(static_cast<float>(error[0]) / weight.sum()));
    for (int l = 0; l < 4; ++l) {
      error[size_of(l + 1)] = std::numeric_limits<double>::infinity();
      for (int i = 0; i < kStepTries; ++i) {
        const float factor = 0.6F + 1.6F * static_cast<float>(i) / static_cast<float>(kStepTries - 1);
        const float step = sigma * kGaussianStep[size_of(l)] * factor;
        const double e = coding_error(column.data(), weights.data(), count, step, 2 * (l + 1));
        if (e >= error[size_of(l + 1)]) continue;
        error[size_of(l + 1)] = e;
        result.step(l, d) = step;
      }
    }
  }
  return result;
}

float sign_of(int layer, int head, int d) {  // one fixed pseudo-random pattern per head; recorded in the artifact
  std::uint64_t x =
      0x9E3779B97F4A7C15U * (static_cast<std::uint64_t>(layer) * 4096 + static_cast<std::uint64_t>(head) * 64 + 1) +
      static_cast<std::uint64_t>(d) * 0xBF58476D1CE4E5B9U;
  x ^= x >> 31;
  x *= 0x94D049BB133111EBU;
  return ((x >> 40) & 1U) != 0 ? 1.0F : -1.0F;
}

void fit_values(const LayerShape& shape, std::span<const HeadMoments> heads, SpectralLayer& layer) {
  layer.v_signs.resize(shape.n_head_kv, shape.v_dim);
  for (int h = 0; h < shape.n_head_kv; ++h) {
    for (int d = 0; d < shape.v_dim; ++d) layer.v_signs(h, d) = sign_of(shape.layer, h, d);
    const HeadMoments& head = heads[size_of(h)];
    const double variance = head.v_moment.trace() / static_cast<double>(std::max<std::int64_t>(1, head.tokens) * shape.v_dim);
    layer.v_scale.push_back(variance > 0 ? std::max(1e-20F, static_cast<float>(std::sqrt(variance))) : 1.0F);
  }
}

double total_error(const QuadErrors& errors, const std::vector<std::vector<int>>& digits) {
  double total = 0;
  for (std::size_t h = 0; h < errors.size(); ++h) {
    for (std::size_t q = 0; q < errors[h].size(); ++q) total += errors[h][q][static_cast<std::size_t>(digits[h][q])];
  }
  return total;
}

}  // namespace

std::vector<std::vector<int>> share_digits(const QuadErrors& error, int digits, int max_digits) {
  // Counted in quads of digits; a head takes multiples of kUnit of them.
  constexpr int kUnit = kSpectralSlots / kSpectralQuad;
  constexpr double kNever = std::numeric_limits<double>::infinity();
  const std::size_t heads = error.size();
  std::vector<std::vector<double>> best(heads);              // [h][digits of the head, in quads]
  std::vector<std::vector<std::vector<int>>> choice(heads);  // [h][q][digits used by quads 0 .. q]
  for (std::size_t h = 0; h < heads; ++h) {
    const auto most = error[h].size() * static_cast<std::size_t>(max_digits);
    best[h].assign(most + 1, kNever);
    best[h][0] = 0;
    for (const std::vector<double>& quad : error[h]) {
      std::vector<double> next(most + 1, kNever);
      std::vector<int>& taken = choice[h].emplace_back(most + 1, 0);
      for (std::size_t used = 0; used <= most; ++used) {
        if (best[h][used] == kNever) continue;
        for (std::size_t l = 0; l <= static_cast<std::size_t>(max_digits) && used + l <= most; ++l) {
          const double e = best[h][used] + quad[l];
          if (e >= next[used + l]) continue;
          next[used + l] = e;
          taken[used + l] = static_cast<int>(l);
        }
      }
      best[h] = std::move(next);
    }
  }
  const auto units = static_cast<std::size_t>(digits / kSpectralSlots);
  std::vector<double> total(units + 1, kNever);
  std::vector<std::vector<std::size_t>> share(heads, std::vector<std::size_t>(units + 1, 0));
  total[0] = 0;
  for (std::size_t h = 0; h < heads; ++h) {
    std::vector<double> next(units + 1, kNever);
    for (std::size_t used = 0; used <= units; ++used) {
      if (total[used] == kNever) continue;
      for (std::size_t own = 0; used + own <= units && own * kUnit < best[h].size(); ++own) {
        const double e = total[used] + best[h][own * kUnit];
        if (e >= next[used + own]) continue;
        next[used + own] = e;
        share[h][used + own] = own;
      }
    }
    total = std::move(next);
  }
  if (total[units] == kNever) fail("spectral: {} digits do not fit {} heads", digits, heads);
  std::vector<std::vector<int>> result(heads);
  std::size_t left = units;
  for (std::size_t h = heads; h-- > 0;) {
    std::size_t used = share[h][left] * kUnit;
    left -= share[h][left];
    result[h].resize(error[h].size());
    for (std::size_t q = error[h].size(); q-- > 0;) {
      result[h][q] = choice[h][q][used];
      used -= static_cast<std::size_t>(result[h][q]);
    }
  }
  return result;
}

SpectralLayer fit_spectral(const LayerArtifact& layer, std::span<const HeadMoments> heads, std::vector<std::string>& warnings,
                           QuadErrors& errors) {
  const LayerShape& shape = layer.shape;
  const Rope rope(shape.rope, shape.k_dim);
  const Eigen::Index dim = shape.k_dim;
  std::vector<Basis> bases;
  double largest = 0;
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const VectorD mean = layer.k_mean_pre_rope.row(static_cast<Eigen::Index>(h)).cast<double>();
    bases.push_back(make_basis(heads[h].importance, rope, mean, fmt::format("layer {} head {}", shape.layer, h), warnings));
    largest = std::max(largest, bases.back().sigma[0]);
  }
  if (!(largest > 0)) largest = 1;

  SpectralLayer result;
  result.mean.resize(shape.n_head_kv, dim);
  result.inverse_sigma = MatrixF::Zero(shape.n_head_kv, dim);
  result.step.assign(kSpectralWidths, MatrixF(shape.n_head_kv, dim));
  double output = 0;
  for (const HeadMoments& head : heads) output += head.importance.output_energy;
  errors.clear();
  for (std::size_t h = 0; h < bases.size(); ++h) {
    const auto row = static_cast<Eigen::Index>(h);
    Basis& basis = bases[h];
    basis.sigma /= largest;
    result.transform.emplace_back((basis.transform / largest).cast<float>());
    result.inverse.emplace_back((basis.inverse * largest).cast<float>());
    result.mean.row(row) = basis.mean.cast<float>();
    for (Eigen::Index d = 0; d < dim / 2; ++d) {
      if (basis.sigma[d] > kTinySigma) result.inverse_sigma(row, d) = static_cast<float>(1.0 / basis.sigma[d]);
    }
    const VectorF inverse_sigma = result.inverse_sigma.row(row);
    const MatrixF z = whitened_samples(heads[h].importance, rope, layer.k_mean_pre_rope.row(row).cast<double>(),
                                       result.transform[h], basis.mean, inverse_sigma);
    const auto copies = static_cast<Eigen::Index>(rope.theta().empty() ? 1 : 2);
    Eigen::ArrayXf weight(z.rows());
    for (Eigen::Index i = 0; i < z.rows(); ++i) weight[i] = heads[h].importance.sample_weights[size_of(i / copies)];
    const Steps steps = search_steps(z, weight);
    for (int w = 0; w < kSpectralWidths; ++w) result.step[size_of(w)].row(row) = steps.step.row(w);
    const double scale = largest * largest / (static_cast<double>(weight.sum()) * (output > 0 ? output : 1.0));
    auto& of_head = errors.emplace_back();
    for (Eigen::Index q = 0; q < dim / kSpectralQuad; ++q) {
      std::vector<double> quad(5, 0.0);
      for (Eigen::Index d = q * kSpectralQuad; d < (q + 1) * kSpectralQuad; ++d) {
        for (std::size_t l = 0; l < quad.size(); ++l) quad[l] += scale * steps.error[size_of(d)][l];
      }
      of_head.push_back(std::move(quad));
    }
  }
  fit_values(shape, heads, result);
  return result;
}

void share_widths(std::span<SpectralLayer* const> layers, std::span<const QuadErrors> errors) {
  const auto digits_of = [](const SpectralLayer& layer, double rate) {
    return static_cast<int>(rate * static_cast<double>(layer.mean.cols()) / 2.0) * static_cast<int>(layer.mean.rows());
  };
  for (const double rate : kSpectralRates) {
    const int most = rate > 2.0 ? 4 : 3;
    QuadErrors all;
    int digits = 0;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      const int own = digits_of(*layers[i], rate);
      digits += own;
      const double noise = total_error(errors[i], share_digits(errors[i], own, most));
      const double weight = noise > 0 ? 1.0 / std::sqrt(noise) : 0.0;
      for (const auto& head : errors[i]) {
        for (auto& quad : all.emplace_back(head)) {
          for (double& error : quad) error *= weight;
        }
      }
    }
    const std::vector<std::vector<int>> shared = share_digits(all, digits, most);
    auto head = shared.begin();
    for (SpectralLayer* layer : layers) {
      MatrixF& width = layer->width.emplace_back(layer->mean.rows(), layer->mean.cols());
      for (Eigen::Index h = 0; h < width.rows(); ++h, ++head) {
        for (Eigen::Index d = 0; d < width.cols(); ++d)
          width(h, d) = 2.0F * static_cast<float>((*head)[size_of(d / kSpectralQuad)]);
      }
    }
  }
}

}  // namespace oscar
