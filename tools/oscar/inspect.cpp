// `oscar inspect`: what is in a file, and is it sound.
#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>

#include "cli.h"
#include "fit_summary.h"
#include "oscar/artifact/artifact.h"
#include "oscar/artifact/rotation_zoo.h"
#include "oscar/base/error.h"
#include "oscar/io/gguf.h"
#include "oscar/io/safetensors.h"
#include "oscar/method/rotation.h"
#include "output.h"

namespace oscar::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

struct InspectOptions {
  std::string file, format = "md";
};

struct Finding {
  std::string kind = "unknown";
  Json facts = Json::object();  // in the order to print
  std::vector<std::string> problems;
  Table layers{{}};
};

enum class Kind { gguf, torch, safetensors };

Kind kind_of(const fs::path& path) {
  if (!fs::exists(path)) fail("there is no file {}", path.string());
  if (!fs::is_regular_file(path)) fail("{} is not a regular file", path.string());
  std::array<char, 8> head{};
  std::ifstream stream(path, std::ios::binary);
  stream.read(head.data(), head.size());
  const std::string_view magic(head.data(), static_cast<std::size_t>(stream.gcount()));
  if (magic.substr(0, 4) == "GGUF" || magic.substr(0, 4) == "FUGG") return Kind::gguf;
  if (magic.substr(0, 2) == "PK" || path.extension() == ".pt" || path.extension() == ".pth") return Kind::torch;
  return Kind::safetensors;  // no magic number: its reader decides
}

double worst_orthogonality(const std::vector<MatrixF>& rotations) {
  double worst = 0;
  for (const MatrixF& rotation : rotations) worst = std::max(worst, orthogonality_error(rotation));
  return worst;
}

Json clip_range(const std::vector<float>& clips) {
  if (clips.empty()) return {};
  const auto [low, high] = std::minmax_element(clips.begin(), clips.end());
  return *low == *high ? Json(fmt::format("{:.3g}", *low)) : Json(fmt::format("{:.3g} to {:.3g}", *low, *high));
}

// Share of a mean's norm in the typical row is not in the artifact; its norm per head is what can be shown.
Json largest_norm(const MatrixF& means) {
  return means.rows() == 0 ? Json() : Json(static_cast<double>(means.rowwise().norm().maxCoeff()));
}

