#include "oscar/artifact/artifact.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "artifact/sample.h"
#include "oscar/io/safetensors.h"
#include "oscar/io/sha256.h"

namespace oscar {
namespace {

using test::error_of;
using test::sample_artifact;
using test::Scratch;
using testing::AllOf;
using testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

void expect_equal(const Artifact& a, const Artifact& b) {
  EXPECT_EQ(a.digest, b.digest);
  EXPECT_EQ(a.date, b.date);
  EXPECT_EQ(a.tool_version, b.tool_version);
  EXPECT_EQ(a.provenance, b.provenance);
  EXPECT_EQ(a.model.fingerprint, b.model.fingerprint);
  EXPECT_EQ(a.model.architecture, b.model.architecture);
  EXPECT_EQ(a.model.name, b.model.name);
  EXPECT_EQ(a.model.n_layer, b.model.n_layer);
  EXPECT_EQ(a.recipe.codec, b.recipe.codec);
  EXPECT_EQ(a.recipe.k_mean, b.recipe.k_mean);
  EXPECT_EQ(a.recipe.v_mean, b.recipe.v_mean);
  EXPECT_EQ(a.recipe.k_objective, b.recipe.k_objective);
  EXPECT_EQ(a.recipe.v_objective, b.recipe.v_objective);
  EXPECT_EQ(a.recipe.per_head, b.recipe.per_head);
  EXPECT_EQ(a.recipe.group_size, b.recipe.group_size);
  EXPECT_EQ(a.recipe.clip_k, b.recipe.clip_k);
  EXPECT_EQ(a.recipe.clip_v, b.recipe.clip_v);
  ASSERT_EQ(a.layers.size(), b.layers.size());
  for (std::size_t i = 0; i < a.layers.size(); ++i) {
    const LayerArtifact &x = a.layers[i], &y = b.layers[i];
    EXPECT_EQ(x.shape, y.shape);
    EXPECT_EQ(x.k_rotation, y.k_rotation);
    EXPECT_EQ(x.v_rotation, y.v_rotation);
    EXPECT_EQ(x.k_eigenvalues, y.k_eigenvalues);
    EXPECT_EQ(x.v_eigenvalues, y.v_eigenvalues);
    EXPECT_EQ(x.k_mean_pre_rope, y.k_mean_pre_rope);
    EXPECT_EQ(x.k_mean, y.k_mean);
    EXPECT_EQ(x.v_mean, y.v_mean);
    EXPECT_EQ(x.clip_k, y.clip_k);
    EXPECT_EQ(x.clip_v, y.clip_v);
  }
}

TEST(Artifact, RoundTripIsExactAndReproducible) {
  const Scratch scratch;
  Artifact artifact = sample_artifact();
  artifact.recipe.clip_k = 0.95F;
  artifact.recipe.group_size = 8;
  artifact.recipe.v_mean = MeanMode::statical;
  save_artifact(artifact, scratch.path("a.oscar.safetensors"));
  EXPECT_EQ(artifact.digest.size(), 64U);
  const Artifact loaded = load_artifact(scratch.path("a.oscar.safetensors"));
  expect_equal(loaded, artifact);
  Artifact again = loaded;
  save_artifact(again, scratch.path("b.oscar.safetensors"));
  EXPECT_EQ(test::slurp(scratch.path("a.oscar.safetensors")), test::slurp(scratch.path("b.oscar.safetensors")));
  EXPECT_EQ(loaded.find(2), &loaded.layers[2]);
  EXPECT_EQ(loaded.find(3), nullptr);
  EXPECT_EQ(loaded.find(-1), nullptr);
}

TEST(Artifact, FileIsWhatTheHeaderSpecifies) {
  const Scratch scratch;
  Artifact artifact = sample_artifact();
  save_artifact(artifact, scratch.path("a"));
  const SafeTensors file = read_safetensors(scratch.path("a"));
  ASSERT_EQ(file.metadata.size(), 1U);
  EXPECT_EQ(file.tensors.at("layers.2.k_rotation").shape, (std::vector<std::int64_t>{2, 16, 16}));
  EXPECT_EQ(file.tensors.at("layers.0.v_mean").shape, (std::vector<std::int64_t>{2, 8}));
  EXPECT_EQ(file.tensors.at("layers.0.clip_v").shape, (std::vector<std::int64_t>{1}));
  EXPECT_EQ(file.tensors.size(), 2U * 8U);
  nlohmann::json metadata = nlohmann::json::parse(file.metadata.at("oscar"));
  EXPECT_EQ(metadata.at("format"), "oscar-artifact");
  EXPECT_EQ(metadata.at("format_version"), 2);
  EXPECT_EQ(metadata.at("tool").at("name"), "oscar");
  EXPECT_EQ(metadata.at("recipe").at("k_mean"), "rope");
  // The digest by its definition, not by our code.
  metadata.erase("digest");
  Sha256 hash;
  hash.update(metadata.dump());
  for (const auto& [name, tensor] : file.tensors) {
    hash.update(name);
    hash.update(tensor.bytes);
  }
  EXPECT_EQ(hash.hex(), artifact.digest);
}

// Saves, lets `edit` change the file's parts, and returns the error of loading the result.
std::string error_after(const std::function<void(SafeTensors&, nlohmann::json&)>& edit, bool repair_digest) {
  const Scratch scratch;
  Artifact artifact = sample_artifact();
  const auto path = scratch.path("edited.safetensors");
  save_artifact(artifact, path);
  SafeTensors file = read_safetensors(path);
  nlohmann::json metadata = nlohmann::json::parse(file.metadata.at("oscar"));
  edit(file, metadata);
  if (repair_digest) {
    metadata.erase("digest");
    Sha256 hash;
    hash.update(metadata.dump());
    for (const auto& [name, tensor] : file.tensors) {
      hash.update(name);
      hash.update(tensor.bytes);
    }
    metadata["digest"] = hash.hex();
  }
  file.metadata["oscar"] = metadata.dump();
  write_safetensors(file, path);
  const std::string error = error_of([&] { load_artifact(path); });
  EXPECT_THAT(error, HasSubstr("edited.safetensors"));
  return error;
}

TEST(Artifact, EveryChangeBreaksTheDigest) {
  using Json = nlohmann::json;
  const auto damaged = [](const std::function<void(SafeTensors&, Json&)>& edit) {
    EXPECT_THAT(error_after(edit, false), HasSubstr("damaged"));
  };
  damaged([](SafeTensors& file, Json&) { file.tensors.at("layers.0.v_mean").bytes[5] ^= std::byte{1}; });
  damaged([](SafeTensors& file, Json&) { file.tensors.erase("layers.0.v_mean"); });
  damaged([](SafeTensors&, Json& metadata) { metadata["model"]["fingerprint"] = "other"; });
  damaged([](SafeTensors&, Json& metadata) { metadata["recipe"]["k_mean"] = "none"; });
  damaged([](SafeTensors&, Json& metadata) { metadata["date"] = ""; });
  damaged([](SafeTensors&, Json& metadata) { metadata["extra"] = 1; });
}

TEST(Artifact, MetadataErrorsAreSentences) {
  using Json = nlohmann::json;
  const auto metadata_error = [](const std::function<void(Json&)>& edit) {
    return error_after([&](SafeTensors&, Json& metadata) { edit(metadata); }, true);
  };
  EXPECT_THAT(metadata_error([](Json& m) { m["format_version"] = 7; }),
              AllOf(HasSubstr("format 7"), HasSubstr("update OSCAR")));
  EXPECT_THAT(metadata_error([](Json& m) { m["format_version"] = "1"; }), HasSubstr("not an integer"));
  EXPECT_THAT(metadata_error([](Json& m) { m["format"] = "moments"; }), HasSubstr("not an OSCAR artifact but 'moments'"));
  EXPECT_THAT(metadata_error([](Json& m) { m.erase("recipe"); }), HasSubstr("no 'recipe'"));
  EXPECT_THAT(metadata_error([](Json& m) { m["recipe"]["codec"] = "int3"; }), HasSubstr("codec 'int3'"));
  EXPECT_THAT(metadata_error([](Json& m) { m["recipe"]["k_mean"] = "median"; }), HasSubstr("'median'"));
  EXPECT_THAT(metadata_error([](Json& m) { m["recipe"]["group_size"] = 1e99; }), HasSubstr("group_size"));
  EXPECT_THAT(metadata_error([](Json& m) { m["layers"][2]["k_dim"] = 99999999999; }),
              AllOf(HasSubstr("layer 2"), HasSubstr("k_dim")));
  EXPECT_THAT(metadata_error([](Json& m) { m["layers"][2]["n_head_kv"] = 0; }), HasSubstr("layer 2"));
  EXPECT_THAT(metadata_error([](Json& m) { m["layers"][2]["rope"]["pairing"] = "spiral"; }),
              AllOf(HasSubstr("layer 2"), HasSubstr("spiral")));
  EXPECT_THAT(metadata_error([](Json& m) { m["layers"] = {}; }), HasSubstr("not a list"));
  EXPECT_THAT(metadata_error([](Json& m) { m["layers"].erase(2); }), HasSubstr("belongs to no layer"));
  EXPECT_THAT(metadata_error([](Json& m) { m["provenance"] = 3; }), HasSubstr("provenance"));
  EXPECT_THAT(error_after([](SafeTensors& f, Json&) { f.tensors["layers.9.clip_k"] = f.tensors.at("layers.0.clip_k"); }, true),
              HasSubstr("'layers.9.clip_k' belongs to no layer"));
  EXPECT_THAT(error_after([](SafeTensors& f, Json&) { f.tensors.at("layers.0.clip_k").dtype = "I32"; }, true),
              HasSubstr("dtype I32"));
  EXPECT_THAT(error_after(
                  [](SafeTensors& f, Json&) {
                    f.tensors.at("layers.0.k_rotation").shape = {32, 16};
                  },
                  true),
              HasSubstr("dimensions"));
  EXPECT_THAT(error_after([](SafeTensors& f, Json&) { f.tensors.erase("layers.2.k_rotation"); }, true), HasSubstr("layer 2"));
  const Scratch scratch;
  write_safetensors({}, scratch.path("plain"));
  EXPECT_THAT(error_of([&] { load_artifact(scratch.path("plain")); }), HasSubstr("not an OSCAR artifact"));
}

// Tensors of K under V's names and the other way round, under a digest that is right.
TEST(Artifact, SwappedKeysAndValuesAreRefused) {
  EXPECT_THAT(error_after(
                  [](SafeTensors& file, nlohmann::json&) {
                    std::swap(file.tensors.at("layers.2.k_rotation"), file.tensors.at("layers.2.v_rotation"));
                  },
                  true),
              AllOf(HasSubstr("layer 2"), HasSubstr("k_rotation of head 0 is 8 x 8, not 16 x 16")));
  EXPECT_THAT(error_after(
                  [](SafeTensors&, nlohmann::json& metadata) {
                    std::swap(metadata["recipe"]["k_objective"], metadata["recipe"]["v_objective"]);
                  },
                  true),
              HasSubstr("k_objective 'sst_r_h_pbr' belongs to values"));
}

TEST(Artifact, ValidateNamesLayerAndCause) {
  const auto check = [](const std::function<void(Artifact&)>& spoil, const std::string& cause, bool names_layer = true) {
    Artifact artifact = sample_artifact();
    validate(artifact);
    spoil(artifact);
    const std::string error = error_of([&] { validate(artifact); });
    EXPECT_THAT(error, HasSubstr(cause));
    EXPECT_THAT(error, HasSubstr(names_layer ? "layer 2" : ""));
    const Scratch scratch;
    error_of([&] { save_artifact(artifact, scratch.path("x")); });
    EXPECT_FALSE(std::filesystem::exists(scratch.path("x")));
  };
  check([](Artifact& a) { a.layers[2].k_rotation[1](3, 3) = kNan; }, "head 1 holds NaN");
  check([](Artifact& a) { a.layers[2].k_rotation[1] *= 1.01F; }, "head 1 is not orthogonal");
  check([](Artifact& a) { a.layers[2].v_rotation[0].setZero(); }, "v_rotation of head 0 is not orthogonal");
  check([](Artifact& a) { a.layers[2].v_rotation[0] = MatrixF::Identity(16, 16); }, "16 x 16, not 8 x 8");
  check([](Artifact& a) { a.layers[2].k_rotation.pop_back(); }, "1 matrices");
  check([](Artifact& a) { a.layers[2].k_rotation.clear(); }, "0 matrices");
  check([](Artifact& a) { a.layers[2].k_mean_pre_rope = MatrixF(); }, "k_mean_pre_rope is missing");
  check([](Artifact& a) { a.layers[2].k_mean_pre_rope = MatrixF::Zero(1, 16); }, "1 x 16, not 2 x 16");
  check([](Artifact& a) { a.layers[2].v_mean(0, 0) = kNan; }, "v_mean holds NaN");
  check([](Artifact& a) { a.layers[2].k_eigenvalues(0, 0) = std::numeric_limits<float>::infinity(); }, "k_eigenvalues holds");
  check([](Artifact& a) { a.layers[2].clip_k = {}; }, "clip_k has 0 values");
  check([](Artifact& a) { a.layers[2].clip_k = {1.1F}; }, "clip_k is 1.1");
  check([](Artifact& a) { a.layers[2].clip_k = {-0.1F}; }, "clip_k is -0.1");
  check([](Artifact& a) { a.layers[2].clip_v = {kNan, 0.5F}; }, "clip_v is nan");
  check([](Artifact& a) { a.layers[2].shape.n_head = 3; }, "3 query heads");
  check([](Artifact& a) { a.layers[2].shape.rope.base = kNan; }, "RoPE");
  check([](Artifact& a) { a.layers[2].shape.rope.n_rot = 15; }, "layer 2");
  check([](Artifact& a) { a.model.n_layer = 2; }, "model of 2 layers");
  check([](Artifact& a) { a.layers[1].shape.layer = 2; }, "does not follow");
  check([](Artifact& a) { a.recipe.per_head = false; }, "layer 0", false);
  check([](Artifact& a) { a.recipe.codec = "int9"; }, "int9", false);
  check([](Artifact& a) { a.recipe.codec = "sim:kivi2-g32"; }, "sim:kivi2-g32", false);
  check([](Artifact& a) { a.recipe.v_mean = MeanMode::rope; }, "v_mean", false);
  check([](Artifact& a) { a.recipe.group_size = 6; }, "group_size 6", false);
  check([](Artifact& a) { a.recipe.k_objective = "sst_r_h_pbr"; }, "belongs to values", false);
  check([](Artifact& a) { a.recipe.v_objective = "qqt_r_h_pbr"; }, "belongs to keys", false);
  check([](Artifact& a) { a.recipe.k_objective = "abc_r"; }, "'abc_r'", false);
  check([](Artifact& a) { a.recipe.clip_v = 2.0F; }, "clip_v is 2", false);
  check([](Artifact& a) { a.layers.clear(); }, "no layers", false);
  Artifact shared = sample_artifact();
  shared.recipe.per_head = false;
  for (LayerArtifact& layer : shared.layers) {
    if (layer.k_rotation.empty()) continue;
    layer.k_rotation.resize(1);
    layer.v_rotation.resize(1);
    layer.k_eigenvalues = MatrixF();
  }
  validate(shared);
}

TEST(Artifact, DamagedFilesNeverCrash) {
  const Scratch scratch;
  Artifact artifact = sample_artifact();
  artifact.layers.resize(1);
  artifact.provenance = nlohmann::json::object();
  save_artifact(artifact, scratch.path("a"));
  const std::string valid = test::slurp(scratch.path("a"));
  std::uint64_t header = 0;
  std::memcpy(&header, valid.data(), sizeof(header));
  const auto counts = test::mutate(scratch, valid, 8 + header, [](const auto& path) { load_artifact(path); });
  EXPECT_GT(counts.refused, 1000);
  EXPECT_LT(counts.accepted, 80) << "only the padding after the header's JSON is not covered by the digest";
}

}  // namespace
}  // namespace oscar
