// The spectral codec in an artifact: its tensors in the file, what is refused, recipes, and files of before it existed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "artifact/sample.h"
#include "oscar/codec/spectral.h"
#include "oscar/io/safetensors.h"
#include "oscar/io/sha256.h"

namespace oscar {
namespace {

using test::error_of;
using test::Scratch;
using testing::AllOf;
using testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

SpectralLayer sample_spectral(unsigned seed) {
  SpectralLayer s;
  for (unsigned h = 0; h < 2; ++h) {
    const MatrixF rotation = test::random_rotation(16, seed + h);
    VectorF scale(16);
    for (Eigen::Index d = 0; d < 16; ++d) scale[d] = 1.0F / static_cast<float>(1 + d);
    s.transform.emplace_back(rotation * scale.asDiagonal());
    s.inverse.emplace_back(scale.cwiseInverse().asDiagonal() * rotation.transpose());
  }
  s.mean = test::random_rows(2, 16, seed + 10);
  s.inverse_sigma = MatrixF::Zero(2, 16);
  s.inverse_sigma.leftCols(8).setConstant(2.0F);
  for (unsigned w = 0; w < 4; ++w) s.step.emplace_back(test::random_rows(2, 16, seed + 20 + w).cwiseAbs().array() + 0.1F);
  for (const float rate : {1.5F, 2.0F, 2.5F, 3.0F}) {
    MatrixF width = MatrixF::Constant(2, 16, 2.0F);  // 16 digits a head, and what the rate adds goes to the first one
    if (rate > 2.0F) width.row(0).setConstant(4.0F);
    s.width.push_back(std::move(width));
  }
  s.v_signs = test::random_rows(2, 16, seed + 30).cwiseSign();
  s.v_scale = {0.5F, 2.0F};
  return s;
}

// The sample artifact with values of 16 dimensions, and the spectral codec in both of its layers.
Artifact spectral_artifact() {
  Artifact artifact = test::sample_artifact();
  for (LayerArtifact& layer : artifact.layers) {
    layer.shape.v_dim = 16;
    if (layer.k_rotation.empty()) continue;
    const auto seed = static_cast<unsigned>(100 * layer.shape.layer + 50);
    layer.v_rotation = {test::random_rotation(16, seed), test::random_rotation(16, seed + 1)};
    layer.v_mean = test::random_rows(2, 16, seed + 2);
    layer.spectral = sample_spectral(seed + 3);
  }
  artifact.recipe.codec = "spectral";
  artifact.recipe.k_bits = 2.5;
  artifact.recipe.v_bits = 1.5;
  return artifact;
}

void expect_equal(const SpectralLayer& a, const SpectralLayer& b) {
  EXPECT_EQ(a.transform, b.transform);
  EXPECT_EQ(a.inverse, b.inverse);
  EXPECT_EQ(a.mean, b.mean);
  EXPECT_EQ(a.inverse_sigma, b.inverse_sigma);
  EXPECT_EQ(a.step, b.step);
  EXPECT_EQ(a.width, b.width);
  EXPECT_EQ(a.v_signs, b.v_signs);
  EXPECT_EQ(a.v_scale, b.v_scale);
}

void write_with_digest(SafeTensors file, nlohmann::json metadata, const std::filesystem::path& path) {
  metadata.erase("digest");
  Sha256 hash;
  hash.update(metadata.dump());
  for (const auto& [name, tensor] : file.tensors) {
    hash.update(name);
    hash.update(tensor.bytes);
  }
  metadata["digest"] = hash.hex();
  file.metadata["oscar"] = metadata.dump();
  write_safetensors(file, path);
}

// Saves, lets `edit` change the file's parts under a digest that is right, and returns the error of loading the result.
std::string error_after(const std::function<void(SafeTensors&, nlohmann::json&)>& edit) {
  const Scratch scratch;
  Artifact artifact = spectral_artifact();
  const auto path = scratch.path("edited.safetensors");
  save_artifact(artifact, path);
  SafeTensors file = read_safetensors(path);
  nlohmann::json metadata = nlohmann::json::parse(file.metadata.at("oscar"));
  edit(file, metadata);
  write_with_digest(file, metadata, path);
  return error_of([&] { load_artifact(path); });
}

TEST(SpectralArtifact, RoundTripIsExactAndReproducible) {
  const Scratch scratch;
  Artifact artifact = spectral_artifact();
  save_artifact(artifact, scratch.path("a"));
  const Artifact loaded = load_artifact(scratch.path("a"));
  EXPECT_EQ(loaded.recipe.codec, "spectral");
  EXPECT_EQ(loaded.recipe.k_bits, 2.5);
  EXPECT_EQ(loaded.recipe.v_bits, 1.5);
  ASSERT_EQ(loaded.layers.size(), 3U);
  EXPECT_TRUE(loaded.layers[1].spectral.empty());
  for (const std::size_t layer : {0U, 2U}) expect_equal(loaded.layers[layer].spectral, artifact.layers[layer].spectral);
  Artifact again = loaded;
  save_artifact(again, scratch.path("b"));
  EXPECT_EQ(test::slurp(scratch.path("a")), test::slurp(scratch.path("b")));
}

TEST(SpectralArtifact, FileIsWhatTheHeaderSpecifies) {
  const Scratch scratch;
  Artifact artifact = spectral_artifact();
  save_artifact(artifact, scratch.path("a"));
  const SafeTensors file = read_safetensors(scratch.path("a"));
  using Shape = std::vector<std::int64_t>;
  const std::map<std::string, Shape> expected = {
      {"transform", {2, 16, 16}}, {"inverse", {2, 16, 16}}, {"mean", {2, 16}},    {"inverse_sigma", {2, 16}},
      {"step", {4, 2, 16}},       {"width", {4, 2, 16}},    {"v_signs", {2, 16}}, {"v_scale", {2}},
  };
  for (const char* layer : {"layers.0.spectral.", "layers.2.spectral."}) {
    for (const auto& [name, shape] : expected) EXPECT_EQ(file.tensors.at(layer + name).shape, shape) << name;
  }
  EXPECT_EQ(file.tensors.size(), 2U * (8 + expected.size()));
  const nlohmann::json metadata = nlohmann::json::parse(file.metadata.at("oscar"));
  EXPECT_EQ(metadata.at("format_version"), 2);
  EXPECT_EQ(metadata.at("recipe").at("codec"), "spectral");
  EXPECT_EQ(metadata.at("recipe").at("k_bits"), 2.5);
  EXPECT_EQ(metadata.at("recipe").at("v_bits"), 1.5);
}

TEST(SpectralArtifact, BrokenTensorsAreRefusedByName) {
  const std::vector<std::string> names = {"transform", "inverse", "mean",    "inverse_sigma",
                                          "step",      "width",   "v_signs", "v_scale"};
  for (const std::string& name : names) {
    SCOPED_TRACE(name);
    const std::string tensor = "layers.2.spectral." + name;
    const auto names_it = AllOf(HasSubstr("layer"), HasSubstr("2"), HasSubstr("spectral." + name));
    EXPECT_THAT(error_after([&](SafeTensors& f, nlohmann::json&) { f.tensors.erase(tensor); }), names_it);
    EXPECT_THAT(error_after([&](SafeTensors& f, nlohmann::json&) { f.tensors.at(tensor).dtype = "I32"; }), names_it);
    EXPECT_THAT(error_after([&](SafeTensors& f, nlohmann::json&) {  // one dimension too many
                  f.tensors.at(tensor).shape.insert(f.tensors.at(tensor).shape.begin(), 1);
                }),
                names_it);
    EXPECT_THAT(error_after([&](SafeTensors& f, nlohmann::json&) {  // half of it is missing
                  SafeTensor& t = f.tensors.at(tensor);
                  t.shape.front() /= 2;
                  t.bytes.resize(t.bytes.size() / 2);
                }),
                names_it);
    if (name != "v_scale") {
      EXPECT_THAT(error_after([&](SafeTensors& f, nlohmann::json&) {  // rows of half the size
                    SafeTensor& t = f.tensors.at(tensor);
                    t.shape.back() /= 2;
                    t.bytes.resize(t.bytes.size() / 2);
                  }),
                  names_it);
    }
  }
  // Spectral tensors of a layer that has no transform, whichever they are.
  for (const std::string& kept : names) {
    SCOPED_TRACE(kept);
    const std::string error = error_after([&](SafeTensors& f, nlohmann::json& metadata) {
      metadata["recipe"]["codec"] = "int2";
      for (const std::string& name : names) {
        if (name != kept) f.tensors.erase("layers.2.spectral." + name);
      }
    });
    EXPECT_THAT(error, AllOf(HasSubstr("layer 2"), HasSubstr("spectral.")));
  }
}

TEST(SpectralArtifact, ValidateNamesLayerAndCause) {
  const auto check = [](const std::function<void(SpectralLayer&)>& spoil, const std::string& cause) {
    for (const char* codec : {"spectral", "int2"}) {  // whatever the recipe runs, another may be asked for
      Artifact artifact = spectral_artifact();
      artifact.recipe.codec = codec;
      validate(artifact);
      spoil(artifact.layers[2].spectral);
      EXPECT_THAT(error_of([&] { validate(artifact); }), AllOf(HasSubstr("layer 2"), HasSubstr(cause)));
    }
  };
  check([](SpectralLayer& s) { s.transform[1](3, 3) = kNan; }, "spectral.transform holds NaN");
  check([](SpectralLayer& s) { s.inverse[0] *= 1.1F; }, "head 0: its inverse transform is not the inverse");
  check(
      [](SpectralLayer& s) {  // an inverse all right, but what passes through it loses 4 of 7 digits
        s.transform[1].col(0) *= 3e3F;
        s.inverse[1].row(0) /= 3e3F;
      },
      "head 1: its transform is ill-conditioned");
  check([](SpectralLayer& s) { s.mean(0, 0) = kNan; }, "spectral.mean holds NaN");
  check([](SpectralLayer& s) { s.inverse_sigma(1, 2) = -1.0F; }, "head 1: a sigma");
  check([](SpectralLayer& s) { s.step[0](0, 3) = 0.0F; }, "head 0: a step is not positive");
  check([](SpectralLayer& s) { s.step[1](0, 3) = -1.0F; }, "head 0: a step is not positive");  // of the higher rates only
  check([](SpectralLayer& s) { s.step[3](1, 3) = kNan; }, "spectral.step holds NaN");          // of no rate at all
  check([](SpectralLayer& s) { s.width[1](0, 0) = 3.0F; }, "spectral.width holds something else than 0, 2, 4, 6 and 8");
  check([](SpectralLayer& s) { s.width[1](0, 0) = 4.0F; }, "head 0: the coordinates of a quad have different widths");
  check([](SpectralLayer& s) { s.width[3].row(1).head(4).setConstant(6.0F); }, "digits are not a multiple of 16");
  check([](SpectralLayer& s) { s.v_signs(1, 1) = 0.5F; }, "+1 and -1");
  check([](SpectralLayer& s) { s.v_scale[1] = 0.0F; }, "positive scales");
  check(
      [](SpectralLayer& s) {
        s = {};
        s.v_scale = {1.0F, 1.0F};
      },
      "spectral.transform");
  Artifact bare = spectral_artifact();
  bare.layers[2].spectral = {};
  EXPECT_THAT(error_of([&] { validate(bare); }), AllOf(HasSubstr("layer 2"), HasSubstr("codec needs")));
  bare.recipe.codec = "int2";
  validate(bare);
  Artifact rates = spectral_artifact();
  rates.recipe.k_bits = 4;
  EXPECT_THAT(error_of([&] { validate(rates); }), HasSubstr("4 bits are not 1.5, 2, 2.5 or 3"));
  rates = spectral_artifact();
  rates.layers[2].k_mean_pre_rope = MatrixF();
  EXPECT_THAT(error_of([&] { validate(rates); }), AllOf(HasSubstr("layer 2"), HasSubstr("k_mean_pre_rope is missing")));
}

// As OSCAR 0.1 wrote them.
TEST(SpectralArtifact, Version1IsStillRead) {
  const Scratch scratch;
  const auto path = scratch.path("old");
  Artifact artifact = test::sample_artifact();
  save_artifact(artifact, path);
  const SafeTensors file = read_safetensors(path);
  nlohmann::json metadata = nlohmann::json::parse(file.metadata.at("oscar"));
  metadata["format_version"] = 1;
  metadata["recipe"].erase("k_bits");
  metadata["recipe"].erase("v_bits");
  write_with_digest(file, metadata, path);
  const Artifact old = load_artifact(path);
  EXPECT_EQ(old.recipe.codec, "int2");
  EXPECT_EQ(old.recipe.k_bits, 2.0);
  EXPECT_EQ(old.recipe.v_bits, 2.0);
  EXPECT_EQ(old.layers[2].k_rotation, artifact.layers[2].k_rotation);
  EXPECT_TRUE(old.layers[2].spectral.empty());
  EXPECT_EQ(make_codecs(old.layers[2], old.recipe).k->name(), "int2");
  metadata["format_version"] = 2;  // then the rates must be there
  write_with_digest(file, metadata, path);
  EXPECT_THAT(error_of([&] { load_artifact(path); }), HasSubstr("k_bits"));
}

TEST(SpectralArtifact, StateDigestTellsRecipesApart) {
  const Scratch scratch;
  Artifact artifact = spectral_artifact();
  save_artifact(artifact, scratch.path("a"));
  const Recipe base = artifact.recipe;
  const std::uint64_t digest = state_digest(artifact, base);
  EXPECT_EQ(state_digest(artifact, Recipe(base)), digest);
  std::set<std::uint64_t> seen{digest};
  const auto differs = [&](const std::function<void(Recipe&)>& change) {
    Recipe recipe = base;
    change(recipe);
    EXPECT_TRUE(seen.insert(state_digest(artifact, recipe)).second);
  };
  differs([](Recipe& r) { r.codec = "int2"; });
  differs([](Recipe& r) { r.k_bits = 2.0; });
  differs([](Recipe& r) { r.v_bits = 2.0; });
  differs([](Recipe& r) { r.k_mean = MeanMode::none; });
  differs([](Recipe& r) { set_rates(r, {std::nullopt, std::nullopt, parse_layer_rates("0:3")}); });
  differs([](Recipe& r) { set_rates(r, {std::nullopt, std::nullopt, parse_layer_rates("0:k3")}); });
  Recipe same = base;  // K of layer 2 has 2.5 bits anyway
  set_rates(same, {std::nullopt, std::nullopt, parse_layer_rates("2:k2.5")});
  EXPECT_EQ(state_digest(artifact, same), digest);
  artifact.layers[2].spectral.v_signs(0, 0) *= -1.0F;
  save_artifact(artifact, scratch.path("b"));
  EXPECT_TRUE(seen.insert(state_digest(artifact, base)).second);
}

TEST(SpectralCodecs, AreTheRecipes) {
  const Artifact artifact = spectral_artifact();
  const LayerCodecs codecs = make_codecs(artifact.layers[2], artifact.recipe);
  EXPECT_EQ(codecs.k->name(), "spectral");
  EXPECT_EQ(codecs.v->name(), "spectral");
  EXPECT_EQ(codecs.k->row_bytes(), 8U + 4 + 2);                               // 32 digits in head 0, 16 in head 1
  EXPECT_EQ(codecs.v->row_bytes(), 2U * static_cast<unsigned>(1.5 * 2 + 1));  // 24 bits a head
  EXPECT_EQ(codecs.k->key_mean(1).pre_rope.size(), 16U);
  EXPECT_EQ(codecs.k->key_mean(1).offset[3], artifact.layers[2].spectral.mean(1, 3));
  EXPECT_EQ(codecs.k->key_mean(1).pre_rope[3], artifact.layers[2].k_mean_pre_rope(1, 3));
  Recipe other = artifact.recipe;
  other.k_bits = 2;
  other.v_bits = 3;
  EXPECT_EQ(make_codecs(artifact.layers[2], other).k->row_bytes(), 4U + 4 + 2);
  EXPECT_EQ(make_codecs(artifact.layers[2], other).v->row_bytes(), 2U * (6 + 1));
  other.codec = "int2";
  EXPECT_EQ(make_codecs(artifact.layers[2], other).k->name(), "int2");
}

TEST(SpectralCodecs, LayersMayHaveTheirOwnRates) {
  const Scratch scratch;
  Artifact artifact = spectral_artifact();
  set_rates(artifact.recipe, {std::nullopt, std::nullopt, parse_layer_rates("0:k2,2:3")});
  save_artifact(artifact, scratch.path("a"));
  const Artifact loaded = load_artifact(scratch.path("a"));
  EXPECT_EQ(to_text(loaded.recipe.layer_bits), "0:k2,2:3");
  const LayerCodecs first = make_codecs(loaded.layers[0], loaded.recipe);
  const LayerCodecs last = make_codecs(loaded.layers[2], loaded.recipe);
  EXPECT_EQ(first.k->row_bytes(), 4U + 4 + 2);  // K 2, V 1.5
  EXPECT_EQ(first.v->row_bytes(), 2U * (3 + 1));
  EXPECT_EQ(last.k->row_bytes(), 8U + 4 + 2);  // K 3, V 3
  EXPECT_EQ(last.v->row_bytes(), 2U * (6 + 1));
  const Rates mean = mean_rates(loaded, loaded.recipe);
  EXPECT_EQ(mean.k, 2.5);
  EXPECT_EQ(mean.v, 2.25);
}

TEST(SpectralCodecs, GivenRatesHoldForAllLayersAndGivenLayersReplaceTheRecipes) {
  Recipe recipe = spectral_artifact().recipe;  // K 2.5, V 1.5
  const auto given = [&](std::optional<double> k, std::optional<double> v, const char* layers) {
    GivenRates rates{k, v, std::nullopt};
    if (layers != nullptr) rates.layers = parse_layer_rates(layers);
    set_rates(recipe, rates);
    return fmt::format("{} {} {}", recipe.k_bits, recipe.v_bits, to_text(recipe.layer_bits));
  };
  EXPECT_EQ(given({}, {}, "0:3,2:2.5/3"), "2.5 1.5 0:3,2:v3");
  EXPECT_EQ(given({}, {}, nullptr), "2.5 1.5 0:3,2:v3");
  EXPECT_EQ(given(2.0, {}, nullptr), "2 1.5 0:v3,2:v3");
  EXPECT_EQ(given({}, 3.0, nullptr), "2 3 none");
  EXPECT_EQ(given(1.5, {}, "0:k3"), "1.5 3 0:k3");
  EXPECT_EQ(given({}, {}, "none"), "1.5 3 none");
}

TEST(SpectralCodecs, LayersThatAreNotCodedTakeNoRate) {
  Artifact artifact = spectral_artifact();
  const auto error = [&](const char* layers) {
    artifact.recipe.layer_bits = parse_layer_rates(layers);
    return error_of([&] { validate(artifact); });
  };
  EXPECT_THAT(error("2-3:3"), AllOf(HasSubstr("names layer 3"), HasSubstr("its layers are 0 to 2")));
  EXPECT_THAT(error("0-2:3"), AllOf(HasSubstr("names layer 1"), HasSubstr("sliding window")));
  EXPECT_THAT(error_after([](SafeTensors&, nlohmann::json& metadata) { metadata["recipe"]["layer_bits"] = "0:7"; }),
              HasSubstr("gives '7' bits"));
}

TEST(SpectralCodecs, WithoutRopeTheMeanIsAConstant) {
  Artifact artifact = spectral_artifact();
  artifact.layers[2].shape.rope = {};
  const LayerCodecs codecs = make_codecs(artifact.layers[2], artifact.recipe);
  EXPECT_TRUE(codecs.k->key_mean(0).pre_rope.empty());
  EXPECT_EQ(codecs.k->key_mean(1).offset[3], artifact.layers[2].spectral.mean(1, 3) + artifact.layers[2].k_mean_pre_rope(1, 3));
}

TEST(SpectralCodecs, ErrorsNameTheLayerAndTheFix) {
  const Artifact artifact = spectral_artifact();
  const auto error = [&](const std::function<void(LayerArtifact&, Recipe&)>& spoil) {
    LayerArtifact layer = artifact.layers[2];
    Recipe recipe = artifact.recipe;
    spoil(layer, recipe);
    return error_of([&] { make_codecs(layer, recipe); });
  };
  EXPECT_THAT(error([](LayerArtifact& l, Recipe&) { l.spectral = {}; }),
              AllOf(HasSubstr("layer 2"), HasSubstr("the artifact has no spectral codec"),
                    HasSubstr("calibrate again or use codec int2")));
  EXPECT_THAT(error([](LayerArtifact&, Recipe& r) { r.k_bits = 4; }), AllOf(HasSubstr("layer 2"), HasSubstr("k_bits is 4")));
  EXPECT_THAT(error([](LayerArtifact&, Recipe& r) { r.v_bits = 4; }), AllOf(HasSubstr("layer 2"), HasSubstr("4 bits for V")));
  EXPECT_THAT(error([](LayerArtifact&, Recipe& r) { r.k_mean = MeanMode::none; }),
              AllOf(HasSubstr("cannot run with 'none'"), HasSubstr("use codec int2")));
  EXPECT_THAT(error([](LayerArtifact&, Recipe& r) { r.k_mean = MeanMode::statical; }), HasSubstr("cannot run with 'static'"));
  EXPECT_THAT(error([](LayerArtifact&, Recipe& r) { r.v_mean = MeanMode::statical; }),
              AllOf(HasSubstr("no v_mean"), HasSubstr("use codec int2")));
  EXPECT_THAT(error([](LayerArtifact& l, Recipe&) { l.k_mean_pre_rope = MatrixF(); }), HasSubstr("key mean before RoPE"));
}

}  // namespace
}  // namespace oscar