Finding inspect_artifact(const fs::path& path) {
  Finding finding;
  finding.kind = "artifact";
  const Artifact artifact = load_artifact(path);
  const Recipe& recipe = artifact.recipe;
  finding.facts["model"] = artifact.model.name;
  finding.facts["architecture"] = artifact.model.architecture;
  finding.facts["model_fingerprint"] = artifact.model.fingerprint;
  finding.facts["n_layer"] = artifact.model.n_layer;
  finding.facts["codec"] = recipe.codec;
  finding.facts["k_bits"] = recipe.k_bits;
  finding.facts["v_bits"] = recipe.v_bits;
  finding.facts["layer_bits"] = to_text(recipe.layer_bits);
  finding.facts["has_spectral"] = std::any_of(artifact.layers.begin(), artifact.layers.end(),
                                              [](const LayerArtifact& layer) { return !layer.spectral.empty(); });
  finding.facts["k_objective"] = recipe.k_objective;
  finding.facts["v_objective"] = recipe.v_objective;
  finding.facts["rotation"] = recipe.per_head ? "per-head" : "layer";
  finding.facts["k_mean"] = std::string(to_string(recipe.k_mean));
  finding.facts["v_mean"] = std::string(to_string(recipe.v_mean));
  finding.facts["group_size"] = recipe.group_size;
  finding.layers = Table({"layer", "heads", "KV heads", "K dim", "V dim", "cache", "rotations", "orthogonality error", "clip K",
                          "clip V", "K mean norm", "V mean norm"});
  std::size_t coded = 0, coded_bytes = 0, plain_bytes = 0;
  for (const LayerArtifact& layer : artifact.layers) {
    const LayerShape& s = layer.shape;
    const std::size_t row = 2U * static_cast<std::size_t>(s.n_head_kv) * static_cast<std::size_t>(s.k_dim + s.v_dim);
    if (s.sliding_window) {
      finding.layers.add({s.layer, s.n_head, s.n_head_kv, s.k_dim, s.v_dim, "16 bit (sliding window)", Json(), Json(), Json(),
                          Json(), Json(), Json()});
      continue;
    }
    const LayerCodecs codecs = make_codecs(layer, recipe);
    ++coded;
    coded_bytes += codecs.k->row_bytes() + codecs.v->row_bytes();
    plain_bytes += row;
    const MatrixF& k_mean = layer.k_mean_pre_rope.rows() > 0 ? layer.k_mean_pre_rope : layer.k_mean;
    finding.layers.add({s.layer, s.n_head, s.n_head_kv, s.k_dim, s.v_dim, recipe.codec, layer.k_rotation.size(),
                        std::max(worst_orthogonality(layer.k_rotation), worst_orthogonality(layer.v_rotation)),
                        recipe.clip_k ? clip_range({*recipe.clip_k}) : clip_range(layer.clip_k),
                        recipe.clip_v ? clip_range({*recipe.clip_v}) : clip_range(layer.clip_v), largest_norm(k_mean),
                        largest_norm(layer.v_mean)});
  }
  finding.facts["coded_layers"] = coded;
  finding.facts["sliding_window_layers"] = artifact.layers.size() - coded;
  finding.facts["bytes_per_token"] = coded_bytes;
  finding.facts["bytes_per_token_f16"] = plain_bytes;
  finding.facts["bits_per_element"] =
      plain_bytes > 0 ? 16.0 * static_cast<double>(coded_bytes) / static_cast<double>(plain_bytes) : 0.0;
  Json provenance = artifact.provenance;
  if (const auto fit = fit_summary(artifact)) {
    provenance.erase("fit");
    finding.facts["verdict"] = fit->verdict;
    finding.facts["fit"] = to_json(*fit);
  }
  finding.facts["provenance"] = provenance;
  finding.facts["date"] = artifact.date;
  finding.facts["tool_version"] = artifact.tool_version;
  finding.facts["digest"] = artifact.digest;
  if (coded == 0) finding.problems.emplace_back("no layer can be coded");
  return finding;
}

Finding inspect_moments(const fs::path& path) {
  Finding finding;
  finding.kind = "moments";
  const ModelMoments moments = load_moments(path.string());
  finding.facts["model"] = moments.model_name;
  finding.facts["architecture"] = moments.architecture;
  finding.facts["model_fingerprint"] = moments.model_fingerprint;
  finding.facts["n_layer"] = moments.n_layer;
  std::int64_t tokens = 0;
  Json sources = Json::array();
  for (const TextSource& source : moments.sources) {
    tokens += source.tokens;
    sources.push_back({{"name", source.name}, {"sha256", source.sha256}, {"tokens", source.tokens}});
  }
  finding.facts["tokens"] = tokens;
  finding.facts["sources"] = sources;
  finding.facts["date"] = moments.date;
  finding.facts["tool_version"] = moments.tool_version;
  finding.layers = Table({"layer", "KV heads", "K dim", "V dim", "tokens", "samples", "K rms", "V rms", "K mean share %"});
  for (std::size_t i = 0; i < moments.shapes.size(); ++i) {
    const LayerShape& s = moments.shapes[i];
    const auto& heads = moments.layers[i];
    if (heads.empty()) {
      finding.layers.add({s.layer, s.n_head_kv, s.k_dim, s.v_dim, "sliding window", Json(), Json(), Json(), Json()});
      continue;
    }
    double k = 0, v = 0, mean = 0;
    std::int64_t rows = 0;
    for (const HeadMoments& head : heads) {
      const double n = static_cast<double>(std::max<std::int64_t>(1, head.tokens));
      k += head.k_moment.trace() / n;
      v += head.v_moment.trace() / n;
      // |mean|^2 of pre-RoPE rows: RoPE keeps lengths, so it is comparable with the energy after RoPE.
      mean += head.k_pre_sum.size() > 0 ? head.k_pre_sum.squaredNorm() / (n * n) : 0.0;
      rows = head.tokens;
    }
    if (rows == 0) finding.problems.push_back(fmt::format("layer {} has no tokens", s.layer));
    const double n = static_cast<double>(heads.size());
    finding.layers.add({s.layer, s.n_head_kv, s.k_dim, s.v_dim, rows, heads[0].k_samples.rows(), std::sqrt(k / n / s.k_dim),
                        std::sqrt(v / n / s.v_dim), k > 0 ? 100.0 * mean / k : 0.0});
  }
  return finding;
}

