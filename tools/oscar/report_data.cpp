#include "report_data.h"

#include <algorithm>
#include <cmath>

#include "eval_report.h"
#include "oscar/base/error.h"
#include "oscar/io/files.h"
#include "oscar/io/json.h"
#include "oscar/io/sha256.h"

namespace oscar::cli {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kLargestFile = 64U << 20U;  // results have kilobytes

double at_least_0(const Json& row, const char* key, const std::string& what) {
  const double value = json_number(row, key, what);
  if (value < 0) fail("'{}' of {} is {}, but it cannot be negative", key, what, value);
  return value;
}

double share(const Json& row, const char* key, const std::string& what) {
  const double value = json_number(row, key, what);
  if (value < 0 || value > 1) fail("'{}' of {} is {}, but it is a share: 0 to 1", key, what, value);
  return value;
}

// Text where it is optional in the file; Error when it is there and no text.
std::string text_or(const Json& object, const char* key, const std::string& what, const std::string& otherwise) {
  return object.contains(key) && !object[key].is_null() ? json_text(object, key, what) : otherwise;
}

MethodGroup group_of(const std::string& method, const std::string& settings) {
  const auto has = [&](const char* word) { return settings.find(word) != std::string::npos; };
  if (method == kFloorMethod || has("mode=exact")) return MethodGroup::floor;
  if (has("codec=sim:")) return MethodGroup::rival;
  if (has("codec=int2")) return MethodGroup::int2;
  return MethodGroup::spectral;
}

std::string short_label(const std::string& method) {
  std::string label = method;
  for (const char* noise : {"codec=sim:", "codec="}) {
    if (const std::size_t at = label.find(noise); at != std::string::npos) label.erase(at, std::string(noise).size());
  }
  return label;
}

// The keys that rows of both commands share; they differ in the median's name.
MeasuredRow read_row(const Json& row, const std::string& method, const std::string& settings, const char* median,
                     const std::string& file) {
  MeasuredRow out;
  out.method = method;
  out.label = short_label(method);
  out.group = group_of(method, settings);
  const std::string what = fmt::format("row {} of {}", method, file);
  if (const Json& bits = json_field(row, "bits_per_element", what); !bits.is_null()) {
    out.bits = json_number(row, "bits_per_element", what);
    if (*out.bits <= 0 || *out.bits > 64) fail("'bits_per_element' of {} is {}, outside 0..64", what, *out.bits);
  }
  out.kl_mean = at_least_0(row, "kl_mean", what);
  const Json& interval = json_array(row, "kl_mean_ci", what);
  if (interval.size() != 2 || !interval[0].is_number() || !interval[1].is_number())
    fail("'kl_mean_ci' of {} is not a list of two numbers", what);
  out.kl_low = interval[0].get<double>();
  out.kl_high = interval[1].get<double>();
  if (!std::isfinite(out.kl_low) || !std::isfinite(out.kl_high) || out.kl_low > out.kl_high || out.kl_low < 0)
    fail("'kl_mean_ci' of {} is no interval: {} to {}", what, out.kl_low, out.kl_high);
  out.kl_p50 = at_least_0(row, median, what);
  out.kl_p99 = at_least_0(row, "kl_p99", what);
  out.kl_max = at_least_0(row, "kl_max", what);
  out.same_top = share(row, "same_top", what);
  out.ppl_ratio = at_least_0(row, "ppl_ratio", what);
  return out;
}

void read_eval(const Json& json, ResultFile& out) {
  const std::string& file = out.file;
  out.command = "eval";
  out.ggml = text_or(json, "ggml", file, "");
  out.confidence = text_or(json, "confidence", file, "");
  if (json.contains("artifact") && !json["artifact"].is_null())
    out.artifact_digest = json_text(json["artifact"], "digest", "the artifact of " + file);
  for (const Json& text : json_array(json, "texts", file))
    out.texts.emplace_back(json_text(text, "name", "a text of " + file), json_text(text, "sha256", "a text of " + file));
  out.context = json_count(json, "context", file);
  out.from = json_count(json, "from", file);
  out.sequences = json_count(json, "sequences", file);
  for (const Json& row : json_array(json, "rows", file)) {
    const std::string& method = json_text(row, "method", "a row of " + file);
    const std::string what = fmt::format("row {} of {}", method, file);
    MeasuredRow read = read_row(row, method, json_text(row, "variant", what), "kl_p50", file);
    read.depth = json_text(row, "depth", what);
    read.positions = json_integer(row, "positions", what, 0);
    if (read.depth != "all" && std::find(out.ranges.begin(), out.ranges.end(), read.depth) == out.ranges.end())
      out.ranges.push_back(read.depth);
    out.rows.push_back(std::move(read));
  }
  for (const Json& row : json_array(json, "retrieval", file)) {
    const std::string what = "a retrieval row of " + file;
    out.retrieval.push_back({json_text(row, "method", what), json_text(row, "kind", what),
                             json_integer(row, "questions", what, 1), share(row, "accuracy", what), share(row, "chance", what),
                             share(row, "same_choice", what)});
  }
}

void read_compare(const Json& json, ResultFile& out) {
  const std::string& file = out.file;
  out.command = "compare";
  out.texts.emplace_back(json_text(json, "text", file), json_text(json, "text_sha256", file));
  out.context = json_count(json, "n_ctx", file);
  out.from = json_count(json, "from", file);
  out.sequences = json_count(json, "chunks", file);
  const std::int64_t positions = json_integer(json, "positions", file, 0);
  for (const Json& row : json_array(json, "variants", file)) {
    const std::string& name = json_text(row, "name", "a variant of " + file);
    const std::string& mode = json_text(row, "mode", fmt::format("variant {} of {}", name, file));
    MeasuredRow read = read_row(row, name, mode == "oscar" ? name : "mode=exact", "kl_median", file);
    read.depth = "all";
    read.positions = positions;
    out.rows.push_back(std::move(read));
  }
}

}  // namespace

