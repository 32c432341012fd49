// What `oscar eval` does: plans sequences, documents and chats, runs what is not there from before, and reports.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "eval_methods.h"
#include "settings.h"

namespace oscar::cli {

inline constexpr int kContinuationTokens = 64;

struct EvalOptions {
  HostOptions host;
  Settings settings;
  std::vector<std::string> texts, variants;
  std::string methods, tasks, format = "md";
  int sequences = 0, documents = 0, chats = 0, continuations = -1, from = 0;  // as --quick says
  bool no_floor = false, all = false, quick = false, fresh = false, allow_small = false;
  std::uint64_t seed = 1;
  std::string part_text;
  int part = 0, parts = 1;  // of all sequences, documents and chats, only number `part`, `part` + `parts`, ... are measured
};

struct EvalText {
  std::string name, content, sha256;
};

struct EvalTasks {
  bool kl = false, retrieval = false, tools = false, continuations = false;
};

// Options are settled: nothing is left to a default. Error in the words of the command. With several parts: an empty object,
// the results are in the store, where an evaluation of the whole finds them.
nlohmann::ordered_json run_evaluation(EvalOptions options, EvalTasks tasks, std::vector<Method> methods,
                                      std::vector<EvalText> texts);

}  // namespace oscar::cli
