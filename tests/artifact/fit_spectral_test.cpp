#include "artifact/fit_spectral.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <Eigen/SVD>

#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "artifact/fit_quality.h"
#include "method/synthetic_layer.h"
#include "oscar/base/error.h"
#include "oscar/codec/spectral.h"
#include "oscar/method/rotation.h"

namespace oscar {
namespace {

using test::Activations;
using test::layer_shape;

// What ImportanceCollector would give if all tokens and queries weighed the same.
HeadImportance even_importance(const Activations& a, int head) {
  const LayerShape& shape = a.shape;
  const Rope rope(shape.rope, shape.k_dim);
  const auto pairs = static_cast<Eigen::Index>(rope.theta().size());
  const auto dim = static_cast<std::size_t>(shape.k_dim);
  const int copies = pairs > 0 ? 2 : 1;
  HeadImportance importance;
  importance.tokens = a.tokens();
  importance.pair_weight = static_cast<double>(a.tokens());
  importance.metric = MatrixD::Zero(shape.k_dim, shape.k_dim);
  importance.joint = MatrixD::Zero(shape.k_dim + 2 * pairs + 1, shape.k_dim + 2 * pairs + 1);
  Activations& rows = const_cast<Activations&>(a);
  const int group = shape.n_head / shape.n_head_kv;
  for (std::int64_t t = 0; t < a.tokens(); ++t) {
    const std::int32_t position = a.positions[static_cast<std::size_t>(t)];
    importance.sample_positions.push_back(position);
    importance.sample_weights.push_back(1.0F);
    std::vector<float> key(rows.k_row(t, head), rows.k_row(t, head) + dim);
    for (float& x : key) {
      importance.sample_keys.push_back(float_to_half(x));
      x = half_to_float(importance.sample_keys.back());
    }
    for (int copy = 0; copy < copies; ++copy) {
      const std::int64_t offset = copy == 0 ? 0 : position_mix_offset(position, 0);
      std::vector<float> turned = key;
      rope.shift(turned, offset);
      VectorD row(importance.joint.rows());
      row.head(shape.k_dim) = Eigen::Map<const VectorF>(turned.data(), shape.k_dim).cast<double>();
      for (Eigen::Index pair = 0; pair < pairs; ++pair) {
        const double angle = static_cast<double>(position + offset) * rope.theta()[static_cast<std::size_t>(pair)];
        row[shape.k_dim + pair] = rope.magnitude() * std::cos(angle);
        row[shape.k_dim + pairs + pair] = rope.magnitude() * std::sin(angle);
      }
      row[shape.k_dim + 2 * pairs] = 1.0;
      importance.joint += row.transpose() * row / copies;
      for (int g = 0; g < group; ++g) {
        std::vector<float> q(rows.q_row(t, head * group + g), rows.q_row(t, head * group + g) + dim);
        rope.shift(q, offset);
        const VectorD query = Eigen::Map<const VectorF>(q.data(), shape.k_dim).cast<double>();
        importance.metric += query.transpose() * query / copies;
      }
    }
  }
  return importance;
}

std::vector<HeadMoments> heads_of(const Activations& a) {
  const MomentCollector collector = test::collect(a, 512);
  std::vector<HeadMoments> heads(collector.heads().begin(), collector.heads().end());
  for (std::size_t h = 0; h < heads.size(); ++h) heads[h].importance = even_importance(a, static_cast<int>(h));
  return heads;
}

// Keys before RoPE: a mean of 3 in some coordinates, and a standard deviation that falls along the pairs by `fall`; queries
// with a deviation that falls along another order of the pairs. Heads differ in size.
Activations steep_layer(int dim, std::int64_t tokens, unsigned seed, RopePairing pairing = RopePairing::neox, double fall = 0.8,
                        int n_head_kv = 2) {
  Activations a(layer_shape(5, 2 * n_head_kv, n_head_kv, dim, pairing), tokens, 4);
  a.fill_normal(seed);
  const Rope rope(a.shape.rope, dim);
  const int half = dim / 2;
  std::mt19937 rng(seed + 1000);
  std::normal_distribution<float> normal;
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (int h = 0; h < a.shape.n_head_kv; ++h) {
      for (int d = 0; d < dim; ++d) {
        const auto deviation = static_cast<float>(std::pow(fall, d % half));
        a.k_row(t, h)[d] = (d % 5 == 0 ? 3.0F : 0.0F) + deviation * normal(rng) / static_cast<float>(1 + h);
      }
      rope.apply({a.k_row(t, h), static_cast<std::size_t>(dim)}, a.positions[static_cast<std::size_t>(t)]);
    }
    for (int h = 0; h < a.shape.n_head; ++h) {
      for (int d = 0; d < dim; ++d) a.q_row(t, h)[d] = static_cast<float>(std::pow(0.8, (7 * (d % half)) % half)) * normal(rng);
    }
  }
  return a;
}

LayerArtifact means_of(const Activations& a, std::span<const HeadMoments> heads) {
  LayerArtifact layer;
  layer.shape = a.shape;
  layer.k_mean_pre_rope.resize(a.shape.n_head_kv, a.shape.k_dim);
  for (std::size_t h = 0; h < heads.size(); ++h) {
    layer.k_mean_pre_rope.row(static_cast<Eigen::Index>(h)) =
        (heads[h].k_pre_sum / static_cast<double>(heads[h].tokens)).cast<float>();
  }
  return layer;
}

struct Fitted {
  std::vector<HeadMoments> heads;
  LayerArtifact layer;
  std::vector<std::string> warnings;
  QuadErrors errors;
};

Fitted fitted(const Activations& a, const std::function<void(std::vector<HeadMoments>&)>& change = nullptr) {
  Fitted f;
  f.heads = heads_of(a);
  if (change) change(f.heads);
  f.layer = means_of(a, f.heads);
  f.layer.spectral = fit_spectral(f.layer, f.heads, f.warnings, f.errors);
  SpectralLayer* layer = &f.layer.spectral;
  share_widths({&layer, 1}, {&f.errors, 1});
  return f;
}

Recipe spectral_recipe(double bits = 2) {
  Recipe recipe;
  recipe.codec = "spectral";
  recipe.k_bits = recipe.v_bits = bits;
  return recipe;
}

MatrixD whitened(const Fitted& f, std::size_t head) {
  const Rope rope(f.layer.shape.rope, f.layer.shape.k_dim);
  const VectorD mu0 = f.layer.k_mean_pre_rope.row(static_cast<Eigen::Index>(head)).cast<double>();
  const MatrixD t = f.layer.spectral.transform[head].cast<double>();
  return t.transpose() * covariance(f.heads[head].importance, rope, mu0).covariance * t;
}

double condition(const MatrixF& m) {
  const VectorD values = Eigen::JacobiSVD<Eigen::MatrixXd>(m.cast<double>()).singularValues().transpose();
  return values[0] / values[values.size() - 1];
}

void expect_sound(const SpectralLayer& s, const LayerShape& shape) {
  const auto heads = static_cast<std::size_t>(shape.n_head_kv);
  ASSERT_EQ(s.transform.size(), heads);
  ASSERT_EQ(s.inverse.size(), heads);
  for (std::size_t h = 0; h < heads; ++h) {
    EXPECT_TRUE(s.transform[h].allFinite());
    EXPECT_TRUE(s.inverse[h].allFinite());
    const MatrixD product = s.transform[h].cast<double>() * s.inverse[h].cast<double>();
    EXPECT_LT((product - MatrixD::Identity(shape.k_dim, shape.k_dim)).cwiseAbs().maxCoeff(), 1e-4);
    EXPECT_LT(condition(s.transform[h]), 1.01 * std::sqrt(1 + shape.k_dim / kSpectralRidge));
  }
  EXPECT_TRUE(s.mean.allFinite());
  EXPECT_TRUE(s.inverse_sigma.allFinite());
  ASSERT_EQ(s.step.size(), 4U);
  for (const MatrixF& step : s.step) {
    EXPECT_TRUE(step.allFinite());
    EXPECT_TRUE((step.array() > 0.0F).all());
  }
  EXPECT_TRUE((s.v_signs.array().abs() == 1.0F).all());
  EXPECT_GT(s.v_signs.mean(), -0.5F);
  EXPECT_LT(s.v_signs.mean(), 0.5F);
  ASSERT_EQ(s.v_scale.size(), heads);
  for (const float scale : s.v_scale) EXPECT_TRUE(std::isfinite(scale) && scale > 0.0F);
  ASSERT_EQ(s.width.size(), kSpectralRates.size());
  for (std::size_t r = 0; r < kSpectralRates.size(); ++r) {
    const MatrixF& width = s.width[r];
    ASSERT_EQ(width.rows(), shape.n_head_kv);
    ASSERT_EQ(width.cols(), shape.k_dim);
    for (Eigen::Index h = 0; h < width.rows(); ++h) {
      EXPECT_EQ(static_cast<int>(width.row(h).sum()) % (2 * kSpectralSlots), 0);
      for (Eigen::Index d = 0; d < width.cols(); ++d) EXPECT_EQ(width(h, d), width(h, d / 4 * 4));
    }
    // As many bits as the rate promises, rounded down to the 32 bits in which they are handed out.
    const auto bits = static_cast<int>(kSpectralRates[r] * shape.k_dim) * shape.n_head_kv;
    EXPECT_EQ(static_cast<int>(width.sum()), bits / 32 * 32) << "rate " << kSpectralRates[r];
  }
}

TEST(FitSpectral, WhitensAndOrders) {
  for (const int dim : {64, 80, 96, 128}) {
    SCOPED_TRACE(dim);
    const Activations a = steep_layer(dim, 600, static_cast<unsigned>(dim), dim == 80 ? RopePairing::norm : RopePairing::neox);
    const Fitted f = fitted(a);
    // The more dimensions, the steeper: the last of more than 64 are lost in binary16, and that is said.
    EXPECT_THAT(f.warnings, testing::Each(testing::HasSubstr("directions")));
    EXPECT_EQ(f.warnings.empty(), dim == 64);
    expect_sound(f.layer.spectral, a.shape);
    double largest = 0;
    for (std::size_t h = 0; h < 2; ++h) {
      const MatrixD c = whitened(f, h);
      largest = std::max(largest, c(0, 0));
      for (Eigen::Index i = 0; i < dim; ++i) {
        const Eigen::Index before = std::max<Eigen::Index>(1, i) - 1;
        EXPECT_LE(c(i, i), c(before, before) + 1e-6) << i;
        for (Eigen::Index j = 0; j < i; ++j) ASSERT_LT(std::abs(c(i, j)), 2e-6) << i << " " << j;
        const double sigma = std::sqrt(std::max(0.0, c(i, i)));
        const auto inverse = static_cast<double>(f.layer.spectral.inverse_sigma(static_cast<Eigen::Index>(h), i));
        if (i >= dim / 2) {
          EXPECT_EQ(inverse, 0.0);
        } else if (sigma > 0.01) {
          EXPECT_NEAR(inverse * sigma, 1.0, 1e-2) << i;
        }
      }
      EXPECT_LT(c(dim / 2, dim / 2), 0.1 * c(0, 0));  // the spectrum is steep
      // The squared error in the new basis is that of logits, up to a factor common to the heads and the ridge.
      const MatrixD t = f.layer.spectral.transform[h].cast<double>();
      MatrixD metric = f.heads[h].importance.metric;
      metric.diagonal().array() += kSpectralRidge * metric.trace() / dim;
      const MatrixD first = f.layer.spectral.transform[0].cast<double>();
      MatrixD first_metric = f.heads[0].importance.metric;
      first_metric.diagonal().array() += kSpectralRidge * first_metric.trace() / dim;
      const double factor = (first * first.transpose()).trace() / first_metric.trace();
      EXPECT_LT((t * t.transpose() - factor * metric).norm(), 1e-4 * factor * metric.norm());
    }
    EXPECT_NEAR(largest, 1.0, 1e-4);
    for (std::size_t h = 0; h < 2; ++h) {
      const double rms = std::sqrt(f.heads[h].v_moment.trace() / static_cast<double>(f.heads[h].tokens * dim));
      EXPECT_NEAR(static_cast<double>(f.layer.spectral.v_scale[h]), rms, 1e-6 * rms);
    }
  }
}

TEST(FitSpectral, IsDeterministic) {
  const Activations a = steep_layer(64, 400, 3);
  const SpectralLayer x = fitted(a).layer.spectral;
  const SpectralLayer y = fitted(a).layer.spectral;
  EXPECT_EQ(x.transform, y.transform);
  EXPECT_EQ(x.inverse, y.inverse);
  EXPECT_EQ(x.mean, y.mean);
  EXPECT_EQ(x.step, y.step);
  EXPECT_EQ(x.width, y.width);
  EXPECT_EQ(x.v_signs, y.v_signs);
  EXPECT_EQ(x.v_scale, y.v_scale);
}

// Mean over heads and rows of e M e^T / x M x^T: errors of logits against what tells keys apart.
double key_error(const Codec& codec, const Activations& held_out, const LayerArtifact& layer,
                 std::span<const HeadMoments> heads) {
  Activations& rows = const_cast<Activations&>(held_out);
  const int dim = layer.shape.k_dim;
  const Rope rope(layer.shape.rope, dim);
  const auto values = static_cast<std::size_t>(layer.shape.n_head_kv * dim);
  std::vector<std::uint8_t> code(codec.row_bytes());
  std::vector<float> decoded(values);
  EncodeStats stats;
  double error = 0;
  double size = 0;
  for (std::int64_t t = 0; t < held_out.tokens(); ++t) {
    const std::int32_t position = held_out.positions[static_cast<std::size_t>(t)];
    codec.encode({rows.k_row(t, 0), values}, position, code, stats);
    codec.decode(code, position, decoded);
    for (int h = 0; h < layer.shape.n_head_kv; ++h) {
      const MatrixD metric = heads[static_cast<std::size_t>(h)].q_moment / 1e3;
      const VectorD key = Eigen::Map<const VectorF>(rows.k_row(t, h), dim).cast<double>();
      VectorF mean = layer.k_mean_pre_rope.row(h);
      rope.apply({mean.data(), static_cast<std::size_t>(dim)}, position);
      const VectorD e = Eigen::Map<const VectorF>(decoded.data() + h * dim, dim).cast<double>() - key;
      const VectorD x = key - mean.cast<double>();
      error += (e * metric).dot(e);
      size += (x * metric).dot(x);
    }
  }
  return error / size;
}

TEST(FitSpectral, HigherRatesHaveSmallerErrors) {
  const Activations a = steep_layer(64, 1200, 11, RopePairing::neox, 0.97);
  const Activations held_out = steep_layer(64, 300, 12, RopePairing::neox, 0.97);
  const Fitted f = fitted(a);
  double before = 1;
  for (const double bits : kSpectralRates) {
    const LayerCodecs codecs = make_codecs(f.layer, spectral_recipe(bits));
    EXPECT_EQ(codecs.k->row_bytes(), 2 * static_cast<std::size_t>(bits * 64 / 8 + 1));
    const double error = key_error(*codecs.k, held_out, f.layer, f.heads);
    EXPECT_LT(error, 0.75 * before) << bits;
    before = error;
  }
  EXPECT_LT(before, 0.01);
  EXPECT_GT(before, 1e-5);
}

ModelMoments model_of(const Activations& a, std::vector<HeadMoments> heads) {
  ModelMoments m;
  m.model_fingerprint = "abc";
  m.n_layer = a.shape.layer + 1;
  m.shapes = {a.shape};
  m.layers = {std::move(heads)};
  m.date = "2026-01-02";
  return m;
}

// Why there is a second codec: keys with a steep spectrum under an anisotropic metric, the same rows, the same 2 bits.
TEST(FitSpectral, BeatsInt2OnSteepSpectra) {
  for (const RopePairing pairing : {RopePairing::none, RopePairing::norm, RopePairing::neox}) {
    const Activations a = steep_layer(64, 1500, 21, pairing);
    const Activations held_out = steep_layer(64, 300, 22, pairing);
    const std::vector<HeadMoments> heads = heads_of(a);
    FitOptions options;
    options.recipe = spectral_recipe();
    const Artifact artifact = fit(model_of(a, heads), options, nullptr);
    const LayerArtifact& layer = artifact.layers[0];
    Recipe int2 = options.recipe;
    int2.codec = "int2";
    const double spectral_error = key_error(*make_codecs(layer, options.recipe).k, held_out, layer, heads);
    const double int2_error = key_error(*make_codecs(layer, int2).k, held_out, layer, heads);
    EXPECT_LT(3 * spectral_error, int2_error) << spectral_error << " against " << int2_error;
    EXPECT_GT(spectral_error, 1e-4);
  }
}

// --- statistics that calibration should not give, but can ---

void expect_finite_codecs(const Fitted& f, const Activations& a) {
  expect_sound(f.layer.spectral, a.shape);
  for (const double bits : kSpectralRates) {
    EXPECT_TRUE(std::isfinite(key_error(*make_codecs(f.layer, spectral_recipe(bits)).k, a, f.layer, f.heads)));
  }
}

TEST(FitSpectral, KeysOfFewDimensionsAreCodedWell) {
  for (const RopePairing pairing : {RopePairing::none, RopePairing::neox}) {
    Activations a = steep_layer(64, 800, 31, pairing, 1.0);
    const Rope rope(a.shape.rope, 64);
    for (std::int64_t t = 0; t < a.tokens(); ++t) {
      for (int h = 0; h < 2; ++h) {  // 8 coordinates vary, the others are their mean
        std::span<float> row(a.k_row(t, h), 64);
        rope.undo(row, a.positions[static_cast<std::size_t>(t)]);
        for (std::size_t d = 0; d < 64; ++d) {
          if (d % 32 >= 4) row[d] = 2.0F;
        }
        rope.apply(row, a.positions[static_cast<std::size_t>(t)]);
      }
    }
    a.round_to_half();
    const Fitted f = fitted(a);
    expect_finite_codecs(f, a);
    // Offsets of the position mix turn what was constant; without RoPE the rank is what it was made to be.
    if (pairing == RopePairing::none) {
      EXPECT_THAT(f.warnings, testing::Contains(testing::HasSubstr("layer 5 head 1: its keys vary in 8 of 64 directions")));
    }
    EXPECT_LT(key_error(*make_codecs(f.layer, spectral_recipe()).k, a, f.layer, f.heads), 0.01);
  }
}

TEST(FitSpectral, WithoutAttentionKeysAreMeasuredPlainly) {
  const Activations a = steep_layer(64, 500, 41);
  const Fitted f = fitted(a, [](std::vector<HeadMoments>& heads) {
    heads[1].importance.metric.setZero();
    heads[1].importance.pair_weight = 0;
  });
  EXPECT_THAT(f.warnings, testing::ElementsAre(testing::AllOf(testing::HasSubstr("layer 5 head 1"),
                                                              testing::HasSubstr("no attention reached coded keys"))));
  expect_finite_codecs(f, a);
  EXPECT_LT(condition(f.layer.spectral.transform[1]), 1.0001);
}

TEST(FitSpectral, AOneDimensionalMetricStaysWellConditioned) {
  const Activations a = steep_layer(64, 500, 42);
  const Fitted f = fitted(a, [](std::vector<HeadMoments>& heads) {
    VectorD axis = VectorD::Zero(64);
    axis[3] = 100;
    axis[40] = -30;
    heads[0].importance.metric = axis.transpose() * axis;
  });
  EXPECT_THAT(f.warnings,
              testing::ElementsAre(testing::HasSubstr("layer 5 head 0: its queries reach coded keys in 1 of 64 directions")));
  expect_finite_codecs(f, a);
  EXPECT_GT(condition(f.layer.spectral.transform[0]), 0.9 * std::sqrt(1 + 64 / kSpectralRidge));
}

TEST(FitSpectral, ConstantKeysAreTheirMean) {
  for (const RopePairing pairing : {RopePairing::none, RopePairing::neox}) {
    Activations a = steep_layer(64, 500, 43, pairing);
    const Rope rope(a.shape.rope, 64);
    for (std::int64_t t = 0; t < a.tokens(); ++t) {
      std::span<float> row(a.k_row(t, 1), 64);
      for (std::size_t d = 0; d < 64; ++d) row[d] = 0.1F + 0.3F * static_cast<float>(d);
      if (pairing == RopePairing::none) continue;
      std::fill(row.begin(), row.end(), 0.0F);  // nothing else stays the same under RoPE and binary16
    }
    a.round_to_half();
    const Fitted f = fitted(a, [](std::vector<HeadMoments>& heads) {
      for (HeadMoments& head : heads) head.importance.joint *= 0.7371;  // so that sums are rounded
    });
    EXPECT_THAT(f.warnings, testing::ElementsAre("layer 5 head 1: its keys do not vary: they are stored as their mean"));
    expect_finite_codecs(f, a);
    const LayerCodecs codecs = make_codecs(f.layer, spectral_recipe());
    std::vector<std::uint8_t> code(codecs.k->row_bytes());
    std::vector<float> decoded(128);
    EncodeStats stats;
    codecs.k->encode({a.k_row(7, 0), 128}, a.positions[7], code, stats);
    codecs.k->decode(code, a.positions[7], decoded);
    for (std::size_t d = 0; d < 64; ++d) EXPECT_NEAR(decoded[64 + d], a.k_row(7, 1)[d], 2e-3F) << d;
    // What the constant head does not need goes to the other one.
    EXPECT_EQ(f.layer.spectral.width[1].row(1).sum(), 0.0F);
  }
}

TEST(FitSpectral, NothingAtAllIsStillALayer) {
  Activations a(layer_shape(0, 4, 2, 64), 100, 4);
  const Fitted f = fitted(a);
  EXPECT_EQ(f.warnings.size(), 4U);
  expect_sound(f.layer.spectral, a.shape);
  const Fitted no_samples = fitted(a, [](std::vector<HeadMoments>& heads) {
    for (HeadMoments& head : heads) {
      head.importance.joint.setZero();
      head.importance.sample_keys.clear();
      head.importance.sample_weights.clear();
      head.importance.sample_positions.clear();
    }
  });
  expect_sound(no_samples.layer.spectral, a.shape);
}

// --- as part of the whole fit ---

TEST(FitSpectral, NeedsImportance) {
  const Activations a = steep_layer(16, 1100, 51);
  std::vector<HeadMoments> heads = heads_of(a);
  for (HeadMoments& head : heads) head.importance = {};
  FitOptions options;
  const Artifact int2 = fit(model_of(a, heads), options, nullptr);
  EXPECT_TRUE(int2.layers[0].spectral.empty());
  options.recipe.codec = "spectral";
  try {
    fit(model_of(a, heads), options, nullptr);
    ADD_FAILURE() << "fitted without statistics";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("layer 5"), testing::HasSubstr("calibrate again")));
  }
}

