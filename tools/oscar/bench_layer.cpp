#include "bench_layer.h"

#include <Eigen/QR>
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <optional>

#include "oscar/base/error.h"
#include "oscar/codec/int2.h"
#include "oscar/codec/spectral.h"

namespace oscar::cli {
namespace {

constexpr Eigen::Index kPool = 509;  // prime: neighbours repeat at no power of two
// Steps of the best uniform quantisers of a unit Gaussian with 2, 4, 6 and 8 bits, and the squared errors they leave (Max
// 1960).
constexpr std::array<float, 4> kStep{0.9957F, 0.3352F, 0.1041F, 0.0308F};
constexpr std::array<double, 5> kDistortion{1, 0.11885, 0.01154, 0.00104, 9.5e-5};

MatrixF gaussian(Eigen::Index rows, Eigen::Index columns, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  MatrixF out(rows, columns);
  for (Eigen::Index i = 0; i < out.size(); ++i) out.data()[i] = normal(rng);
  return out;
}

Rope neox_rope(int dim) {
  RopeParams params;
  params.pairing = RopePairing::neox;
  params.n_rot = dim;
  return {params, dim};
}

}  // namespace

std::string to_text(const AttentionShape& shape) { return fmt::format("{}/{}/{}", shape.n_head, shape.n_head_kv, shape.dim); }

AttentionShape parse_shape(const std::string& text) {
  AttentionShape shape;
  const char* at = text.data();
  const char* const end = at + text.size();
  bool good = true;
  for (int* part : {&shape.n_head, &shape.n_head_kv, &shape.dim}) {
    const auto [next, error] = std::from_chars(at, end, *part);
    const bool last = part == &shape.dim;
    good = good && error == std::errc{} && (last ? next == end : next != end && *next == '/');
    if (!good) break;
    at = next + 1;
  }
  if (!good) fail("the shape \"{}\" is not of the form QUERY-HEADS/KV-HEADS/DIMENSIONS, as 12/2/128", text);
  if (shape.n_head < 1 || shape.n_head > 256 || shape.n_head_kv < 1 || shape.n_head % shape.n_head_kv != 0)
    fail("the shape {} makes no sense: up to 256 query heads, a multiple of the KV heads", text);
  if (shape.dim < 32 || shape.dim > 512 || shape.dim % 32 != 0)
    fail("the shape {} cannot be measured: dimensions are multiples of 32 from 32 to 512 (rows of q8_0 and q4_0)", text);
  return shape;
}

std::vector<float> key_variances(int dim) {
  std::vector<float> lambda;
  double sum = 0;
  for (int d = 0; d < dim; ++d) {
    lambda.push_back(static_cast<float>(std::pow(1 + 25.0 * d / dim, -2.25)));
    sum += static_cast<double>(lambda.back());
  }
  for (float& variance : lambda) variance *= static_cast<float>(dim / sum);
  return lambda;
}

std::vector<int> fill_widths(std::span<const float> lambda) {
  const std::size_t quads = lambda.size() / kSpectralQuad;
  std::vector<std::size_t> level(quads, 0);  // base-4 digits of each coordinate of a quad
  for (std::size_t digits = 0; digits < lambda.size(); digits += kSpectralQuad) {
    std::optional<std::size_t> best;
    double best_gain = 0;
    for (std::size_t q = 0; q < quads; ++q) {
      if (level[q] + 1 >= kDistortion.size()) continue;
      const double gain = static_cast<double>(lambda[q * kSpectralQuad]) * (kDistortion[level[q]] - kDistortion[level[q] + 1]);
      if (gain > best_gain) {
        best = q;
        best_gain = gain;
      }
    }
    if (!best) break;
    ++level[*best];
  }
  std::vector<int> width(lambda.size());
  for (std::size_t d = 0; d < width.size(); ++d) width[d] = 2 * static_cast<int>(level[d / kSpectralQuad]);
  return width;
}

BenchLayer::BenchLayer(const AttentionShape& shape, const std::string& codec, bool rope_mean)
    : shape_(shape), codec_(codec), rope_mean_(rope_mean), rope_(neox_rope(shape.dim)) {
  if (codec != "spectral" && codec != "int2" && codec != "exact")
    fail("there is no codec \"{}\" to measure: spectral, int2 or exact", codec);
  std::mt19937 rng(1);
  const MatrixD square = gaussian(shape.dim, shape.dim, rng).cast<double>();
  const MatrixD q = Eigen::HouseholderQR<MatrixD>(square).householderQ() * MatrixD::Identity(shape.dim, shape.dim);
  rotation_ = q.cast<float>();
  lambda_ = key_variances(shape.dim);
  mean_ = 0.5F * gaussian(shape.n_head_kv, shape.dim, rng);
  mean_pre_rope_ = 0.5F * gaussian(shape.n_head_kv, shape.dim, rng);
  keys_ = gaussian(kPool, static_cast<Eigen::Index>(row_size()), rng);
  values_ = gaussian(kPool, static_cast<Eigen::Index>(row_size()), rng);
  for (int h = 0; h < shape.n_head_kv; ++h) {
    auto head = keys_.middleCols(h * shape.dim, shape.dim);
    for (int d = 0; d < shape.dim; ++d) head.col(d) *= std::sqrt(lambda_[static_cast<std::size_t>(d)]);
    head = (head * rotation_.transpose()).eval();
  }
}

LayerSpec BenchLayer::spec(int layer) const {
  LayerSpec spec;
  spec.layer = layer;
  spec.n_head_kv = shape_.n_head_kv;
  spec.k_dim = spec.v_dim = shape_.dim;
  spec.rope = rope_;
  if (codec_ == "exact") return spec;
  if (codec_ == "int2") {
    Int2Config config;
    config.n_head_kv = shape_.n_head_kv;
    config.head_dim = shape_.dim;
    config.rotation.push_back(MatrixF::Identity(shape_.dim, shape_.dim));  // Q has spread the variances already
    spec.v = make_int2_codec(config);
    if (rope_mean_) {
      config.mean_pre_rope = mean_pre_rope_;
      config.rope = rope_;
    }
    spec.k = make_int2_codec(config);
    return spec;
  }
  SpectralKeyConfig keys;
  keys.n_head_kv = shape_.n_head_kv;
  keys.head_dim = shape_.dim;
  keys.mean = mean_;
  if (rope_mean_) {
    keys.mean_pre_rope = mean_pre_rope_;
    keys.rope = rope_;
  }
  SpectralKeyHead head;
  head.transform = rotation_;
  head.inverse = rotation_.transpose();
  head.width = fill_widths(lambda_);
  for (std::size_t d = 0; d < lambda_.size(); ++d) {
    const float sigma = std::sqrt(lambda_[d]);
    const int width = head.width[d];
    head.step.push_back(width == 0 ? 1.0F : sigma * kStep[static_cast<std::size_t>(width / 2 - 1)]);
    head.inverse_sigma.push_back(width == 0 ? 0.0F : 1.0F / sigma);
  }
  keys.heads.assign(static_cast<std::size_t>(shape_.n_head_kv), head);
  spec.k = make_spectral_key_codec(std::move(keys));
  SpectralValueConfig values;
  values.n_head_kv = shape_.n_head_kv;
  values.head_dim = shape_.dim;
  values.signs = MatrixF::Ones(shape_.n_head_kv, shape_.dim);
  std::mt19937 rng(static_cast<unsigned>(layer) + 2);
  for (Eigen::Index i = 0; i < values.signs.size(); ++i) values.signs.data()[i] = rng() % 2 == 0 ? 1.0F : -1.0F;
  values.scale.assign(static_cast<std::size_t>(shape_.n_head_kv), 1.0F);
  spec.v = make_spectral_value_codec(std::move(values));
  return spec;
}

void BenchLayer::key(std::int64_t position, std::span<float> row) const {
  for (int h = 0; h < shape_.n_head_kv; ++h) {
    const auto head = row.subspan(static_cast<std::size_t>(h * shape_.dim), static_cast<std::size_t>(shape_.dim));
    for (int d = 0; d < shape_.dim; ++d) head[static_cast<std::size_t>(d)] = rope_mean_ ? mean_pre_rope_(h, d) : 0.0F;
    if (rope_mean_) rope_.apply(head, position);
    for (int d = 0; d < shape_.dim; ++d) {
      head[static_cast<std::size_t>(d)] += mean_(h, d) + keys_(position % kPool, static_cast<Eigen::Index>(h) * shape_.dim + d);
    }
  }
}

void BenchLayer::value(std::int64_t position, std::span<float> row) const {
  std::copy_n(&values_(position % kPool, 0), row.size(), row.begin());
}

}  // namespace oscar::cli