Finding inspect_rotation(const fs::path& path) {
  Finding finding;
  finding.kind = "rotation";
  const RotationFile file = read_rotation_file(path);
  const bool per_head = !file.layers.empty() && file.layers.begin()->second.rotation.size() > 1;
  finding.facts["objective"] = file.objective;
  finding.facts["for"] = is_key_objective(file.objective) ? "keys" : is_value_objective(file.objective) ? "values" : "either";
  finding.facts["source_grouping"] = file.source_grouping;
  finding.facts["version"] = per_head ? 2 : 1;
  finding.facts["rotation"] = per_head ? "per-head" : "layer";
  finding.facts["layers"] = file.layers.size();
  finding.layers = Table({"layer", "rotations", "dim", "orthogonality error", "smallest eigenvalue", "largest eigenvalue"});
  for (const auto& [number, layer] : file.layers) {
    const bool values = layer.eigenvalues.size() > 0;
    finding.layers.add({number, layer.rotation.size(), layer.rotation.front().rows(), worst_orthogonality(layer.rotation),
                        values ? Json(static_cast<double>(layer.eigenvalues.minCoeff())) : Json(),
                        values ? Json(static_cast<double>(layer.eigenvalues.maxCoeff())) : Json()});
  }
  return finding;
}

Finding inspect_gguf(const fs::path& path) {
  Finding finding;
  finding.kind = "gguf";
  const Gguf file(path);
  const GgufModel model = describe_model(file);
  finding.facts["model"] = model.name;
  finding.facts["architecture"] = model.architecture;
  finding.facts["model_fingerprint"] = model.fingerprint;
  finding.facts["n_layer"] = model.n_layer;
  finding.facts["n_embd"] = model.n_embd;
  finding.facts["n_ctx_train"] = model.n_ctx_train;
  finding.facts["tensors"] = file.tensors().size();
  finding.layers = Table({"layer", "heads", "KV heads", "K dim", "V dim", "cache"});
  std::size_t full = 0, bytes = 0;
  for (const LayerShape& s : model.layers) {
    if (!s.sliding_window) {
      ++full;
      bytes += 2U * static_cast<std::size_t>(s.n_head_kv) * static_cast<std::size_t>(s.k_dim + s.v_dim);
      if (s.k_dim % 4 != 0 || s.v_dim % 4 != 0) {
        finding.problems.push_back(fmt::format("layer {}: head sizes {} and {} are not multiples of 4; OSCAR cannot code them",
                                               s.layer, s.k_dim, s.v_dim));
      }
    }
    finding.layers.add(
        {s.layer, s.n_head, s.n_head_kv, s.k_dim, s.v_dim, s.sliding_window ? "16 bit (sliding window)" : "coded"});
  }
  finding.facts["full_attention_layers"] = full;
  finding.facts["sliding_window_layers"] = model.layers.size() - full;
  finding.facts["bytes_per_token_f16"] = bytes;
  const auto artifact = find_artifact(path, "", model.fingerprint);
  finding.facts["artifact"] = artifact ? Json(artifact->string()) : Json();
  return finding;
}

Finding inspect_safetensors(const fs::path& path) {
  const SafeTensors file = read_safetensors(path);
  const auto text = file.metadata.find("oscar");
  if (text != file.metadata.end()) {
    const nlohmann::json metadata = nlohmann::json::parse(text->second, nullptr, false);
    if (metadata.is_object() && metadata.value("format", nlohmann::json()) == "oscar-moments") return inspect_moments(path);
    return inspect_artifact(path);
  }
  Finding finding;
  finding.kind = "safetensors";
  finding.facts["tensors"] = file.tensors.size();
  finding.layers = Table({"tensor", "type", "shape"});
  for (const auto& [name, tensor] : file.tensors)
    finding.layers.add({name, tensor.dtype, fmt::format("{}", fmt::join(tensor.shape, " x "))});
  finding.problems.emplace_back("it is neither an OSCAR artifact nor moments (no \"oscar\" metadata)");
  return finding;
}