// Output energies that put the noise of coded keys, relative to the output, at `relative` when K has `bits`.
std::vector<HeadMoments> with_noise(const Fitted& f, double bits, double relative) {
  std::vector<HeadMoments> heads = f.heads;
  double noise = 0;
  for (const HeadQuality& head : measure(f.layer, spectral_recipe(bits), f.heads)) noise += head.key_noise;
  for (HeadMoments& head : heads)
    head.importance.output_energy = noise / (relative * relative) / static_cast<double>(heads.size());
  return heads;
}

TEST(FitSpectral, TheVerdictNamesTheFlag) {
  const Activations a = steep_layer(64, 1100, 53, RopePairing::neox, 0.97);
  const Fitted f = fitted(a);
  const auto verdict = [&](double bits, double relative, const char* layer_bits = "none") {
    FitOptions options;
    options.recipe = spectral_recipe();
    set_rates(options.recipe, {std::nullopt, std::nullopt, parse_layer_rates(layer_bits)});
    FitReport report;
    fit(model_of(a, with_noise(f, bits, relative)), options, &report);
    return report;
  };
  using testing::HasSubstr;
  using testing::StartsWith;
  FitReport report = verdict(2, 0.09);
  EXPECT_THAT(report.verdict, StartsWith("go: coded keys add at most 9.0 % to a layer's output (layer 5)"));
  EXPECT_TRUE(report.advised_layer_bits.empty());
  report = verdict(2, 0.105);  // half a bit is enough
  EXPECT_THAT(report.verdict, StartsWith("go with --layer-bits 5:k2.5: coded keys add at most 10.5 %"));
  EXPECT_EQ(to_text(report.advised_layer_bits), "5:k2.5");
  report = verdict(2.5, 0.105);
  EXPECT_THAT(report.verdict, StartsWith("go with --layer-bits 5:k3: "));
  EXPECT_THAT(report.verdict, HasSubstr("--layer-bits 5:k3 makes it "));
  // What the recipe says already is kept; where it has the rate, nothing more is to be said.
  report = verdict(2.5, 0.105, "5:v3");
  EXPECT_THAT(report.verdict, StartsWith("go with --layer-bits 5:3: "));
  report = verdict(3, 0.095, "5:k3");
  EXPECT_THAT(report.verdict, StartsWith("go: coded keys add at most 9.5 %"));
  EXPECT_EQ(to_text(report.advised_layer_bits), "5:k3");
  report = verdict(3, 0.2);
  EXPECT_TRUE(report.go);
  EXPECT_THAT(report.verdict, testing::AllOf(StartsWith("go, with care: "), HasSubstr("--layer-bits 5:k3 makes it 20.0 %"),
                                             HasSubstr("even with 3 bits for K it stays over 10 % in layers 5")));
  report = verdict(3, 0.6);
  EXPECT_FALSE(report.go);
  EXPECT_THAT(report.verdict, StartsWith("no-go: even with 3 bits for K the noise stays over 50 % in layers 5"));
}

