// What `oscar eval` says: its rows as JSON from what was measured, and the tables made of them.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "output.h"
#include "statistics.h"

namespace oscar::cli {

// The two methods that every evaluation has: what the others are compared with, and what rounding alone does to it.
inline constexpr const char* kBaseMethod = "exact";
inline constexpr const char* kFloorMethod = "noise-floor";

struct Choice {
  int chosen = 0;          // candidate with the highest summed log-probability
  double probability = 0;  // of the right one, when only the candidates are possible
};

struct CallResult {
  Choice function, argument;
  std::vector<std::int32_t> answer;  // tokens; empty when none was generated
  bool json = false, call = false, right = false;
};

struct MethodResult {
  std::string name, variant;
  nlohmann::ordered_json settings;                 // of the plug-in, with the digest of the artifact
  nlohmann::ordered_json k_bits, v_bits;           // per coded element without metadata; null when unknown
  double bits = 0, bits_all = 0;                   // as CacheReport; 0 when no text was run
  std::vector<std::vector<Difference>> sequences;  // [sequence][position - from]
  std::vector<int> equal_tokens;                   // of each greedy continuation, from its start
  std::vector<std::vector<Choice>> documents;      // [document][question]
  std::vector<std::vector<CallResult>> chats;      // [chat][request]
};

struct AskedQuestion {
  std::string kind;
  int depth = -1, right = 0, candidates = 0;
};

struct AskedCall {
  int function = 0, functions = 0, argument = 0, arguments = 0;  // the right one of how many
};

struct EvalFrame {
  int n_ctx = 0, from = 0;
  int continuation_tokens = 0;
  bool allow_small = false;
  std::uint64_t seed = 1;
  std::vector<std::vector<AskedQuestion>> questions;  // [document]
  std::vector<std::vector<AskedCall>> calls;          // [chat]
  bool answers = false;                               // to the requests of chats, generated
};

// A figure from fewer is noise that looks like a result.
inline constexpr int kLeastPositions = 512;
inline constexpr int kLeastQuestions = 20;       // of a kind; also prompts of continuations
inline constexpr std::size_t kFewSequences = 4;  // below, intervals come from blocks within the sequences

void check_sample(std::int64_t positions);  // Error below kLeastPositions

// One row per method and depth bin, and one over all depths.
nlohmann::ordered_json kl_rows(const std::vector<MethodResult>& results, const EvalFrame& frame);
// One row per method (results[0], exact, included) and kind of question, and one over all kinds; empty when there are too few.
nlohmann::ordered_json retrieval_rows(const std::vector<MethodResult>& results, const EvalFrame& frame);
// One row per method (results[0], exact, included); empty when there are too few requests.
nlohmann::ordered_json tool_rows(const std::vector<MethodResult>& results, const EvalFrame& frame);
// One row per method and length; empty when there are too few prompts.
nlohmann::ordered_json continuation_rows(const std::vector<MethodResult>& results, const EvalFrame& frame);
std::string confidence_source(std::size_t sequences);

void print_evaluation(const nlohmann::ordered_json& result, Format format);

}  // namespace oscar::cli
