// What `oscar report` shows: result files of eval and compare, and artifacts, read and checked.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fit_summary.h"
#include "oscar/artifact/artifact.h"

namespace oscar::cli {

// What a method is, for colours: this codec, the published one, somebody else's, or the noise that any change makes.
enum class MethodGroup { spectral, int2, rival, floor };
const char* to_string(MethodGroup group);

struct MeasuredRow {
  std::string method, label;  // as the file calls it; short, for a plot
  MethodGroup group = MethodGroup::spectral;
  std::string depth;           // "all" or a range of positions
  std::optional<double> bits;  // per coded element, metadata included; nullopt: unknown
  double kl_mean = 0, kl_low = 0, kl_high = 0, kl_p50 = 0, kl_p99 = 0, kl_max = 0;  // nats
  double same_top = 0, ppl_ratio = 0;                                               // same_top: 0..1
  std::int64_t positions = 0;
};

struct RetrievalRow {  // eval only
  std::string method, kind;
  std::int64_t questions = 0;
  double accuracy = 0, chance = 0, same_choice = 0;
};

struct ResultFile {
  std::string file, sha256, command;  // command: eval or compare
  std::string oscar, ggml, model, fingerprint, artifact_digest, confidence;
  std::vector<std::pair<std::string, std::string>> texts;  // name, sha256
  std::int64_t context = 0, from = 0, sequences = 0;
  std::vector<MeasuredRow> rows;
  std::vector<std::string> ranges;  // depths other than "all", in the order of the file
  std::vector<RetrievalRow> retrieval;
};
// Error naming the file and what is wrong with it. Unknown keys are left alone.
ResultFile read_result(const std::filesystem::path& path);

struct ArtifactFile {
  std::string file;
  Artifact artifact;
  std::optional<FitSummary> fit;
};
ArtifactFile read_report_artifact(const std::filesystem::path& path);

// "model, text and text": what tells result files apart.
std::string label_of(const ResultFile& result);

}  // namespace oscar::cli
