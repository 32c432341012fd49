#include "artifact_source.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>

#include "oscar/base/error.h"
#include "oscar/io/gguf.h"

namespace oscar::llama {
namespace {

// Reading a model's header takes tens of milliseconds, and programs create several contexts of one model.
const GgufModel& describe(const std::filesystem::path& model) {
  static std::mutex mutex;
  static auto* known = new std::map<std::filesystem::path, GgufModel>;  // entries stay where they are, and are never removed
  const std::lock_guard lock(mutex);
  const auto found = known->find(model);
  if (found != known->end()) return found->second;
  return known->emplace(model, describe_model(Gguf(model))).first->second;
}

// Those of the files that are models; adapters and projectors are not. Throws when none is.
std::vector<std::filesystem::path> described(const std::vector<std::filesystem::path>& files) {
  std::vector<std::filesystem::path> models;
  std::string problem;
  for (const auto& file : files) {
    try {
      describe(file);
      models.push_back(file);
    } catch (const std::exception& e) {
      problem = e.what();
    }
  }
  if (models.empty() && !problem.empty()) throw Error(problem);
  return models;
}

std::vector<std::string> names(std::span<const std::filesystem::path> paths) {
  std::vector<std::string> out;
  for (const auto& path : paths) out.push_back(path.string());
  return out;
}

void add_model(std::vector<std::filesystem::path>& files, const std::string& path) {
  std::error_code error;
  if (!path.ends_with(".gguf") || !std::filesystem::is_regular_file(path, error)) return;
  if (std::find(files.begin(), files.end(), path) == files.end()) files.emplace_back(path);
}

// Empty when every cache layer is one of the artifact's, with its geometry.
std::string geometry_problem(const Artifact& artifact, std::span<const CacheGeometry> layers) {
  for (const CacheGeometry& g : layers) {
    const LayerArtifact* layer = artifact.find(g.layer);
    if (layer == nullptr) return fmt::format("it has no layer {}, which this model caches", g.layer);
    const LayerShape& s = layer->shape;
    if (std::int64_t{s.n_head_kv} * s.k_dim != g.k_embd || std::int64_t{s.n_head_kv} * s.v_dim != g.v_embd) {
      return fmt::format("its layer {} has {} KV heads of {} and {} dimensions, this model's rows have {} and {} values",
                         g.layer, s.n_head_kv, s.k_dim, s.v_dim, g.k_embd, g.v_embd);
    }
  }
  return {};
}

// Whether a model of this file has these cache layers.
bool fits(const GgufModel& model, std::span<const CacheGeometry> layers) {
  return std::all_of(layers.begin(), layers.end(), [&](const CacheGeometry& g) {
    return std::any_of(model.layers.begin(), model.layers.end(), [&](const LayerShape& s) {
      return s.layer == g.layer && std::int64_t{s.n_head_kv} * s.k_dim == g.k_embd &&
             std::int64_t{s.n_head_kv} * s.v_dim == g.v_embd;
    });
  });
}

ArtifactChoice use(const std::filesystem::path& path, std::shared_ptr<const Artifact> artifact,
                   std::span<const CacheGeometry> layers) {
  ArtifactChoice choice;
  choice.path = path;
  if (const std::string problem = geometry_problem(*artifact, layers); !problem.empty()) {
    choice.problem = fmt::format("the artifact {} does not fit: {}", path.string(), problem);
  } else {
    choice.artifact = std::move(artifact);
  }
  return choice;
}

ArtifactChoice use_beside(const std::filesystem::path& model, std::span<const CacheGeometry> layers) {
  const std::string& fingerprint = describe(model).fingerprint;
  const auto path = find_artifact(model, "", fingerprint);
  if (!path) {
    return {nullptr,
            {},
            fmt::format("no artifact for {} was found; make one with `oscar calibrate -m {}` or set OSCAR_ARTIFACT",
                        model.string(), model.string())};
  }
  auto artifact = std::make_shared<const Artifact>(load_artifact(*path));
  if (artifact->model.fingerprint != fingerprint) {
    return {nullptr, *path,
            fmt::format("the artifact {} was made for another model: its fingerprint is {}, the model's {}", path->string(),
                        artifact->model.fingerprint, fingerprint)};
  }
  return use(*path, std::move(artifact), layers);
}

// A program may hold several models (a draft beside its target), and a cache does not say whose it is: its geometry has to.
ArtifactChoice use_given(const std::filesystem::path& path, std::span<const std::filesystem::path> models,
                         std::span<const CacheGeometry> layers) {
  auto artifact = std::make_shared<const Artifact>(load_artifact(path));
  const std::string& wanted = artifact->model.fingerprint;
  std::vector<std::filesystem::path> owners;
  for (const auto& model : models) {
    if (fits(describe(model), layers)) owners.push_back(model);
  }
  const auto is_made_for = [&](const auto& model) { return describe(model).fingerprint == wanted; };
  if (owners.empty()) {  // no model explains the cache: what does not fit is said of the artifact, if it is one of theirs
    if (std::any_of(models.begin(), models.end(), is_made_for)) return use(path, std::move(artifact), layers);
    owners.assign(models.begin(), models.end());
  }
  if (std::all_of(owners.begin(), owners.end(), is_made_for)) return use(path, std::move(artifact), layers);
  if (owners.size() == 1 && models.size() > 1) {  // a second model may have an artifact of its own
    ArtifactChoice choice = use_beside(owners.front(), layers);
    if (choice.artifact) return choice;
  }
  if (std::any_of(owners.begin(), owners.end(), is_made_for)) {
    return {nullptr, path,
            fmt::format("this program holds models of equal shape, {}, and the artifact {} is of one of them only: whose cache "
                        "this is cannot be told",
                        fmt::join(names(owners), " and "), path.string())};
  }
  return {nullptr, path,
          fmt::format(
              "the artifact {} was made for another model than {}: its fingerprint is {}, the model's {}; a second model "
              "needs its own artifact beside it (`oscar calibrate -m {}`)",
              path.string(), owners.front().string(), wanted, describe(owners.front()).fingerprint, owners.front().string())};
}

}  // namespace

std::vector<std::filesystem::path> model_files() {
  std::vector<std::filesystem::path> files;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const std::size_t path = line.find('/');
    if (path != std::string::npos) add_model(files, line.substr(path));
  }
  if (!files.empty()) return files;
  std::ifstream arguments("/proc/self/cmdline");
  for (std::string argument; std::getline(arguments, argument, '\0');) add_model(files, argument);
  return files;
}

