#include "oscar/artifact/rotation_zoo.h"

#include <charconv>
#include <set>

#include "objective.h"
#include "oscar/base/error.h"
#include "oscar/io/safetensors.h"
#include "oscar/io/torch_file.h"
#include "oscar/method/rotation.h"

namespace oscar {
namespace {

constexpr double kMaxOrthogonalityError = 1e-3;
constexpr float kPublishedClipK = 0.96F, kPublishedClipV = 0.92F;

const TorchDict& dict_of(const TorchValue& value, const std::string& what) {
  const auto* dict = std::get_if<std::shared_ptr<TorchDict>>(&value.data);
  if (dict == nullptr) fail("{} is not a dict", what);
  return **dict;
}

const TorchValue* find(const TorchDict& dict, std::string_view key) {
  for (const auto& [name, value] : dict) {
    const auto* text = std::get_if<std::string>(&name.data);
    if (text != nullptr && *text == key) return &value;
  }
  return nullptr;
}

const TorchValue& require(const TorchDict& dict, std::string_view key, const std::string& what) {
  const TorchValue* value = find(dict, key);
  if (value == nullptr) fail("{} has no '{}'", what, key);
  return *value;
}

std::string text_of(const TorchValue& value, const std::string& what) {
  const auto* text = std::get_if<std::string>(&value.data);
  if (text == nullptr) fail("{} is not a text", what);
  return *text;
}

int layer_number(const TorchValue& value, const std::string& what) {
  std::int64_t number = -1;
  if (const auto* integer = std::get_if<std::int64_t>(&value.data)) {
    number = *integer;
  } else if (const auto* text = std::get_if<std::string>(&value.data)) {
    const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), number);
    if (error != std::errc{} || end != text->data() + text->size()) fail("{} is '{}', not a layer number", what, *text);
  } else {
    fail("{} is neither an integer nor a text", what);
  }
  if (number < 0 || number > INT32_MAX) fail("{} is {}, not a layer number", what, number);
  return static_cast<int>(number);
}

struct Values {
  std::vector<std::int64_t> shape;
  std::vector<float> values;
};

Values tensor_of(const TorchValue& value, const std::string& what) {
  const auto* tensor = std::get_if<std::shared_ptr<TorchTensor>>(&value.data);
  if (tensor == nullptr) fail("{} is not a tensor", what);
  return {(*tensor)->shape, to_floats({(*tensor)->dtype, (*tensor)->shape, (*tensor)->bytes}, what)};
}

void check_rotation(const MatrixF& rotation, const std::string& what) {
  if (!rotation.allFinite()) fail("{} holds NaN or Inf", what);
  if (rotation.isZero(0.0F)) fail("{} is all zeros", what);
  const double error = orthogonality_error(rotation);
  if (!(error <= kMaxOrthogonalityError)) {
    fail("{} is not orthogonal: max |R^T R - I| is {:.2g}, over {:.0e}", what, error, kMaxOrthogonalityError);
  }
}

RotationFile::Layer read_layer(const TorchDict& dict, const std::string& what) {
  RotationFile::Layer layer;
  const Values rotation = tensor_of(require(dict, "rotation", what), "the rotation of " + what);
  const std::size_t rank = rotation.shape.size();
  const bool square =
      (rank == 2 || rank == 3) && rotation.shape[rank - 1] == rotation.shape[rank - 2] && !rotation.values.empty();
  if (!square) fail("the rotation of {} is neither [D, D] nor [heads, D, D]", what);
  const auto dim = static_cast<Eigen::Index>(rotation.shape.back());
  const auto heads = static_cast<Eigen::Index>(rank == 3 ? rotation.shape[0] : 1);
  for (Eigen::Index head = 0; head < heads; ++head) {
    layer.rotation.emplace_back(Eigen::Map<const MatrixF>(rotation.values.data() + head * dim * dim, dim, dim));
    check_rotation(layer.rotation.back(),
                   rank == 3 ? fmt::format("the rotation of head {} of {}", head, what) : "the rotation of " + what);
  }
  if (const TorchValue* entry = find(dict, "eigenvalues");
      entry != nullptr && !std::holds_alternative<std::monostate>(entry->data)) {
    const Values eigenvalues = tensor_of(*entry, "eigenvalues of " + what);
    if (static_cast<Eigen::Index>(eigenvalues.values.size()) != heads * dim || eigenvalues.shape.back() != dim) {
      fail("eigenvalues of {} do not fit its rotation", what);
    }
    layer.eigenvalues = Eigen::Map<const MatrixF>(eigenvalues.values.data(), heads, dim);
    if (!layer.eigenvalues.allFinite()) fail("eigenvalues of {} hold NaN or Inf", what);
  }
  return layer;
}

