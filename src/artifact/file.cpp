// The artifact as a safetensors file; the format is specified in artifact.h.
#include <set>

#include "oscar/artifact/artifact.h"
#include "oscar/base/error.h"
#include "oscar/io/json.h"
#include "oscar/io/safetensors.h"
#include "oscar/io/sha256.h"
#include "oscar/method/moments_json.h"
#include "oscar/version.h"

namespace oscar {
namespace {

constexpr const char* kKey = "oscar";
constexpr const char* kFormat = "oscar-artifact";

nlohmann::json optional_number(const std::optional<float>& value) { return value ? nlohmann::json(*value) : nlohmann::json(); }

std::optional<float> optional_float(const nlohmann::json& json, const char* key, const char* what) {
  if (json_field(json, key, what).is_null()) return std::nullopt;
  return json_float(json, key, what);
}

nlohmann::json to_json(const Recipe& recipe) {
  nlohmann::json json = {{"codec", recipe.codec},
                         {"k_bits", recipe.k_bits},
                         {"v_bits", recipe.v_bits},
                         {"k_mean", to_string(recipe.k_mean)},
                         {"v_mean", to_string(recipe.v_mean)},
                         {"k_objective", recipe.k_objective},
                         {"v_objective", recipe.v_objective},
                         {"per_head", recipe.per_head},
                         {"group_size", recipe.group_size},
                         {"clip_k", optional_number(recipe.clip_k)},
                         {"clip_v", optional_number(recipe.clip_v)}};
  if (!recipe.layer_bits.empty()) json["layer_bits"] = to_text(recipe.layer_bits);
  return json;
}

Recipe recipe_from_json(const nlohmann::json& json, std::int64_t version) {
  constexpr const char* kWhat = "the recipe";
  Recipe recipe;
  recipe.codec = json_text(json, "codec", kWhat);
  if (version >= 2) {
    recipe.k_bits = static_cast<double>(json_float(json, "k_bits", kWhat));
    recipe.v_bits = static_cast<double>(json_float(json, "v_bits", kWhat));
    if (json.contains("layer_bits")) recipe.layer_bits = parse_layer_rates(json_text(json, "layer_bits", kWhat));
  }
  recipe.k_mean = parse_mean_mode(json_text(json, "k_mean", kWhat));
  recipe.v_mean = parse_mean_mode(json_text(json, "v_mean", kWhat));
  recipe.k_objective = json_text(json, "k_objective", kWhat);
  recipe.v_objective = json_text(json, "v_objective", kWhat);
  recipe.per_head = json_bool(json, "per_head", kWhat);
  recipe.group_size = json_count(json, "group_size", kWhat);
  recipe.clip_k = optional_float(json, "clip_k", kWhat);
  recipe.clip_v = optional_float(json, "clip_v", kWhat);
  return recipe;
}

nlohmann::json metadata_of(const Artifact& artifact) {  // everything but the digest
  nlohmann::json layers = nlohmann::json::array();
  for (const LayerArtifact& layer : artifact.layers) layers.push_back(to_json(layer.shape));
  return {{"format", kFormat},
          {"format_version", kArtifactVersion},
          {"tool", {{"name", "oscar"}, {"version", artifact.tool_version}}},
          {"date", artifact.date},
          {"model",
           {{"fingerprint", artifact.model.fingerprint},
            {"architecture", artifact.model.architecture},
            {"name", artifact.model.name},
            {"n_layer", artifact.model.n_layer}}},
          {"recipe", to_json(artifact.recipe)},
          {"layers", layers},
          {"provenance", artifact.provenance}};
}

std::string digest_of(const nlohmann::json& metadata, const std::map<std::string, SafeTensor>& tensors) {
  Sha256 hash;
  hash.update(metadata.dump());  // nlohmann's objects are ordered by key
  for (const auto& [name, tensor] : tensors) {
    hash.update(name);
    hash.update(tensor.bytes);
  }
  return hash.hex();
}

std::string tensor_name(int layer, const char* field) { return fmt::format("layers.{}.{}", layer, field); }

// --- writing ---

std::int64_t size64(std::size_t size) { return static_cast<std::int64_t>(size); }

void put_matrices(SafeTensors& file, const std::string& name, const std::vector<MatrixF>& matrices) {
  if (matrices.empty()) return;
  std::vector<float> values;
  for (const MatrixF& matrix : matrices) values.insert(values.end(), matrix.data(), matrix.data() + matrix.size());
  file.tensors[name] =
      to_tensor(std::span<const float>(values), {size64(matrices.size()), matrices[0].rows(), matrices[0].cols()});
}

void put_rows(SafeTensors& file, const std::string& name, const MatrixF& rows) {
  if (rows.size() == 0) return;
  file.tensors[name] =
      to_tensor(std::span<const float>(rows.data(), static_cast<std::size_t>(rows.size())), {rows.rows(), rows.cols()});
}

void put_values(SafeTensors& file, const std::string& name, const std::vector<float>& values) {
  if (!values.empty()) file.tensors[name] = to_tensor(std::span<const float>(values), {size64(values.size())});
}

// --- reading ---

class TensorReader {
 public:
  explicit TensorReader(const std::map<std::string, SafeTensor>& tensors) : tensors_(tensors) {}

