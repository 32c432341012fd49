// Finds the artifact that belongs to the model whose cache is being created, and turns it into codecs.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "config.h"
#include "oscar/artifact/artifact.h"

namespace oscar::llama {

// One layer's cache as allocated by the host; n_embd = n_head_kv * dim.
struct CacheGeometry {
  int layer = 0;
  std::int64_t k_embd = 0, v_embd = 0;
};

// Model files of this process: *.gguf mapped into memory, else named on the command line (--no-mmap).
std::vector<std::filesystem::path> model_files();

struct ArtifactChoice {
  std::shared_ptr<const Artifact> artifact;  // null: see problem
  std::filesystem::path path;
  std::string problem;  // one sentence
};
// Explicit path (configuration), else beside each model file. The fingerprint must match a model file when one is known.
ArtifactChoice choose_artifact(const Config& config, std::span<const CacheGeometry> layers);

// Whether a model file with this geometry says that all of these layers have a sliding window.
bool all_sliding(std::span<const CacheGeometry> layers);

// Recipe of the artifact with the configuration's overrides.
Recipe effective_recipe(const Artifact& artifact, const Config& config);

}  // namespace oscar::llama