RotationFile parse(const TorchValue& value, const std::string& file) {
  const TorchDict& top = dict_of(value, file);
  RotationFile result;
  if (const TorchValue* version = find(top, "format_version")) {
    const auto* number = std::get_if<std::int64_t>(&version->data);
    if (number == nullptr || *number < 1 || *number > 2) fail("{} has an unknown format_version; 1 and 2 are known", file);
  }
  result.objective = text_of(require(top, "objective", file), "the objective of " + file);
  try {
    parse_objective(result.objective);
  } catch (const Error& error) {
    fail("{}: {}", file, error.what());
  }
  const TorchValue* grouping = find(top, "source_grouping");
  result.source_grouping = grouping == nullptr ? "layer" : text_of(*grouping, "source_grouping of " + file);
  for (const auto& [key, entry] : dict_of(require(top, "layers", file), "'layers' of " + file)) {
    const int number = layer_number(key, "a layer key of " + file);
    const std::string what = fmt::format("layer {} of {}", number, file);
    const TorchDict& dict = dict_of(entry, what);
    if (const TorchValue* id = find(dict, "layer_id")) {
      const int inner = layer_number(*id, "layer_id of " + what);
      if (inner != number) fail("{} says it is layer {}: the layers are permuted", what, inner);
    }
    if (!result.layers.emplace(number, read_layer(dict, what)).second) fail("{} appears twice", what);
  }
  if (result.layers.empty()) fail("{} has no layers", file);
  const auto& [first_number, first] = *result.layers.begin();
  for (const auto& [number, layer] : result.layers) {
    if (layer.rotation.size() != first.rotation.size() || layer.rotation[0].rows() != first.rotation[0].rows()) {
      fail("layer {} of {} has {} rotations of size {}, but layer {} has {} of {}", number, file, layer.rotation.size(),
           layer.rotation[0].rows(), first_number, first.rotation.size(), first.rotation[0].rows());
    }
  }
  return result;
}

std::shared_ptr<TorchTensor> to_torch(std::span<const float> values, std::vector<std::int64_t> shape) {
  SafeTensor tensor = to_tensor(values, std::move(shape));
  return std::make_shared<TorchTensor>(TorchTensor{std::move(tensor.dtype), std::move(tensor.shape), std::move(tensor.bytes)});
}

TorchValue text(const char* value) { return {std::string(value)}; }

// One side's layer of the artifact: checked against the model and repeated per head where wanted.
std::vector<MatrixF> fitted_rotation(const RotationFile& file, const char* side, const LayerShape& shape, int dim,
                                     bool per_head) {
  const auto found = file.layers.find(shape.layer);
  if (found == file.layers.end()) fail("the {} rotation file has no layer {}, which the model has", side, shape.layer);
  const std::vector<MatrixF>& rotation = found->second.rotation;
  if (rotation[0].rows() != dim) {
    fail("layer {}: the {} rotation is {} wide but the model's heads are {}", shape.layer, side, rotation[0].rows(), dim);
  }
  const auto heads = static_cast<std::size_t>(shape.n_head_kv);
  if (rotation.size() != 1 && rotation.size() != heads) {
    fail("layer {}: the {} rotation has {} heads but the model has {} KV heads", shape.layer, side, rotation.size(), heads);
  }
  return per_head && rotation.size() == 1 ? std::vector<MatrixF>(heads, rotation[0]) : rotation;
}

MatrixF fitted_eigenvalues(const RotationFile& file, int layer, std::size_t heads) {
  const MatrixF& values = file.layers.at(layer).eigenvalues;
  if (values.size() == 0 || values.rows() == static_cast<Eigen::Index>(heads)) return values;
  return values.replicate(static_cast<Eigen::Index>(heads), 1);
}

}  // namespace

RotationFile read_rotation_file(const std::filesystem::path& path) {
  return parse(read_torch(path), fmt::format("rotation file '{}'", path.string()));
}

