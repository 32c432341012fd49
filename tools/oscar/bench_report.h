// What `oscar bench` says: its rows as JSON from what was measured, and the table made of them.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "bench_runs.h"
#include "output.h"

namespace oscar::cli {

struct BenchRow {
  std::string what;                     // "decode", "prefill", "append", "tg32", "pp512"
  std::string shape, model;             // one of them: of the made-up layer, or the model file
  std::int64_t tokens = 0;              // of the operation; of tg and pp: of the test
  std::int64_t depth = 0;               // tokens in the cache before
  bool rate = false;                    // figures are tokens per second, else microseconds: which of two is the better one
  std::vector<std::string> contenders;  // of the runs' values: "ours", "f16", "q8_0", "q4_0"
  Runs runs;
  std::optional<double> cycles;  // of our operation: per visible key and query head, or per stored value
};

// Keys: what, shape or model, tokens, depth, unit, ours, stock_<type>, ratio_<type> {median, min, max}, cycles, runs,
// disturbed, others, noise, samples {contender: one figure or null per run}. Ratios above 1: ours is faster.
nlohmann::ordered_json to_json(const BenchRow& row);
// Rows as to_json() gives them.
Table bench_table(const nlohmann::ordered_json& rows);
std::string bench_head(const nlohmann::ordered_json& machine);  // one line over the table

}  // namespace oscar::cli