std::string fact_text(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_null()) return "none";
  if (value.is_number_float()) return fmt::format("{:.4g}", value.get<double>());
  return value.dump();
}

int inspect(const InspectOptions& options) {
  const Format format = parse_format(options.format);
  if (options.file.empty()) fail("no file was named: oscar inspect FILE");
  const fs::path path = options.file;
  Finding finding;
  const Kind kind = kind_of(path);  // a file that is not there is an error, not an unsound file
  try {
    switch (kind) {
      case Kind::gguf:
        finding.kind = "gguf";
        finding = inspect_gguf(path);
        break;
      case Kind::torch:
        finding.kind = "rotation";
        finding = inspect_rotation(path);
        break;
      case Kind::safetensors:
        finding.kind = "safetensors";
        finding = inspect_safetensors(path);
        break;
    }
  } catch (const Error& error) {
    finding.problems.emplace_back(error.what());
  }
  const bool sound = finding.problems.empty();
  if (format == Format::json) {
    Json out{{"file", path.filename().string()}, {"kind", finding.kind}, {"sound", sound}, {"problems", finding.problems}};
    out.update(finding.facts);
    out["rows"] = finding.layers.json();
    print(out.dump(1) + "\n");
  } else if (format == Format::csv) {
    print(finding.layers.csv());
  } else {
    print(fmt::format("{}: {}, {}\n", path.string(), finding.kind, sound ? "sound" : "UNSOUND"));
    for (const auto& [key, value] : finding.facts.items()) {
      if (key != "fit") print(fmt::format("  {:<24}{}\n", key, fact_text(value)));  // a table: see oscar card
    }
    if (!finding.layers.empty()) print("\n" + finding.layers.markdown());
  }
  for (const std::string& problem : finding.problems) fmt::print(stderr, "oscar: error: {}\n", problem);
  return sound ? kOk : kBadInput;
}

}  // namespace

void add_inspect(CommandLine& line) {
  Command& command = line.add("inspect", "say what is in a file and whether it is sound");
  const auto options = std::make_shared<InspectOptions>();
  command.usage("FILE [-o md|json|csv]");
  command.text(
      "Knows calibration artifacts, moments, RotationZoo .pt files and GGUF models. Everything is checked as it would be "
      "before use: digest, "
      "shapes, finiteness, orthogonality. Exit code 1 when the file is unsound; the reason is on stderr.");
  command.option("FILE", options->file, "FILE", "file to look into");
  command.option("-o,--format", options->format, "FORMAT", "md, json or csv");
  command.example("oscar inspect model.oscar.safetensors", "recipe, layers, bytes per token, where the calibration came from");
  command.example("oscar inspect model.gguf -o json", "geometry, fingerprint, and the artifact that run would use");
  command.json_key("file, kind", "kind: artifact, moments, rotation, gguf or safetensors");
  command.json_key("sound, problems[]", "true or false; sentences");
  command.json_key("model, architecture, model_fingerprint, n_layer", "artifact, moments, gguf");
  command.json_key("bytes_per_token, bytes_per_token_f16, bits_per_element", "artifact: one coded token, all coded layers");
  command.json_key("provenance, date, tool_version, digest", "artifact");
  command.json_key("verdict, fit", "artifact: what oscar calibrate expected: {verdict, layers[], worried[], warnings[]}");
  command.json_key("tokens, sources[]", "moments");
  command.json_key("objective, for, version, rotation, layers", "rotation (.pt)");
  command.json_key("n_ctx_train, bytes_per_token_f16, artifact", "gguf; artifact: path or null");
  command.json_key("rows[]", "one object per layer, as in the table");
  command.action([options] { return inspect(*options); });
}

}  // namespace oscar::cli