void write_rotation_file(const RotationFile& file, const std::filesystem::path& path) {
  auto layers = std::make_shared<TorchDict>();
  for (const auto& [number, layer] : file.layers) {
    if (layer.rotation.empty()) fail("layer {} has no rotation to write to '{}'", number, path.string());
    const Eigen::Index dim = layer.rotation[0].rows();
    std::vector<float> values;
    for (const MatrixF& rotation : layer.rotation) {
      if (rotation.rows() != dim || rotation.cols() != dim) fail("layer {}: rotations differ in size", number);
      values.insert(values.end(), rotation.data(), rotation.data() + rotation.size());
    }
    const auto heads = static_cast<std::int64_t>(layer.rotation.size());
    std::vector<std::int64_t> shape = {dim, dim}, eigenvalue_shape = {dim};
    if (heads > 1) {
      shape.insert(shape.begin(), heads);
      eigenvalue_shape.insert(eigenvalue_shape.begin(), heads);
    }
    auto entry = std::make_shared<TorchDict>();
    entry->emplace_back(text("layer_id"), TorchValue{std::int64_t{number}});
    entry->emplace_back(text("rotation"), TorchValue{to_torch(values, shape)});
    if (layer.eigenvalues.size() != 0) {
      const std::span<const float> raw(layer.eigenvalues.data(), static_cast<std::size_t>(layer.eigenvalues.size()));
      entry->emplace_back(text("eigenvalues"), TorchValue{to_torch(raw, eigenvalue_shape)});
    }
    layers->emplace_back(TorchValue{std::int64_t{number}}, TorchValue{entry});
  }
  auto top = std::make_shared<TorchDict>();
  top->emplace_back(text("format_version"), TorchValue{std::int64_t{1}});
  top->emplace_back(text("objective"), TorchValue{file.objective});
  top->emplace_back(text("source_grouping"), TorchValue{file.source_grouping});
  top->emplace_back(text("layers"), TorchValue{layers});
  write_torch({top}, path);
}

Artifact artifact_from_rotation_files(const RotationFile& k, const RotationFile& v, const std::vector<LayerShape>& shapes,
                                      const ModelInfo& model) {
  if (is_value_objective(k.objective))
    fail("the K rotation file has the objective '{}' of a V file; are they swapped?", k.objective);
  if (is_key_objective(v.objective))
    fail("the V rotation file has the objective '{}' of a K file; are they swapped?", v.objective);
  if (shapes.empty()) fail("rotation files do not hold the model's geometry; name the model's GGUF file too");
  std::set<int> known;
  bool per_head = false;
  for (const LayerShape& shape : shapes) known.insert(shape.layer);
  for (const auto& [side, file] : {std::pair<const char*, const RotationFile&>{"K", k}, {"V", v}}) {
    for (const auto& [number, layer] : file.layers) {
      if (!known.contains(number)) fail("the {} rotation file has layer {}, which the model does not have", side, number);
      per_head = per_head || layer.rotation.size() > 1;
    }
  }
  Artifact artifact;
  artifact.model = model;
  artifact.recipe.k_mean = MeanMode::none;
  artifact.recipe.v_mean = MeanMode::none;
  artifact.recipe.k_objective = k.objective;
  artifact.recipe.v_objective = v.objective;
  artifact.recipe.per_head = per_head;
  artifact.provenance = {{"sources", nlohmann::json::array()}, {"tokens", 0}, {"origin", "rotation files"}};
  for (const LayerShape& shape : shapes) {
    LayerArtifact layer;
    layer.shape = shape;
    if (!shape.sliding_window) {
      layer.k_rotation = fitted_rotation(k, "K", shape, shape.k_dim, per_head);
      layer.v_rotation = fitted_rotation(v, "V", shape, shape.v_dim, per_head);
      layer.k_eigenvalues = fitted_eigenvalues(k, shape.layer, layer.k_rotation.size());
      layer.v_eigenvalues = fitted_eigenvalues(v, shape.layer, layer.v_rotation.size());
      layer.clip_k = {kPublishedClipK};
      layer.clip_v = {kPublishedClipV};
    }
    artifact.layers.push_back(std::move(layer));
  }
  validate(artifact);
  return artifact;
}

std::pair<RotationFile, RotationFile> rotation_files_from_artifact(const Artifact& artifact) {
  std::pair<RotationFile, RotationFile> files;
  const char* grouping = artifact.recipe.per_head ? "kv_head" : "layer";
  files.first.objective = artifact.recipe.k_objective;
  files.second.objective = artifact.recipe.v_objective;
  files.first.source_grouping = files.second.source_grouping = grouping;
  for (const LayerArtifact& layer : artifact.layers) {
    if (layer.k_rotation.empty()) continue;  // a sliding-window layer, left at 16 bit
    files.first.layers.emplace(layer.shape.layer, RotationFile::Layer{layer.k_rotation, layer.k_eigenvalues});
    files.second.layers.emplace(layer.shape.layer, RotationFile::Layer{layer.v_rotation, layer.v_eigenvalues});
  }
  if (files.first.layers.empty()) fail("the artifact has no calibrated layer to convert");
  return files;
}

}  // namespace oscar
