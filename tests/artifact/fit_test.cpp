#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <set>

#include "artifact/fit_clip.h"
#include "method/synthetic_layer.h"
#include "oscar/artifact/artifact.h"
#include "oscar/base/error.h"
#include "oscar/method/rotation.h"

namespace oscar {
namespace {

using test::Activations;
using test::collect;
using test::layer_shape;

ModelMoments model_of(const std::vector<Activations>& layers) {
  ModelMoments m;
  m.model_fingerprint = "abc";
  m.architecture = "llama";
  m.model_name = "test";
  m.date = "2026-01-02";
  for (const Activations& a : layers) {
    const MomentCollector collector = collect(a, 512);
    m.shapes.push_back(a.shape);
    m.layers.emplace_back(collector.heads().begin(), collector.heads().end());
    m.n_layer = a.shape.layer + 1;
  }
  m.sources = {{"text", "00ff", layers.front().tokens()}};
  return m;
}

Activations normal_layer(int layer, int dim, std::int64_t tokens, unsigned seed, RopePairing pairing = RopePairing::neox) {
  Activations a(layer_shape(layer, 4, 2, dim, pairing), tokens, 4);
  a.fill_normal(seed);
  return a;
}

FitOptions options(const std::string& k = "qqt_r_h_pbr", const std::string& v = "sst_r_h_pbr", bool per_head = true) {
  FitOptions o;
  o.recipe.k_objective = k;
  o.recipe.v_objective = v;
  o.recipe.per_head = per_head;
  return o;
}

TEST(Fit, EveryObjectiveAndCompositionGivesAValidArtifact) {
  const ModelMoments moments = model_of({normal_layer(0, 32, 1100, 1)});
  std::set<double> corners;  // different objectives must give different rotations
  for (const bool per_head : {true, false}) {
    for (const char* composition : {"plain", "br", "br_h128", "r_h", "h_r_pbr", "h_pbr_r", "r_h_pbr"}) {
      for (const auto& [k, v] : {std::pair("qqt", "sst"), std::pair("ktk", "oot"), std::pair("hadamard", "vtv")}) {
        const Artifact a = fit(
            moments, options(fmt::format("{}_{}", k, composition), fmt::format("{}_{}", v, composition), per_head), nullptr);
        ASSERT_EQ(a.layers[0].k_rotation.size(), per_head ? 2U : 1U);
        for (const MatrixF& r : a.layers[0].k_rotation) EXPECT_LT(orthogonality_error(r), 1e-5);
        for (const MatrixF& r : a.layers[0].v_rotation) EXPECT_LT(orthogonality_error(r), 1e-5);
        corners.insert(static_cast<double>(a.layers[0].v_rotation[0](3, 5)));
      }
    }
  }
  EXPECT_GT(corners.size(), 36U);
}

TEST(Fit, RotationsAreTheNamedProducts) {
  const ModelMoments moments = model_of({normal_layer(0, 32, 1100, 2)});
  const std::vector<HeadMoments>& heads = moments.layers[0];
  const auto close = [](const MatrixF& a, const MatrixD& b) { return (a.cast<double>() - b).cwiseAbs().maxCoeff() < 1e-6; };
  const Artifact own = fit(moments, options("qqt_r_h_pbr", "sst_r_h_pbr"), nullptr);
  for (std::size_t h = 0; h < 2; ++h) {
    const Eigen2 k = symmetric_eigen(heads[h].q_moment / static_cast<double>(heads[h].queries));
    const Eigen2 v = symmetric_eigen(heads[h].sst_moment / heads[h].sst_weight);
    EXPECT_TRUE(close(own.layers[0].k_rotation[h], k.vectors * hadamard(32) * bit_reversal(32)));
    EXPECT_TRUE(close(own.layers[0].v_rotation[h], v.vectors * hadamard(32) * bit_reversal(32)));
    EXPECT_NEAR(static_cast<double>(own.layers[0].k_eigenvalues(static_cast<Eigen::Index>(h), 31)), k.values[31],
                1e-6 * k.values[31]);
  }
  // A shared rotation diagonalises the mean over heads of the normalised moments.
  const Artifact shared = fit(moments, options("ktk_plain", "oot_plain", false), nullptr);
  const MatrixD k = 0.5 * (heads[0].k_moment + heads[1].k_moment) / static_cast<double>(heads[0].tokens);
  const MatrixD v = 0.5 * (heads[0].o_moment + heads[1].o_moment) / static_cast<double>(heads[0].queries);
  EXPECT_TRUE(close(shared.layers[0].k_rotation[0], symmetric_eigen(k).vectors));
  EXPECT_TRUE(close(shared.layers[0].v_rotation[0], symmetric_eigen(v).vectors));
  // Data-free: H exactly once, whether the composition names it or leaves its place to R.
  for (const char* name : {"hadamard_r_h_pbr", "hadamard_h_pbr", "hadamard_br"}) {
    const Artifact free = fit(moments, options(name, "vtv_r_h"), nullptr);
    EXPECT_TRUE(close(free.layers[0].k_rotation[0], hadamard(32) * bit_reversal(32))) << name;
    EXPECT_EQ(free.layers[0].k_eigenvalues, MatrixF::Ones(2, 32));
  }
}

TEST(Fit, MeansAreTheMeans) {
  Activations a = normal_layer(0, 16, 1200, 3);
  const Rope rope(a.shape.rope, 16);
  for (std::int64_t t = 0; t < a.tokens(); ++t) {
    for (int i = 0; i < 16; ++i) {
      a.k_row(t, 1)[i] += 2.0F + static_cast<float>(i);
      a.v_row(t, 1)[i] -= 3.0F;
    }
    rope.apply({a.k_row(t, 1), 16}, a.positions[static_cast<std::size_t>(t)]);
  }
  const LayerArtifact layer = fit(model_of({a}), options(), nullptr).layers[0];
  for (int i = 0; i < 16; ++i) {
    EXPECT_NEAR(static_cast<double>(layer.k_mean_pre_rope(1, i)), 2.0 + i, 0.15);
    EXPECT_NEAR(static_cast<double>(layer.v_mean(1, i)), -3.0, 0.15);
    EXPECT_NEAR(static_cast<double>(layer.v_mean(0, i)), 0.0, 0.15);
  }
  EXPECT_NEAR(static_cast<double>(layer.k_mean(1, 0)), 0.0, 0.15);  // RoPE averages the fast pairs away
  EXPECT_NEAR(static_cast<double>(layer.k_mean(1, 8)), 0.0, 0.15);
}

TEST(Fit, IsDeterministicAndIndependentOfThreadsAndReport) {
  const ModelMoments moments = model_of({normal_layer(0, 32, 1100, 4), normal_layer(1, 32, 1100, 5)});
  FitReport report;
  FitOptions alone = options();
  alone.threads = 1;
  const Artifact a = fit(moments, options(), &report);
  const Artifact b = fit(moments, alone, nullptr);
  ASSERT_EQ(a.layers.size(), 2U);
  for (std::size_t i = 0; i < 2; ++i) {
    for (std::size_t h = 0; h < 2; ++h) {
      EXPECT_EQ(a.layers[i].k_rotation[h], b.layers[i].k_rotation[h]);
      EXPECT_EQ(a.layers[i].v_rotation[h], b.layers[i].v_rotation[h]);
    }
    EXPECT_EQ(a.layers[i].clip_k, b.layers[i].clip_k);
    EXPECT_EQ(a.layers[i].clip_v, b.layers[i].clip_v);
    EXPECT_EQ(a.layers[i].k_mean_pre_rope, b.layers[i].k_mean_pre_rope);
  }
  EXPECT_EQ(a.date, "2026-01-02");
  EXPECT_EQ(a.provenance.dump(), b.provenance.dump());
  EXPECT_EQ(a.provenance["tokens"], 1100);
  EXPECT_EQ(report.rows.size(), 4U);
}

// The reported errors, recomputed with the artifact's own codecs from what a host would store.
TEST(Fit, ReportMatchesADirectMeasurement) {
  for (const MeanMode mode : {MeanMode::none, MeanMode::statical, MeanMode::rope}) {
    const Activations a = normal_layer(0, 32, 1100, 6);
    const ModelMoments moments = model_of({a});
    FitOptions o = options();
    o.recipe.k_mean = mode;
    o.recipe.v_mean = mode == MeanMode::rope ? MeanMode::statical : mode;
    FitReport report;
    const Artifact artifact = fit(moments, o, &report);
    const LayerCodecs codecs = make_codecs(artifact.layers[0], artifact.recipe);
    const std::vector<HeadMoments>& heads = moments.layers[0];
    double lost[2] = {0, 0}, whole[2] = {0, 0}, v_lost[2] = {0, 0}, v_whole[2] = {0, 0};
    std::vector<float> row(64), decoded(64);
    std::vector<std::uint8_t> code(codecs.k->row_bytes());
    EncodeStats stats;
    for (std::size_t i = 0; i < heads[0].sample_positions.size(); ++i) {
      const auto at = static_cast<Eigen::Index>(i);
      for (const bool key : {true, false}) {
        const Codec& codec = key ? *codecs.k : *codecs.v;
        for (std::size_t h = 0; h < 2; ++h)
          std::copy_n((key ? heads[h].k_samples : heads[h].v_samples).row(at).data(), 32, row.data() + 32 * h);
        codec.encode(row, heads[0].sample_positions[i], code, stats);
        codec.decode(code, heads[0].sample_positions[i], decoded);
        for (std::size_t h = 0; h < 2; ++h) {
          const VectorD x = Eigen::Map<const VectorF>(row.data() + 32 * h, 32).cast<double>();
          const VectorD e = Eigen::Map<const VectorF>(decoded.data() + 32 * h, 32).cast<double>() - x;
          if (key) {
            lost[h] += e * heads[h].q_moment * e.transpose();
            whole[h] += x * heads[h].q_moment * x.transpose();
          } else {
            v_lost[h] += e.squaredNorm();
            v_whole[h] += x.squaredNorm();
          }
        }
      }
    }
    for (std::size_t h = 0; h < 2; ++h) {
      EXPECT_NEAR(report.rows[h].k_error / (lost[h] / whole[h]), 1.0, 1e-5);
      EXPECT_NEAR(report.rows[h].v_error / (v_lost[h] / v_whole[h]), 1.0, 1e-5);
      EXPECT_GT(report.rows[h].k_error, 0.02);  // two bits cannot be free ...
      EXPECT_LT(report.rows[h].k_error, 0.4);   // ... nor useless on rows like these
      EXPECT_LT(report.rows[h].mean_share, 0.01);
      EXPECT_EQ(report.rows[h].flag, "");
    }
    EXPECT_TRUE(report.go);
    EXPECT_EQ(report.verdict, "go: no head is worrying");
  }
}

TEST(Fit, B3HugeKeyBiasIsFlaggedAndCentringCuresIt) {
  std::vector<Activations> layers;
  for (int layer = 0; layer < 4; ++layer) {
    Activations a(layer_shape(layer, 4, 2, 64), 1500, 4);
    std::mt19937 generator(static_cast<unsigned>(layer));
    std::normal_distribution<float> normal;
    for (auto* tensor : {&a.q, &a.k, &a.v, &a.o}) {
      for (float& x : *tensor) x = normal(generator);
    }
    const Rope rope(a.shape.rope, 64);
    for (std::int64_t t = 0; t < a.tokens(); ++t) {
      for (int h = 0; h < 2; ++h) {
        float* row = a.k_row(t, h);
        if (layer == 0 || layer == 3) {
          for (const int channel : {5, 20, 40, 63}) row[channel] += 450.0F;  // norm 900
        }
        rope.apply({row, 64}, a.positions[static_cast<std::size_t>(t)]);
      }
    }
    layers.push_back(std::move(a));
  }
  const ModelMoments moments = model_of(layers);
  for (const MeanMode mode : {MeanMode::none, MeanMode::statical}) {
    FitOptions o = options();
    o.recipe.k_mean = mode;
    FitReport report;
    fit(moments, o, &report);
    for (const FitReport::Row& row : report.rows) {
      const bool biased = row.layer == 0 || row.layer == 3;
      EXPECT_EQ(!row.flag.empty(), biased) << "layer " << row.layer << ": " << row.flag;
      EXPECT_NEAR(row.mean_share, biased ? 1.0 : 0.0, 0.01);
    }
    EXPECT_THAT(report.rows[0].flag, testing::HasSubstr("of the key energy is its mean"));
    EXPECT_THAT(report.rows[0].flag, testing::HasSubstr("keep this layer at 16 bit"));
    EXPECT_FALSE(report.go);
    EXPECT_THAT(report.verdict, testing::AllOf(testing::StartsWith("no-go"), testing::HasSubstr("layers 0, 3")));
  }
  FitReport centred;
  fit(moments, options(), &centred);
  EXPECT_TRUE(centred.go);
  for (const FitReport::Row& row : centred.rows) EXPECT_EQ(row.flag, "");
  EXPECT_THAT(centred.verdict, testing::StartsWith("go"));
}

// Four heads, each of which lives on an axis of its own. The layer's mean moment sees four equal axes and mixes them.
TEST(Fit, B4OrthogonalHeadsAskForPerHeadRotations) {
  const int dim = 64;
  Activations a(layer_shape(0, 8, 4, dim, RopePairing::none), 3000, 4);
  std::mt19937 generator(7);
  std::normal_distribution<float> normal;
  MatrixD x(2 * dim, dim);
  for (Eigen::Index i = 0; i < x.size(); ++i) x.data()[i] = static_cast<double>(normal(generator));
  const MatrixF axes = symmetric_eigen(x.transpose() * x).vectors.cast<float>();
  const auto fill = [&](float* row, int axis, float strength, float noise) {
    const float along = normal(generator) > 0 ? strength : -strength;
    for (int d = 0; d < dim; ++d) row[d] = along * axes(d, axis) + noise * normal(generator);
  };
  for (std::int64_t t = 0; t < a.tokens(); ++t) {
    for (int h = 0; h < 8; ++h) {
      fill(a.q_row(t, h), 16 * (h / 2), 3.0F, 0.5F);
      fill(a.o_row(t, h), 16 * (h / 2), 8.0F, 0.02F);
    }
    for (int h = 0; h < 4; ++h) {
      fill(a.k_row(t, h), 16 * h, 8.0F, 0.02F);
      fill(a.v_row(t, h), 16 * h, 8.0F, 0.02F);
    }
  }
  const ModelMoments moments = model_of({a});
  FitOptions per_head = options();
  per_head.recipe.k_mean = MeanMode::none;
  FitOptions shared = per_head;
  shared.recipe.per_head = false;
  FitReport own;
  FitReport common;
  fit(moments, per_head, &own);
  fit(moments, shared, &common);
  double own_k = 0, own_v = 0, common_k = 0, common_v = 0;
  for (std::size_t h = 0; h < 4; ++h) {
    own_k += own.rows[h].k_error;
    own_v += own.rows[h].v_error;
    common_k += common.rows[h].k_error;
    common_v += common.rows[h].v_error;
    EXPECT_LT(own.rows[h].head_overlap, 0.7);
  }
  EXPECT_LT(own_k, 0.2 * common_k) << own_k << " against " << common_k;
  EXPECT_LT(own_v, 0.2 * common_v) << own_v << " against " << common_v;
  EXPECT_TRUE(own.warnings.empty());
  EXPECT_THAT(common.warnings,
              testing::Contains(testing::AllOf(testing::HasSubstr("key error"), testing::HasSubstr("use per-head rotations"))));
  EXPECT_THAT(common.warnings, testing::Contains(testing::AllOf(testing::HasSubstr("value error"),
                                                                testing::HasSubstr("use per-head rotations"))));
}

TEST(Fit, SimilarHeadsNeedNoPerHeadRotations) {
  const ModelMoments moments = model_of({normal_layer(0, 64, 1500, 8)});
  FitReport report;
  fit(moments, options("qqt_r_h_pbr", "sst_r_h_pbr", false), &report);
  EXPECT_TRUE(report.warnings.empty());
  EXPECT_EQ(report.rows[0].clip_k, report.rows[1].clip_k);
  for (const FitReport::Row& row : report.rows) EXPECT_GT(row.head_overlap, 0.8);
}

TEST(Fit, B5TooFewTokensAreRefused) {
  const ModelMoments moments = model_of({normal_layer(0, 16, 12, 9)});
  try {
    fit(moments, options(), nullptr);
    ADD_FAILURE() << "a corpus of 12 tokens was accepted";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(),
                testing::AllOf(testing::HasSubstr("12 tokens"), testing::HasSubstr("1024"), testing::HasSubstr("more text")));
  }
  FitOptions low = options();
  low.token_floor = 12;
  FitReport report;
  fit(moments, low, &report);
  EXPECT_THAT(report.warnings, testing::Contains(testing::HasSubstr("rank 12 of 16")));  // values: 12 rows in 16 dimensions
}

TEST(Fit, B1DegenerateChannelsStillGiveRotations) {
  Activations a = normal_layer(2, 16, 1100, 10, RopePairing::none);
  for (std::int64_t t = 0; t < a.tokens(); ++t) {
    for (int h = 0; h < 4; ++h) a.q_row(t, h)[7] = 0.0F;
    for (int h = 0; h < 2; ++h) a.k_row(t, h)[7] = 0.0F;
    std::fill_n(a.v_row(t, 1), 16, 0.0F);
  }
  FitReport report;
  const Artifact artifact = fit(model_of({a}), options(), &report);
  for (const LayerArtifact& layer : artifact.layers) {
    for (const auto& rotations : {layer.k_rotation, layer.v_rotation}) {
      for (const MatrixF& r : rotations) {
        EXPECT_TRUE(r.allFinite());
        EXPECT_LT(orthogonality_error(r), 1e-5);
      }
    }
  }
  EXPECT_THAT(report.warnings, testing::Contains("layer 2 head 0: the qqt moment has channels that are always zero: 7"));
  EXPECT_THAT(report.warnings,
              testing::Contains("layer 2 head 1: the sst moment is zero everywhere: its rotation is arbitrary"));
  for (const FitReport::Row& row : report.rows) {
    EXPECT_TRUE(std::isfinite(row.k_error));
    EXPECT_TRUE(std::isfinite(row.v_error));
  }
  EXPECT_EQ(report.rows[1].v_error, 0.0);  // zeros are coded exactly
}

TEST(Fit, SlidingWindowLayersStayEmpty) {
  ModelMoments moments = model_of({normal_layer(1, 16, 1100, 11)});
  LayerShape window = layer_shape(0, 4, 2, 16);
  window.sliding_window = true;
  moments.shapes.insert(moments.shapes.begin(), window);
  moments.layers.insert(moments.layers.begin(), {{}});
  const Artifact artifact = fit(moments, options(), nullptr);
  ASSERT_EQ(artifact.layers.size(), 2U);
  EXPECT_TRUE(artifact.layers[0].k_rotation.empty());
  EXPECT_EQ(artifact.layers[1].k_rotation.size(), 2U);
  moments.shapes[0].sliding_window = false;  // then its moments are missing
  EXPECT_THROW(fit(moments, options(), nullptr), Error);
}

TEST(Fit, GivenClipsReplaceFittedOnes) {
  FitOptions o = options();
  o.recipe.clip_k = 0.96F;
  o.recipe.clip_v = 0.0F;
  const LayerArtifact layer = fit(model_of({normal_layer(0, 16, 1100, 12)}), o, nullptr).layers[0];
  EXPECT_EQ(layer.clip_k, (std::vector<float>{0.96F, 0.96F}));
  EXPECT_EQ(layer.clip_v, (std::vector<float>{0.0F, 0.0F}));
}

TEST(Fit, RefusesRecipesThatCannotBe) {
  const ModelMoments moments = model_of({normal_layer(0, 16, 1100, 13)});
  EXPECT_THROW(fit(moments, options("sst_r_h_pbr", "sst_r_h_pbr"), nullptr), Error);
  EXPECT_THROW(fit(moments, options("qqt_r_h_pbr", "ktk_r_h_pbr"), nullptr), Error);
  EXPECT_THROW(fit(moments, options("qqt_x", "sst_r_h_pbr"), nullptr), Error);
  FitOptions o = options();
  o.recipe.v_mean = MeanMode::rope;
  EXPECT_THROW(fit(moments, o, nullptr), Error);
  o = options();
  o.recipe.codec = "fp8";
  EXPECT_THROW(fit(moments, o, nullptr), Error);
  EXPECT_THROW(fit(ModelMoments{}, options(), nullptr), Error);
}

// A threshold must follow the rows: rows that lie on a grid want none, rows with rare giants want the giants cut ...
TEST(FitClip, FollowsTheRows) {
  std::mt19937 generator(1);
  std::uniform_real_distribution<float> even(-1.0F, 1.0F);
  ClipSamples samples;
  samples.rotated.resize(200, 64);
  for (Eigen::Index i = 0; i < samples.rotated.size(); ++i) {
    samples.rotated.data()[i] = (i % 16 == 0 ? 3.0F : 1.0F) * (even(generator) > 0.0F ? 1.0F : -1.0F);
  }
  samples.rotated.col(0).setConstant(-3.0F);
  samples.rotated.col(16).setConstant(3.0F);
  EXPECT_EQ(fit_clip({samples}, 0), 0.0F);
  std::student_t_distribution<float> heavy(3.0F);
  for (Eigen::Index i = 0; i < samples.rotated.size(); ++i) samples.rotated.data()[i] = heavy(generator);
  const float strong = fit_clip({samples}, 0);
  EXPECT_GT(strong, 0.0F);
  EXPECT_LE(strong, 0.94F);
  // ... unless the giant is what queries look at.
  for (Eigen::Index i = 0; i < samples.rotated.rows(); ++i) {
    for (int d = 0; d < 64; ++d) samples.rotated(i, d) = d == 9 ? 30.0F : even(generator);
  }
  samples.metric = MatrixD::Zero(64, 64);
  samples.metric(9, 9) = 1.0;
  EXPECT_EQ(fit_clip({samples}, 0), 0.0F);
  samples.metric = MatrixD::Identity(64, 64);
  samples.metric(9, 9) = 0.0;
  EXPECT_GT(fit_clip({samples}, 0), 0.0F);
  samples.rotated.resize(0, 64);
  EXPECT_EQ(fit_clip({samples}, 0), 0.0F);
}

}  // namespace
}  // namespace oscar