TEST(FitSpectral, TextThatHardlyVariesIsNoGo) {
  const Activations a = steep_layer(64, 1100, 54);
  std::vector<HeadMoments> heads = heads_of(a);
  const MatrixD v = heads[1].v_moment;
  heads[1].v_moment.setZero();
  heads[1].v_moment.topLeftCorner(31, 31) = v.topLeftCorner(31, 31);
  FitOptions options;
  options.recipe = spectral_recipe();
  FitReport report;
  fit(model_of(a, heads), options, &report);
  EXPECT_FALSE(report.go);
  EXPECT_EQ(report.verdict, "no-go: the values of layer 5 head 1 vary in 31 of 64 directions: calibrate on more varied text");
}

// Head sizes that the format cannot hold must not take int2 away.
TEST(FitSpectral, HeadSizesBeyondTheFormatLeaveInt2) {
  const Activations a = steep_layer(20, 1100, 52);
  FitOptions options;
  FitReport report;
  const Artifact artifact = fit(model_of(a, heads_of(a)), options, &report);
  EXPECT_TRUE(artifact.layers[0].spectral.empty());
  EXPECT_THAT(report.warnings, testing::Contains(testing::HasSubstr("layer 5: the spectral codec needs")));
  EXPECT_EQ(make_codecs(artifact.layers[0], artifact.recipe).v->head_dim(), 20);
  options.recipe.codec = "spectral";
  try {
    fit(model_of(a, heads_of(a)), options, nullptr);
    ADD_FAILURE() << "fitted values of 20 dimensions";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("layer 5"), testing::HasSubstr("codec int2")));
  }
}

}  // namespace
}  // namespace oscar