ArtifactChoice choose_artifact(const Config& config, std::span<const CacheGeometry> layers) {
  ArtifactChoice last;
  last.path = config.artifact;
  std::vector<std::filesystem::path> models;
  try {
    models = described(model_files());
    if (!config.artifact.empty()) return use_given(config.artifact, models, layers);
  } catch (const std::exception& e) {
    last.problem = e.what();
    return last;
  }
  if (models.empty()) {
    last.problem = "no artifact is named and the model's file cannot be found from inside this program; set OSCAR_ARTIFACT";
  }
  for (const auto& model : models) {
    try {
      if (models.size() > 1 && !fits(describe(model), layers)) continue;
      ArtifactChoice choice = use_beside(model, layers);
      if (choice.artifact) return choice;
      last = std::move(choice);
    } catch (const std::exception& e) {
      last.problem = e.what();
    }
  }
  if (last.problem.empty()) last.problem = "none of this program's models has a cache of this shape";
  return last;
}

bool all_sliding(std::span<const CacheGeometry> layers) {
  const auto in = [&](const GgufModel& model) {
    return fits(model, layers) && std::all_of(layers.begin(), layers.end(), [&](const CacheGeometry& g) {
             return std::any_of(model.layers.begin(), model.layers.end(),
                                [&](const LayerShape& s) { return s.layer == g.layer && s.sliding_window; });
           });
  };
  for (const auto& model : model_files()) {
    try {
      if (in(describe(model))) return true;
    } catch (const std::exception&) {  // a file that is no model of ours says nothing
    }
  }
  return false;
}

Recipe effective_recipe(const Artifact& artifact, const Config& config) {
  Recipe recipe = artifact.recipe;
  if (config.k_mean) recipe.k_mean = *config.k_mean;
  if (config.v_mean) recipe.v_mean = *config.v_mean;
  if (config.clip_k) recipe.clip_k = config.clip_k;
  if (config.clip_v) recipe.clip_v = config.clip_v;
  if (config.codec) recipe.codec = *config.codec;
  set_rates(recipe, config.rates);
  // A setting that would change nothing is a misunderstanding, and must not pass for a measurement.
  if (recipe.codec != "int2" && (config.clip_k || config.clip_v)) {
    fail("clip_k and clip_v belong to codec int2, but this cache has codec {}: leave them out or choose codec int2",
         recipe.codec);
  }
  if (recipe.codec != "spectral" && config.rates.any()) {
    fail(
        "k_bits, v_bits and layer_bits belong to codec spectral, but this cache has codec {}: leave them out or choose codec "
        "spectral",
        recipe.codec);
  }
  check_layer_bits(recipe, artifact);
  return recipe;
}

}  // namespace oscar::llama
