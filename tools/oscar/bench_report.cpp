#include "bench_report.h"

#include <fmt/format.h>

#include <algorithm>

namespace oscar::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kStock[] = {"f16", "q8_0", "q4_0"};

std::optional<std::size_t> index_of(const std::vector<std::string>& names, const std::string& name) {
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) return std::nullopt;
  return static_cast<std::size_t>(found - names.begin());
}

Json optional_json(const std::optional<double>& value) { return value ? Json(*value) : Json(); }

}  // namespace

Json to_json(const BenchRow& row) {
  Json out;
  out["what"] = row.what;
  if (!row.shape.empty()) out["shape"] = row.shape;
  if (!row.model.empty()) out["model"] = row.model;
  out["tokens"] = row.tokens;
  out["depth"] = row.depth;
  out["unit"] = row.rate ? "t/s" : "us";
  out["ours"] = optional_json(median_of(row.runs, 0));
  for (const char* type : kStock) {
    const auto index = index_of(row.contenders, type);
    out[fmt::format("stock_{}", type)] = index ? optional_json(median_of(row.runs, *index)) : Json();
  }
  for (const char* type : kStock) {
    Json& ratio = out[fmt::format("ratio_{}", type)];
    const auto index = index_of(row.contenders, type);
    const auto spread = !index ? std::nullopt : row.rate ? ratio_of(row.runs, 0, *index) : ratio_of(row.runs, *index, 0);
    if (spread) ratio = {{"median", spread->median}, {"min", spread->min}, {"max", spread->max}};
  }
  out["cycles"] = optional_json(row.cycles);
  out["runs"] = row.runs.kept.size();
  out["disturbed"] = row.runs.disturbed;
  out["others"] = row.runs.worst_others;
  out["noise"] = row.runs.noise;
  Json& samples = out["samples"];
  for (std::size_t i = 0; i < row.contenders.size(); ++i) {
    Json& figures = samples[row.contenders[i]] = Json::array();
    for (const Run& run : row.runs.kept) figures.push_back(optional_json(run.values[i]));
  }
  return out;
}

Table bench_table(const Json& rows) {
  std::vector<std::string> types;  // those that were measured
  for (const char* type : kStock) {
    const std::string key = fmt::format("stock_{}", type);
    if (std::any_of(rows.begin(), rows.end(), [&](const Json& row) { return !row.at(key).is_null(); }))
      types.emplace_back(type);
  }
  std::vector<std::string> columns{"what", "shape or model", "tokens", "depth", "unit", "ours"};
  for (const std::string& type : types) columns.push_back(type);
  for (const std::string& type : types) columns.push_back("x " + type);
  columns.insert(columns.end(), {"min - max", "cycles", "runs", "noise"});
  Table table(columns);
  for (const Json& row : rows) {
    std::vector<Json> cells{row["what"],   row.contains("shape") ? row["shape"] : row["model"],
                            row["tokens"], row["depth"],
                            row["unit"],   row["ours"]};
    for (const std::string& type : types) cells.push_back(row.at("stock_" + type));
    for (const std::string& type : types) {
      const Json& ratio = row.at("ratio_" + type);
      cells.push_back(ratio.is_null() ? Json() : ratio["median"]);
    }
    const Json& f16 = row.at("ratio_f16");
    cells.push_back(f16.is_null() ? Json()
                                  : Json(fmt::format("{:.3g} - {:.3g}", f16["min"].get<double>(), f16["max"].get<double>())));
    cells.push_back(row["cycles"]);
    cells.push_back(row["runs"]);
    cells.push_back(row["noise"].get<std::string>().empty() ? Json() : Json("NOISY: " + row["noise"].get<std::string>()));
    table.add(std::move(cells));
  }
  return table;
}

std::string bench_head(const Json& machine) {
  const std::string commit = machine["commit"].get<std::string>();
  return fmt::format(
      "{}, {} processors at {:.2f} GHz, load average {:.2f}; {} threads, instruction set {}; oscar {}{}, ggml {}",
      machine["cpu"].get<std::string>(), machine["processors"].get<int>(), machine["ghz"].get<double>(),
      machine["load"].get<double>(), machine["threads"].get<int>(), machine["isa"].get<std::string>(),
      machine["version"].get<std::string>(), commit.empty() ? "" : fmt::format(" ({})", commit),
      machine["ggml"].get<std::string>());
}

}  // namespace oscar::cli
