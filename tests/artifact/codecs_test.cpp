// Recipe -> codecs of a layer, and where artifacts are found.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "artifact/sample.h"

namespace oscar {
namespace {

using test::error_of;
using test::sample_artifact;
using test::Scratch;
using testing::AllOf;
using testing::HasSubstr;

std::vector<std::uint8_t> encode(const Codec& codec, const MatrixF& row, std::int64_t position) {
  std::vector<std::uint8_t> code(codec.row_bytes());
  EncodeStats stats;
  codec.encode({row.data(), static_cast<std::size_t>(row.size())}, position, code, stats);
  return code;
}

TEST(MakeCodecs, GeometryAndGroups) {
  const Artifact artifact = sample_artifact();
  const LayerCodecs codecs = make_codecs(artifact.layers[2], artifact.recipe);
  EXPECT_EQ(codecs.k->n_head_kv(), 2);
  EXPECT_EQ(codecs.k->head_dim(), 16);
  EXPECT_EQ(codecs.v->head_dim(), 8);
  EXPECT_EQ(codecs.k->row_bytes(), 2U * (16 / 4 + 4));
  Recipe grouped = artifact.recipe;
  grouped.group_size = 8;
  EXPECT_EQ(make_codecs(artifact.layers[2], grouped).k->row_bytes(), 2U * 2 * (8 / 4 + 4));
}

TEST(MakeCodecs, RowsMeansAndOverridesMatter) {
  const Artifact artifact = sample_artifact();
  const LayerArtifact& layer = artifact.layers[2];
  const MatrixF row = test::random_rows(2, 16, 99);
  const auto code = [&](const std::function<void(Recipe&)>& change) {
    Recipe recipe = artifact.recipe;
    change(recipe);
    return encode(*make_codecs(layer, recipe).k, row, 777);
  };
  const auto base = code([](Recipe&) {});
  EXPECT_NE(code([](Recipe& r) { r.k_mean = MeanMode::none; }), base);
  EXPECT_NE(code([](Recipe& r) { r.k_mean = MeanMode::statical; }), base);
  EXPECT_NE(code([](Recipe& r) { r.clip_k = 0.5F; }), base);
  EXPECT_EQ(code([](Recipe& r) { r.clip_v = 0.5F; }), base);
  // The artifact's own per-head thresholds are used: head 0 has .96, head 1 has .9, and int(.9 * 16) < int(.96 * 16).
  const auto same = code([](Recipe& r) { r.clip_k = 0.96F; });
  const auto half = static_cast<std::ptrdiff_t>(base.size() / 2);
  EXPECT_TRUE(std::equal(base.begin(), base.begin() + half, same.begin()));
  EXPECT_FALSE(std::equal(base.begin() + half, base.end(), same.begin() + half));
  // A row equal to the mean at its position is coded as zero and decodes to the mean itself.
  for (const MeanMode mode : {MeanMode::statical, MeanMode::rope}) {
    Recipe recipe = artifact.recipe;
    recipe.k_mean = mode;
    MatrixF mean = mode == MeanMode::rope ? layer.k_mean_pre_rope : layer.k_mean;
    const Rope rope(layer.shape.rope, 16);
    for (Eigen::Index head = 0; head < 2 && mode == MeanMode::rope; ++head) rope.apply({mean.row(head).data(), 16}, 777);
    const LayerCodecs codecs = make_codecs(layer, recipe);
    MatrixF decoded(2, 16);
    codecs.k->decode(encode(*codecs.k, mean, 777), 777, {decoded.data(), 32});
    EXPECT_LT((decoded - mean).cwiseAbs().maxCoeff(), 1e-5F);
  }
}

TEST(MakeCodecs, WithoutRopeTheMeanIsAConstant) {
  Artifact artifact = sample_artifact();
  artifact.layers[2].shape.rope = {};
  const LayerCodecs codecs = make_codecs(artifact.layers[2], artifact.recipe);
  EXPECT_TRUE(codecs.k->key_mean(0).pre_rope.empty());
  ASSERT_EQ(codecs.k->key_mean(1).offset.size(), 16U);
  EXPECT_EQ(codecs.k->key_mean(1).offset[3], artifact.layers[2].k_mean_pre_rope(1, 3));
}

TEST(MakeCodecs, ErrorsNameTheLayer) {
  const Artifact artifact = sample_artifact();
  const auto error = [&](std::size_t layer, const std::function<void(LayerArtifact&, Recipe&)>& spoil) {
    LayerArtifact copy = artifact.layers[layer];
    Recipe recipe = artifact.recipe;
    spoil(copy, recipe);
    return error_of([&] { make_codecs(copy, recipe); });
  };
  EXPECT_THAT(error(1, [](LayerArtifact&, Recipe&) {}), AllOf(HasSubstr("layer 1"), HasSubstr("not calibrated")));
  EXPECT_THAT(error(2, [](LayerArtifact& l, Recipe&) { l.k_mean_pre_rope = MatrixF(); }),
              AllOf(HasSubstr("layer 2"), HasSubstr("mean")));
  EXPECT_THAT(error(2,
                    [](LayerArtifact& l, Recipe& r) {
                      l.v_mean = MatrixF();
                      r.v_mean = MeanMode::statical;
                    }),
              AllOf(HasSubstr("layer 2"), HasSubstr("value mean")));
  EXPECT_THAT(error(2, [](LayerArtifact&, Recipe& r) { r.v_mean = MeanMode::rope; }),
              AllOf(HasSubstr("layer 2"), HasSubstr("v_mean")));
  EXPECT_THAT(error(2, [](LayerArtifact&, Recipe& r) { r.clip_k = 1.5F; }), HasSubstr("layer 2"));
  EXPECT_THAT(error(2, [](LayerArtifact&, Recipe& r) { r.codec = "int5"; }), HasSubstr("int5"));
}

TEST(MakeCodecs, RivalsNeedNothingCalibratedButTheirMean) {
  const Artifact artifact = sample_artifact();
  Recipe recipe = artifact.recipe;
  recipe.codec = "sim:naive-int2";
  const LayerCodecs plain = make_codecs(artifact.layers[2], recipe);
  EXPECT_TRUE(plain.k->simulated());
  EXPECT_EQ(plain.k->head_dim(), 16);
  EXPECT_EQ(plain.v->head_dim(), 8);
  EXPECT_DOUBLE_EQ(plain.v->bits_per_element(), 2 + 32.0 / 8);
  const MatrixF row = test::random_rows(2, 16, 99);
  recipe.codec = "sim:naive-int2+mean";
  EXPECT_NE(encode(*make_codecs(artifact.layers[2], recipe).k, row, 777), encode(*plain.k, row, 777));
  LayerArtifact bare = artifact.layers[2];
  bare.k_mean_pre_rope = MatrixF();
  EXPECT_THAT(error_of([&] { make_codecs(bare, recipe); }), AllOf(HasSubstr("layer 2"), HasSubstr("mean")));
  recipe.codec = "sim:int2";
  EXPECT_THAT(error_of([&] { make_codecs(bare, recipe); }), AllOf(HasSubstr("sim:int2"), HasSubstr("naive-int2")));
}

TEST(MeanModes, NamesRoundTrip) {
  for (const MeanMode mode : {MeanMode::none, MeanMode::statical, MeanMode::rope})
    EXPECT_EQ(parse_mean_mode(to_string(mode)), mode);
  EXPECT_THAT(error_of([] { parse_mean_mode("statical"); }), HasSubstr("'statical'"));
}

class FindArtifact : public testing::Test {
 protected:
  void SetUp() override {
    ::unsetenv("OSCAR_ARTIFACT");
    ::setenv("OSCAR_CACHE_DIR", scratch_.path("cache").c_str(), 1);
    std::filesystem::create_directories(scratch_.path("cache/artifacts"));
  }
  void TearDown() override {
    ::unsetenv("OSCAR_ARTIFACT");
    ::unsetenv("OSCAR_CACHE_DIR");
  }
  Scratch scratch_;
};

TEST_F(FindArtifact, InOrder) {
  const auto model = scratch_.path("m.gguf");
  EXPECT_EQ(find_artifact(model, "", "f00d"), std::nullopt);
  const auto cached = scratch_.write("cache/artifacts/f00d.oscar.safetensors", "x");
  EXPECT_EQ(find_artifact(model, "", "f00d"), cached);
  EXPECT_EQ(find_artifact(model, "", "beef"), std::nullopt);
  EXPECT_EQ(find_artifact(model, "", ""), std::nullopt);
  const auto stem = scratch_.write("m.oscar.safetensors", "x");
  EXPECT_EQ(find_artifact(model, "", "f00d"), stem);
  const auto beside = scratch_.write("m.gguf.oscar.safetensors", "x");
  EXPECT_EQ(find_artifact(model, "", "f00d"), beside);
  const auto named = scratch_.write("named", "x");
  ::setenv("OSCAR_ARTIFACT", named.c_str(), 1);
  EXPECT_EQ(find_artifact(model, "", "f00d"), named);
  const auto given = scratch_.write("given", "x");
  EXPECT_EQ(find_artifact(model, given, "f00d"), given);
}

TEST_F(FindArtifact, ANamedArtifactMustExist) {
  EXPECT_THAT(error_of([&] { find_artifact("m.gguf", scratch_.path("gone"), ""); }), HasSubstr("gone"));
  ::setenv("OSCAR_ARTIFACT", scratch_.path("lost").c_str(), 1);
  EXPECT_THAT(error_of([&] { find_artifact("m.gguf", "", ""); }), AllOf(HasSubstr("OSCAR_ARTIFACT"), HasSubstr("lost")));
}

TEST_F(FindArtifact, CacheFolder) {
  EXPECT_EQ(cache_dir(), scratch_.path("cache"));
  ::unsetenv("OSCAR_CACHE_DIR");
  const std::string home = std::getenv("HOME") == nullptr ? "" : std::getenv("HOME");
  ::setenv("HOME", "/somewhere", 1);
  EXPECT_EQ(cache_dir(), "/somewhere/.cache/oscar");
  ::unsetenv("HOME");
  EXPECT_THAT(error_of([] { cache_dir(); }), HasSubstr("HOME"));
  ::setenv("HOME", home.c_str(), 1);
}

}  // namespace
}  // namespace oscar