  std::vector<MatrixF> matrices(const std::string& name) {
    const SafeTensor* tensor = take(name, 3);
    if (tensor == nullptr) return {};
    const std::vector<float> values = to_floats(*tensor, name);
    const auto rows = static_cast<Eigen::Index>(tensor->shape[1]);
    const auto columns = static_cast<Eigen::Index>(tensor->shape[2]);
    std::vector<MatrixF> result;
    for (std::int64_t i = 0; i < tensor->shape[0] && rows * columns > 0; ++i) {
      result.emplace_back(Eigen::Map<const MatrixF>(values.data() + i * rows * columns, rows, columns));
    }
    return result;
  }

  MatrixF rows(const std::string& name) {
    const SafeTensor* tensor = take(name, 2);
    if (tensor == nullptr) return {};
    const std::vector<float> values = to_floats(*tensor, name);
    return Eigen::Map<const MatrixF>(values.data(), static_cast<Eigen::Index>(tensor->shape[0]),
                                     static_cast<Eigen::Index>(tensor->shape[1]));
  }

  std::vector<float> values(const std::string& name) {
    const SafeTensor* tensor = take(name, 1);
    return tensor == nullptr ? std::vector<float>{} : to_floats(*tensor, name);
  }

  void require_all_taken() const {
    for (const auto& [name, tensor] : tensors_) {
      if (!taken_.contains(name)) fail("tensor '{}' belongs to no layer of the artifact", name);
    }
  }

 private:
  const SafeTensor* take(const std::string& name, std::size_t rank) {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) return nullptr;
    taken_.insert(name);
    if (found->second.dtype != "F32") fail("tensor '{}' has dtype {}, not F32", name, found->second.dtype);
    if (found->second.shape.size() != rank)
      fail("tensor '{}' has {} dimensions, not {}", name, found->second.shape.size(), rank);
    return &found->second;
  }

  const std::map<std::string, SafeTensor>& tensors_;
  std::set<std::string> taken_;
};

Artifact parse_artifact(const SafeTensors& file) {
  const auto text = file.metadata.find(kKey);
  if (text == file.metadata.end()) fail("it is not an OSCAR artifact (no '{}' metadata)", kKey);
  nlohmann::json metadata = parse_json(text->second, "its metadata");
  constexpr const char* kWhat = "its metadata";
  if (json_text(metadata, "format", kWhat) != kFormat) {
    fail("it is not an OSCAR artifact but '{}'", json_text(metadata, "format", kWhat));
  }
  const std::int64_t version = json_integer(metadata, "format_version", kWhat, 1);
  if (version > kArtifactVersion) {
    fail("it has artifact format {}, newer than the {} this OSCAR reads; update OSCAR", version, kArtifactVersion);
  }
  const std::string digest = json_text(metadata, "digest", kWhat);
  metadata.erase("digest");
  if (const std::string actual = digest_of(metadata, file.tensors); actual != digest) {
    fail("it is damaged: its digest is {} but its content gives {}", digest, actual);
  }

  Artifact artifact;
  artifact.digest = digest;
  artifact.date = json_text(metadata, "date", kWhat);
  artifact.tool_version = json_text(json_field(metadata, "tool", kWhat), "version", "its tool");
  const nlohmann::json& model = json_field(metadata, "model", kWhat);
  artifact.model = {json_text(model, "fingerprint", "its model"), json_text(model, "architecture", "its model"),
                    json_text(model, "name", "its model"), json_count(model, "n_layer", "its model")};
  artifact.recipe = recipe_from_json(json_field(metadata, "recipe", kWhat), version);
  artifact.provenance = json_field(metadata, "provenance", kWhat);

  TensorReader tensors(file.tensors);
  for (const nlohmann::json& entry : json_array(metadata, "layers", kWhat)) {
    LayerArtifact layer;
    layer.shape = layer_shape_from_json(entry, "the artifact");
    const int n = layer.shape.layer;
    layer.k_rotation = tensors.matrices(tensor_name(n, "k_rotation"));
    layer.v_rotation = tensors.matrices(tensor_name(n, "v_rotation"));
    layer.k_eigenvalues = tensors.rows(tensor_name(n, "k_eigenvalues"));
    layer.v_eigenvalues = tensors.rows(tensor_name(n, "v_eigenvalues"));
    layer.k_mean_pre_rope = tensors.rows(tensor_name(n, "k_mean_pre_rope"));
    layer.k_mean = tensors.rows(tensor_name(n, "k_mean"));
    layer.v_mean = tensors.rows(tensor_name(n, "v_mean"));
    layer.clip_k = tensors.values(tensor_name(n, "clip_k"));
    layer.clip_v = tensors.values(tensor_name(n, "clip_v"));
    SpectralLayer& spectral = layer.spectral;
    spectral.transform = tensors.matrices(tensor_name(n, "spectral.transform"));
    spectral.inverse = tensors.matrices(tensor_name(n, "spectral.inverse"));
    spectral.mean = tensors.rows(tensor_name(n, "spectral.mean"));
    spectral.inverse_sigma = tensors.rows(tensor_name(n, "spectral.inverse_sigma"));
    spectral.step = tensors.matrices(tensor_name(n, "spectral.step"));
    spectral.width = tensors.matrices(tensor_name(n, "spectral.width"));
    spectral.v_signs = tensors.rows(tensor_name(n, "spectral.v_signs"));
    spectral.v_scale = tensors.values(tensor_name(n, "spectral.v_scale"));
    artifact.layers.push_back(std::move(layer));
  }
  tensors.require_all_taken();
  return artifact;
}

// To be changed with anything that makes other codes of the same artifact and recipe.
constexpr std::string_view kCodeVersion = "values in 4 sign patterns";

}  // namespace

