// What a calibration knows about itself, in a form that is short enough to travel in the artifact's provenance, so that cards
// and reports need nothing but the artifact. Keys: tokens, sources (the fit's), n_ctx, ggml (version); from oscar calibrate
// also
//   fit         what it expects of each layer: FitSummary
//   command     the command that makes the artifact again, file names without folders
//   model_file  {name, sha256, licence: general.license of the GGUF or null}
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "oscar/artifact/artifact.h"

namespace oscar::cli {

struct LayerExpectation {
  int layer = 0;
  // What coded keys add to the layer's output, relative to it (RMS); int2: the same for that codec. nullopt: no importance.
  std::optional<double> key_noise, key_noise_int2;
  double k_error = 0, v_error = 0;  // relative squared errors of logits and values, mean over heads
  double mean_share = 0, head_overlap = 0;
  double clip_k = 0, clip_v = 0;
};
struct WorriedHead {
  int layer = 0, head = 0;
  std::string why;
};
struct FitSummary {
  std::string verdict;
  std::vector<LayerExpectation> layers;
  std::vector<WorriedHead> worried;
  std::vector<std::string> warnings;
};

FitSummary summarise(const FitReport& report);
nlohmann::json to_json(const FitSummary& summary);  // four significant digits
// nullopt: the artifact was converted, or made before artifacts carried it. Error when it is there and broken.
std::optional<FitSummary> fit_summary(const Artifact& artifact);
// The texts of the calibration; empty for a converted artifact.
std::vector<TextSource> calibration_sources(const Artifact& artifact);
struct ModelFile {
  std::string name, sha256, licence;  // licence may be empty
};
std::optional<ModelFile> model_file(const Artifact& artifact);

}  // namespace oscar::cli
