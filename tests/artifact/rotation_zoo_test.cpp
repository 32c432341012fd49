#include "oscar/artifact/rotation_zoo.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "artifact/sample.h"
#include "oscar/io/safetensors.h"
#include "oscar/io/torch_file.h"
#include "oscar/method/rotation.h"

namespace oscar {
namespace {

using test::error_of;
using test::random_rotation;
using test::Scratch;
using testing::AllOf;
using testing::HasSubstr;

constexpr int kDim = 8;

TorchValue text(const std::string& value) { return {value}; }
TorchValue number(std::int64_t value) { return {value}; }
TorchValue tensor(const MatrixF& matrix, std::vector<std::int64_t> shape) {
  SafeTensor packed =
      to_tensor(std::span<const float>(matrix.data(), static_cast<std::size_t>(matrix.size())), std::move(shape));
  return {std::make_shared<TorchTensor>(TorchTensor{packed.dtype, packed.shape, packed.bytes})};
}
TorchValue dict(TorchDict entries) { return {std::make_shared<TorchDict>(std::move(entries))}; }

// A rotation file as torch would hold it; a test spoils one part.
struct Source {
  std::string objective = "qqt_r_h_pbr";
  bool text_keys = false;
  std::vector<int> keys = {0, 1, 2}, ids = {0, 1, 2};
  std::vector<MatrixF> rotations = {random_rotation(kDim, 1), random_rotation(kDim, 2), random_rotation(kDim, 3)};
  std::vector<std::int64_t> shape = {kDim, kDim};
  bool eigenvalues = true;

  [[nodiscard]] TorchValue value() const {
    TorchDict layers;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      TorchDict entry = {{text("layer_id"), number(ids[i])}, {text("rotation"), tensor(rotations[i], shape)}};
      if (eigenvalues) entry.emplace_back(text("eigenvalues"), tensor(MatrixF::Ones(1, kDim), {kDim}));
      layers.emplace_back(text_keys ? text(std::to_string(keys[i])) : number(keys[i]), dict(entry));
    }
    return dict({{text("format_version"), number(1)},
                 {text("objective"), text(objective)},
                 {text("source_grouping"), text("layer")},
                 {text("layers"), dict(layers)}});
  }
  [[nodiscard]] RotationFile read() const { return read_value(value()); }
  [[nodiscard]] std::string error() const { return error_of_value(value()); }

