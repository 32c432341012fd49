#include "fit_summary.h"

#include <cmath>

#include "oscar/base/error.h"
#include "oscar/io/json.h"
#include "oscar/method/moments_json.h"

namespace oscar::cli {
namespace {

using Json = nlohmann::json;

constexpr const char* kWhat = "the artifact's record of its fit";

double rounded(double value) { return std::stod(fmt::format("{:.4g}", value)); }
Json rounded(const std::optional<double>& value) { return value ? Json(rounded(*value)) : Json(); }

std::optional<double> optional_number(const Json& object, const char* key) {
  if (json_field(object, key, kWhat).is_null()) return std::nullopt;
  return json_number(object, key, kWhat);
}

}  // namespace

FitSummary summarise(const FitReport& report) {
  FitSummary out;
  out.verdict = report.verdict;
  out.warnings = report.warnings;
  for (std::size_t begin = 0; begin < report.rows.size();) {
    LayerExpectation sum;
    sum.layer = report.rows[begin].layer;
    double noise = 0, int2 = 0, output = 0;
    std::size_t end = begin;
    for (; end < report.rows.size() && report.rows[end].layer == sum.layer; ++end) {
      const FitReport::Row& row = report.rows[end];
      sum.k_error += row.k_error;
      sum.v_error += row.v_error;
      sum.mean_share += row.mean_share;
      sum.head_overlap += row.head_overlap;
      sum.clip_k += static_cast<double>(row.clip_k);
      sum.clip_v += static_cast<double>(row.clip_v);
      noise += row.key_noise;
      int2 += row.key_noise_int2;
      output += row.output_energy;
      if (!row.flag.empty()) out.worried.push_back({row.layer, row.head, row.flag});
    }
    const double n = static_cast<double>(end - begin);
    for (double* mean : {&sum.k_error, &sum.v_error, &sum.mean_share, &sum.head_overlap, &sum.clip_k, &sum.clip_v}) *mean /= n;
    if (output > 0) {
      sum.key_noise = std::sqrt(noise / output);
      sum.key_noise_int2 = std::sqrt(int2 / output);
    }
    out.layers.push_back(sum);
    begin = end;
  }
  return out;
}

Json to_json(const FitSummary& summary) {
  Json layers = Json::array();
  for (const LayerExpectation& l : summary.layers) {
    layers.push_back({{"layer", l.layer},
                      {"key_noise", rounded(l.key_noise)},
                      {"key_noise_int2", rounded(l.key_noise_int2)},
                      {"k_error", rounded(l.k_error)},
                      {"v_error", rounded(l.v_error)},
                      {"mean_share", rounded(l.mean_share)},
                      {"head_overlap", rounded(l.head_overlap)},
                      {"clip_k", rounded(l.clip_k)},
                      {"clip_v", rounded(l.clip_v)}});
  }
  Json worried = Json::array();
  for (const WorriedHead& w : summary.worried) worried.push_back({{"layer", w.layer}, {"head", w.head}, {"why", w.why}});
  return {{"verdict", summary.verdict}, {"layers", layers}, {"worried", worried}, {"warnings", summary.warnings}};
}

std::optional<FitSummary> fit_summary(const Artifact& artifact) {
  const auto found = artifact.provenance.find("fit");
  if (found == artifact.provenance.end()) return std::nullopt;
  FitSummary out;
  out.verdict = json_text(*found, "verdict", kWhat);
  for (const Json& l : json_array(*found, "layers", kWhat)) {
    out.layers.push_back({json_count(l, "layer", kWhat), optional_number(l, "key_noise"), optional_number(l, "key_noise_int2"),
                          json_number(l, "k_error", kWhat), json_number(l, "v_error", kWhat),
                          json_number(l, "mean_share", kWhat), json_number(l, "head_overlap", kWhat),
                          json_number(l, "clip_k", kWhat), json_number(l, "clip_v", kWhat)});
  }
  for (const Json& w : json_array(*found, "worried", kWhat))
    out.worried.push_back({json_count(w, "layer", kWhat), json_count(w, "head", kWhat), json_text(w, "why", kWhat)});
  for (const Json& warning : json_array(*found, "warnings", kWhat)) {
    if (!warning.is_string()) fail("a warning in {} is not text", kWhat);
    out.warnings.push_back(warning.get<std::string>());
  }
  return out;
}

std::vector<TextSource> calibration_sources(const Artifact& artifact) {
  std::vector<TextSource> out;
  if (!artifact.provenance.contains("sources")) return out;
  for (const Json& source : json_array(artifact.provenance, "sources", "the artifact's provenance"))
    out.push_back(text_source_from_json(source, "a text of the artifact's provenance"));
  return out;
}

std::optional<ModelFile> model_file(const Artifact& artifact) {
  const auto found = artifact.provenance.find("model_file");
  if (found == artifact.provenance.end()) return std::nullopt;
  constexpr const char* kFile = "the model file in the artifact's provenance";
  const bool licensed = !json_field(*found, "licence", kFile).is_null();
  return ModelFile{json_text(*found, "name", kFile), json_text(*found, "sha256", kFile),
                   licensed ? json_text(*found, "licence", kFile) : std::string()};
}

}  // namespace oscar::cli