std::uint64_t state_digest(const Artifact& artifact, const Recipe& recipe) {
  Sha256 hash;
  hash.update(kCodeVersion);
  hash.update(artifact.digest);
  hash.update(to_json(recipe).dump());
  return std::stoull(hash.hex().substr(0, 16), nullptr, 16);
}

void save_artifact(Artifact& artifact, const std::filesystem::path& path) {
  validate(artifact);
  if (artifact.tool_version.empty()) artifact.tool_version = version();
  SafeTensors file;
  for (const LayerArtifact& layer : artifact.layers) {
    const int n = layer.shape.layer;
    put_matrices(file, tensor_name(n, "k_rotation"), layer.k_rotation);
    put_matrices(file, tensor_name(n, "v_rotation"), layer.v_rotation);
    put_rows(file, tensor_name(n, "k_eigenvalues"), layer.k_eigenvalues);
    put_rows(file, tensor_name(n, "v_eigenvalues"), layer.v_eigenvalues);
    put_rows(file, tensor_name(n, "k_mean_pre_rope"), layer.k_mean_pre_rope);
    put_rows(file, tensor_name(n, "k_mean"), layer.k_mean);
    put_rows(file, tensor_name(n, "v_mean"), layer.v_mean);
    put_values(file, tensor_name(n, "clip_k"), layer.clip_k);
    put_values(file, tensor_name(n, "clip_v"), layer.clip_v);
    const SpectralLayer& spectral = layer.spectral;
    put_matrices(file, tensor_name(n, "spectral.transform"), spectral.transform);
    put_matrices(file, tensor_name(n, "spectral.inverse"), spectral.inverse);
    put_rows(file, tensor_name(n, "spectral.mean"), spectral.mean);
    put_rows(file, tensor_name(n, "spectral.inverse_sigma"), spectral.inverse_sigma);
    put_matrices(file, tensor_name(n, "spectral.step"), spectral.step);
    put_matrices(file, tensor_name(n, "spectral.width"), spectral.width);
    put_rows(file, tensor_name(n, "spectral.v_signs"), spectral.v_signs);
    put_values(file, tensor_name(n, "spectral.v_scale"), spectral.v_scale);
  }
  nlohmann::json metadata = metadata_of(artifact);
  try {
    artifact.digest = digest_of(metadata, file.tensors);
  } catch (const nlohmann::json::exception&) {
    fail("'{}' cannot be written: a name or the provenance is not UTF-8", path.string());
  }
  metadata["digest"] = artifact.digest;
  file.metadata[kKey] = metadata.dump();
  write_safetensors(file, path);
}

Artifact load_artifact(const std::filesystem::path& path) {
  const SafeTensors file = read_safetensors(path);
  try {
    Artifact artifact = parse_artifact(file);
    validate(artifact);
    return artifact;
  } catch (const Error& error) {
    fail("artifact '{}': {}", path.string(), error.what());
  }
}

}  // namespace oscar