  static RotationFile read_value(const TorchValue& value) {
    const Scratch scratch;
    write_torch(value, scratch.path("k.pt"));
    return read_rotation_file(scratch.path("k.pt"));
  }
  static std::string error_of_value(const TorchValue& value) {
    const std::string error = error_of([&] { read_value(value); });
    EXPECT_THAT(error, HasSubstr("k.pt"));
    return error;
  }
};

void expect_equal(const RotationFile& a, const RotationFile& b) {
  EXPECT_EQ(a.objective, b.objective);
  ASSERT_EQ(a.layers.size(), b.layers.size());
  for (const auto& [id, layer] : a.layers) {
    EXPECT_EQ(layer.rotation, b.layers.at(id).rotation) << id;
    EXPECT_EQ(layer.eigenvalues, b.layers.at(id).eigenvalues) << id;
  }
}

std::filesystem::path published(const char* name) {
  return std::filesystem::path(OSCAR_TEST_SHARED_DIR) / "data" / "rotationzoo" / "qwen3-4b-thinking-2507" / name;
}

std::vector<LayerShape> qwen3_4b() {
  std::vector<LayerShape> shapes;
  for (int layer = 0; layer < 36; ++layer) shapes.push_back({layer, 32, 8, 128, 128, false, {}});
  return shapes;
}

TEST(RotationZoo, PublishedFilesBothWays) {
  const RotationFile k = read_rotation_file(published("k_rotation_qqt_r_h_pbr.pt"));
  const RotationFile v = read_rotation_file(published("v_rotation_sst_r_h_pbr.pt"));
  EXPECT_EQ(k.objective, "qqt_r_h_pbr");
  EXPECT_EQ(v.objective, "sst_r_h_pbr");
  EXPECT_EQ(k.source_grouping, "layer");
  for (const RotationFile* file : {&k, &v}) {
    ASSERT_EQ(file->layers.size(), 36U);
    double worst = 0;
    for (const auto& [id, layer] : file->layers) {
      ASSERT_EQ(layer.rotation.size(), 1U);
      ASSERT_EQ(layer.rotation[0].rows(), 128);
      worst = std::max(worst, orthogonality_error(layer.rotation[0]));
      ASSERT_EQ(layer.eigenvalues.size(), 128);
      for (Eigen::Index i = 1; i < 128; ++i) EXPECT_LE(layer.eigenvalues(0, i - 1), layer.eigenvalues(0, i));
    }
    EXPECT_LT(worst, 1e-5);
    EXPECT_GT(worst, 0.0);
  }
  const Artifact artifact = artifact_from_rotation_files(k, v, qwen3_4b(), {"f00d", "qwen3", "Qwen3 4B", 36});
  EXPECT_FALSE(artifact.recipe.per_head);
  EXPECT_EQ(artifact.recipe.k_mean, MeanMode::none);
  EXPECT_EQ(artifact.layers.at(35).clip_k, std::vector<float>{0.96F});
  EXPECT_EQ(artifact.layers.at(35).clip_v, std::vector<float>{0.92F});
  const Scratch scratch;
  Artifact saved = artifact;
  save_artifact(saved, scratch.path("a.safetensors"));
  const auto [k_again, v_again] = rotation_files_from_artifact(load_artifact(scratch.path("a.safetensors")));
  write_rotation_file(k_again, scratch.path("k.pt"));
  write_rotation_file(v_again, scratch.path("v.pt"));
  expect_equal(read_rotation_file(scratch.path("k.pt")), k);
  expect_equal(read_rotation_file(scratch.path("v.pt")), v);
}

TEST(RotationZoo, A20IntegerAndTextKeysAreEqual) {
  Source source;
  const RotationFile integers = source.read();
  source.text_keys = true;
  expect_equal(source.read(), integers);
  EXPECT_EQ(integers.layers.at(2).rotation.at(0), source.rotations[2]);
  source.eigenvalues = false;
  EXPECT_EQ(source.read().layers.at(1).eigenvalues.size(), 0);
}

TEST(RotationZoo, A20BrokenMatricesNameTheirLayer) {
  const auto spoiled = [](const std::function<void(MatrixF&)>& spoil) {
    Source source;
    spoil(source.rotations[1]);
    return source.error();
  };
  EXPECT_THAT(spoiled([](MatrixF& r) { r(2, 3) = std::nanf(""); }), AllOf(HasSubstr("layer 1"), HasSubstr("NaN")));
  EXPECT_THAT(spoiled([](MatrixF& r) { r(0, 0) = std::numeric_limits<float>::infinity(); }),
              AllOf(HasSubstr("layer 1"), HasSubstr("Inf")));
  EXPECT_THAT(spoiled([](MatrixF& r) { r.setZero(); }), AllOf(HasSubstr("layer 1"), HasSubstr("all zeros")));
  EXPECT_THAT(spoiled([](MatrixF& r) { r *= 1.01F; }), AllOf(HasSubstr("layer 1"), HasSubstr("not orthogonal")));
}

TEST(RotationZoo, A20LayersPermutedTwiceOrOdd) {
  Source permuted;
  std::swap(permuted.ids[1], permuted.ids[2]);
  EXPECT_THAT(permuted.error(), AllOf(HasSubstr("layer 1"), HasSubstr("layer 2"), HasSubstr("permuted")));
  const auto odd_key = [](const TorchValue& key) {
    const TorchDict entry = {{text("rotation"), tensor(random_rotation(kDim, 1), {kDim, kDim})}};
    return Source::error_of_value(dict({{text("objective"), text("qqt")}, {text("layers"), dict({{key, dict(entry)}})}}));
  };
  for (const char* key : {"", "x", "1x", "-1", "99999999999999999999"})
    EXPECT_THAT(odd_key(text(key)), HasSubstr("a layer key")) << key;
  EXPECT_THAT(odd_key(number(-1)), HasSubstr("a layer key"));
  TorchDict twice;
  for (const TorchValue& key : {number(1), text("1")}) {
    twice.emplace_back(key, dict({{text("rotation"), tensor(random_rotation(kDim, 1), {kDim, kDim})}}));
  }
  EXPECT_THAT(Source::error_of_value(dict({{text("objective"), text("qqt")}, {text("layers"), dict(twice)}})),
              HasSubstr("layer 1"));
}

TEST(RotationZoo, A20ShapesAndForms) {
  Source flat;
  flat.shape = {kDim * kDim};
  EXPECT_THAT(flat.error(), AllOf(HasSubstr("layer 0"), HasSubstr("neither")));
  Source oblong;
  oblong.shape = {kDim / 2, kDim * 2};
  EXPECT_THAT(oblong.error(), AllOf(HasSubstr("layer 0"), HasSubstr("neither")));
  Source unknown;
  unknown.objective = "best_r_h_pbr";
  EXPECT_THAT(unknown.error(), HasSubstr("best_r_h_pbr"));
  EXPECT_THAT(Source::error_of_value(number(3)), HasSubstr("not a dict"));
  EXPECT_THAT(Source::error_of_value(dict({{text("objective"), text("qqt")}})), HasSubstr("no 'layers'"));
  EXPECT_THAT(Source::error_of_value(dict({{text("layers"), dict({})}})), HasSubstr("no 'objective'"));
  EXPECT_THAT(Source::error_of_value(dict({{text("objective"), text("qqt")}, {text("layers"), dict({})}})),
              HasSubstr("no layers"));
  const auto layer = [](const TorchValue& rotation) {
    return Source::error_of_value(dict({{text("objective"), text("qqt")}, {text("layers"), dict({{number(4), rotation}})}}));
  };
  EXPECT_THAT(layer(number(1)), HasSubstr("layer 4"));
  EXPECT_THAT(layer(dict({})), AllOf(HasSubstr("layer 4"), HasSubstr("no 'rotation'")));
  EXPECT_THAT(layer(dict({{text("rotation"), text("R")}})), AllOf(HasSubstr("layer 4"), HasSubstr("not a tensor")));
  TorchValue integers = tensor(random_rotation(kDim, 1), {kDim, kDim});
  std::get<std::shared_ptr<TorchTensor>>(integers.data)->dtype = "I32";
  EXPECT_THAT(layer(dict({{text("rotation"), integers}})), AllOf(HasSubstr("layer 4"), HasSubstr("I32")));
  EXPECT_THAT(layer(dict({{text("rotation"), tensor(random_rotation(kDim, 1), {kDim, kDim})},
                          {text("eigenvalues"), tensor(MatrixF::Ones(1, 3), {3})}})),
              AllOf(HasSubstr("layer 4"), HasSubstr("eigenvalues")));
  RotationFile mixed = Source().read();
  mixed.layers.at(2).rotation[0] = random_rotation(4, 1);
  mixed.layers.at(2).eigenvalues = MatrixF();
  const Scratch scratch;
  write_rotation_file(mixed, scratch.path("mixed.pt"));
  EXPECT_THAT(error_of([&] { read_rotation_file(scratch.path("mixed.pt")); }),
              AllOf(HasSubstr("layer 2"), HasSubstr("size 4")));
}

std::vector<LayerShape> small_shapes() {
  std::vector<LayerShape> shapes;
  for (int layer = 0; layer < 3; ++layer) shapes.push_back({layer, 4, 2, kDim, kDim, false, {}});
  return shapes;
}
const ModelInfo kModel = {"f00d", "llama", "small", 3};

RotationFile values_file() {
  Source source;
  source.objective = "sst_r_h_pbr";
  return source.read();
}

TEST(RotationZoo, A20SwappedMissingAndForeignLayers) {
  const RotationFile k = Source().read(), v = values_file();
  const auto error = [&](const RotationFile& a, const RotationFile& b, const std::vector<LayerShape>& shapes) {
    return error_of([&] { artifact_from_rotation_files(a, b, shapes, kModel); });
  };
  EXPECT_THAT(error(v, k, small_shapes()), HasSubstr("swapped"));
  EXPECT_THAT(error(k, k, small_shapes()), HasSubstr("swapped"));
  RotationFile missing = v;
  missing.layers.erase(1);
  EXPECT_THAT(error(k, missing, small_shapes()), AllOf(HasSubstr("V rotation file"), HasSubstr("no layer 1")));
  RotationFile foreign = k;
  foreign.layers[7] = k.layers.at(0);
  EXPECT_THAT(error(foreign, v, small_shapes()), HasSubstr("layer 7"));
  RotationFile late;  // the second half of a pipeline-parallel run
  late.objective = k.objective;
  for (const auto& [id, layer] : k.layers) late.layers[id + 18] = layer;
  EXPECT_THAT(error(late, v, small_shapes()), HasSubstr("layer 18"));
  std::vector<LayerShape> wide = small_shapes();
  wide[2].k_dim = 16;
  EXPECT_THAT(error(k, v, wide), AllOf(HasSubstr("layer 2"), HasSubstr("8 wide"), HasSubstr("16")));
  EXPECT_THAT(error(k, v, {}), HasSubstr("GGUF"));
  // Sliding-window layers stay at 16 bit, whatever the file says about them.
  std::vector<LayerShape> windowed = small_shapes();
  windowed[1].sliding_window = true;
  const Artifact artifact = artifact_from_rotation_files(k, missing, windowed, kModel);
  EXPECT_TRUE(artifact.layers.at(1).k_rotation.empty());
  EXPECT_EQ(rotation_files_from_artifact(artifact).second.layers.size(), 2U);
}

TEST(RotationZoo, A20VersionTwoIsPerHead) {
  RotationFile k = Source().read();
  for (auto& [id, layer] : k.layers) {
    layer.rotation = {random_rotation(kDim, static_cast<unsigned>(id) + 50),
                      random_rotation(kDim, static_cast<unsigned>(id) + 60)};
    layer.eigenvalues = test::random_rows(2, kDim, 5);
  }
  const Scratch scratch;
  write_rotation_file(k, scratch.path("k.pt"));
  const RotationFile back = read_rotation_file(scratch.path("k.pt"));
  expect_equal(back, k);
  const RotationFile v = values_file();
  const Artifact artifact = artifact_from_rotation_files(back, v, small_shapes(), kModel);
  EXPECT_TRUE(artifact.recipe.per_head);
  EXPECT_EQ(artifact.layers.at(2).k_rotation, k.layers.at(2).rotation);
  ASSERT_EQ(artifact.layers.at(2).v_rotation.size(), 2U);
  EXPECT_EQ(artifact.layers.at(2).v_rotation[1], v.layers.at(2).rotation[0]);
  EXPECT_EQ(artifact.layers.at(2).v_eigenvalues.rows(), 2);
  expect_equal(rotation_files_from_artifact(artifact).first, k);

  std::vector<LayerShape> more_heads = small_shapes();
  for (LayerShape& shape : more_heads) shape.n_head_kv = 4;
  EXPECT_THAT(error_of([&] { artifact_from_rotation_files(back, v, more_heads, kModel); }),
              AllOf(HasSubstr("layer 0"), HasSubstr("2 heads")));
  k.layers.at(1).rotation[1](0, 0) += 0.1F;
  write_rotation_file(k, scratch.path("k.pt"));
  EXPECT_THAT(error_of([&] { read_rotation_file(scratch.path("k.pt")); }), AllOf(HasSubstr("head 1"), HasSubstr("layer 1")));
}

TEST(RotationZoo, ObjectivesTellKeysFromValues) {
  for (const char* name : {"qqt_r_h_pbr", "ktk", "ktk_pbr"})
    EXPECT_TRUE(is_key_objective(name) && !is_value_objective(name)) << name;
  for (const char* name : {"sst_r_h_pbr", "oot_r_h", "vtv"})
    EXPECT_TRUE(is_value_objective(name) && !is_key_objective(name)) << name;
  for (const char* name : {"hadamard", "qqtx_r", ""}) EXPECT_FALSE(is_key_objective(name) || is_value_objective(name)) << name;
  Source hadamard;  // data-free: the same file serves K and V
  hadamard.objective = "hadamard_plain";
  const RotationFile file = hadamard.read();
  EXPECT_EQ(artifact_from_rotation_files(file, file, small_shapes(), kModel).recipe.v_objective, "hadamard_plain");
}

}  // namespace
}  // namespace oscar