const char* to_string(MethodGroup group) {
  switch (group) {
    case MethodGroup::spectral:
      return "spectral";
    case MethodGroup::int2:
      return "int2";
    case MethodGroup::rival:
      return "rival";
    case MethodGroup::floor:
      return "floor";
  }
  fail("method group {} is unknown", static_cast<int>(group));
}

ResultFile read_result(const std::filesystem::path& path) {
  ResultFile out;
  out.file = path.filename().string();
  const FileReader reader(path);
  if (reader.size() > kLargestFile)
    fail("{} has {} bytes, but results of oscar eval and compare have kilobytes: is it the right file?", path.string(),
         reader.size());
  std::string text(reader.size(), '\0');
  reader.read(0, std::as_writable_bytes(std::span(text)));
  const Json json = parse_json(text, path.string());
  const bool eval = json.is_object() && json.contains("rows") && json.contains("retrieval");
  const bool compare = json.is_object() && json.contains("variants") && json.contains("base");
  if (!eval && !compare)
    fail("{} is not a result of oscar: make one with oscar eval -o json or oscar compare -o json", path.string());
  out.sha256 = sha256_hex(std::as_bytes(std::span(text)));
  out.oscar = json_text(json, "oscar", out.file);
  out.model = json_text(json, "model", out.file);
  out.fingerprint = json_text(json, "model_fingerprint", out.file);
  if (eval) {
    read_eval(json, out);
  } else {
    read_compare(json, out);
  }
  if (out.rows.empty()) fail("{} holds no KL, which is what oscar report plots: measure with task kl", path.string());
  return out;
}

ArtifactFile read_report_artifact(const std::filesystem::path& path) {
  ArtifactFile out;
  out.file = path.filename().string();
  out.artifact = load_artifact(path);
  out.fit = fit_summary(out.artifact);
  return out;
}

std::string label_of(const ResultFile& result) {
  std::vector<std::string> names;
  names.reserve(result.texts.size());
  for (const auto& [name, sha256] : result.texts) names.push_back(name);
  return fmt::format("{}, {}", result.model, fmt::join(names, " and "));
}

}  // namespace oscar::cli
