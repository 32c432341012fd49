#include "eval_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "depth_bins.h"
#include "oscar/base/error.h"
#include "retrieval.h"

namespace oscar::cli {
namespace {

using Json = nlohmann::ordered_json;

Json interval(const Estimate& e) { return Json::array({e.low, e.high}); }

Json kl_row(const MethodResult& r, const EvalFrame& frame, const DepthBin& bin, const std::string& depth) {
  std::vector<std::vector<Difference>> part;
  for (const auto& sequence : r.sequences) {
    part.emplace_back(sequence.begin() + (bin.first - frame.from), sequence.begin() + (bin.end - frame.from));
  }
  const Summary s = part.size() >= kFewSequences ? summarise(part, frame.seed, 0) : summarise(part, frame.seed);
  Json row;
  row["method"] = r.name;
  row["variant"] = r.variant;
  row["settings"] = r.settings;
  row["k_bits"] = r.k_bits;
  row["v_bits"] = r.v_bits;
  row["bits_per_element"] = r.bits;
  row["bits_per_element_all"] = r.bits_all;
  row["depth"] = depth;
  row["kl_mean"] = s.kl_mean.value;
  row["kl_mean_ci"] = interval(s.kl_mean);
  row["kl_p50"] = s.kl_median;
  row["kl_p99"] = s.kl_p99;
  row["kl_max"] = s.kl_max;
  row["same_top"] = s.same_top.value;
  row["same_top_ci"] = interval(s.same_top);
  row["ppl_ratio"] = s.ppl_ratio.value;
  row["ppl_ratio_ci"] = interval(s.ppl_ratio);
  row["positions"] = s.positions;
  row["sequences"] = r.sequences.size();
  row["context"] = frame.n_ctx;
  return row;
}

struct Tally {
  std::int64_t asked = 0, right = 0, same = 0;
  double probability = 0, chance = 0;
  std::array<std::int64_t, kNeedleDepths> asked_at{}, right_at{};
};

Tally count(const MethodResult& r, const MethodResult& base, const EvalFrame& frame, const std::string& kind) {
  Tally t;
  for (std::size_t d = 0; d < frame.questions.size(); ++d) {
    for (std::size_t q = 0; q < frame.questions[d].size(); ++q) {
      const AskedQuestion& question = frame.questions[d][q];
      if (!kind.empty() && question.kind != kind) continue;
      const Choice& choice = r.documents[d][q];
      const bool hit = choice.chosen == question.right;
      ++t.asked;
      t.right += hit ? 1 : 0;
      t.same += choice.chosen == base.documents[d][q].chosen ? 1 : 0;
      t.probability += choice.probability;
      t.chance += 1.0 / question.candidates;
      if (question.depth >= 0) {
        ++t.asked_at[static_cast<std::size_t>(question.depth)];
        t.right_at[static_cast<std::size_t>(question.depth)] += hit ? 1 : 0;
      }
    }
  }
  return t;
}

Json retrieval_row(const MethodResult& r, const Tally& t, const std::string& kind) {
  const double n = static_cast<double>(t.asked);
  const Estimate right = share_of(t.right, t.asked), same = share_of(t.same, t.asked);
  Json row;
  row["method"] = r.name;
  row["kind"] = kind.empty() ? "all" : kind;
  row["questions"] = t.asked;
  row["accuracy"] = right.value;
  row["accuracy_ci"] = interval(right);
  row["chance"] = t.chance / n;
  row["right_probability"] = t.probability / n;
  row["same_choice"] = same.value;
  row["same_choice_ci"] = interval(same);
  if (kind == "needle") {
    row["accuracy_by_depth"] = Json::array();
    for (std::size_t d = 0; d < t.asked_at.size(); ++d) {
      row["accuracy_by_depth"].push_back(
          t.asked_at[d] > 0 ? Json(static_cast<double>(t.right_at[d]) / static_cast<double>(t.asked_at[d])) : Json());
    }
  }
  return row;
}

struct ChoiceTally {
  std::int64_t right = 0, same = 0;
  double probability = 0, chance = 0;
  void add(const Choice& choice, const Choice& exact, int is_right, int candidates) {
    right += choice.chosen == is_right ? 1 : 0;
    same += choice.chosen == exact.chosen ? 1 : 0;
    probability += choice.probability;
    chance += 1.0 / candidates;
  }
};

struct CallTally {
  std::int64_t requests = 0, json = 0, call = 0, right = 0, same = 0;
  ChoiceTally function, argument;

  void add(const AskedCall& asked, const CallResult& result, const CallResult& exact) {
    ++requests;
    function.add(result.function, exact.function, asked.function, asked.functions);
    argument.add(result.argument, exact.argument, asked.argument, asked.arguments);
    json += result.json ? 1 : 0;
    call += result.call ? 1 : 0;
    right += result.right ? 1 : 0;
    same += result.answer == exact.answer ? 1 : 0;
  }
  [[nodiscard]] Json row(const std::string& method, bool answers) const {
    Json row;
    row["method"] = method;
    row["requests"] = requests;
    const auto share = [&](const std::string& name, std::int64_t hits) {
      const Estimate e = share_of(hits, requests);
      row[name] = e.value;
      row[name + "_ci"] = interval(e);
    };
    const double n = static_cast<double>(requests);
    for (const auto& [name, t] : {std::pair("function", &function), std::pair("argument", &argument)}) {
      share(fmt::format("{}_accuracy", name), t->right);
      row[fmt::format("{}_chance", name)] = t->chance / n;
      row[fmt::format("{}_probability", name)] = t->probability / n;
      share(fmt::format("same_{}", name), t->same);
    }
    row["answers"] = answers ? requests : 0;
    if (!answers) return row;
    share("json_valid", json);
    share("call_valid", call);
    share("call_right", right);
    share("same_answer", same);
    return row;
  }
};

Json half(const Json& ci, double scale) { return scale * (ci[1].get<double>() - ci[0].get<double>()) / 2.0; }
Json percent(const Json& share) { return 100.0 * share.get<double>(); }

Table kl_table(const Json& rows) {
  Table table({"method", "K", "V", "bits", "bits, all", "depth", "KL mean", "±", "KL median", "KL 99 %", "KL max", "same top %",
               "± %", "PPL ratio", "± ratio", "positions"});
  for (const Json& r : rows) {
    table.add({r["method"], r["k_bits"], r["v_bits"], r["bits_per_element"], r["bits_per_element_all"], r["depth"],
               r["kl_mean"], half(r["kl_mean_ci"], 1), r["kl_p50"], r["kl_p99"], r["kl_max"], percent(r["same_top"]),
               half(r["same_top_ci"], 100), r["ppl_ratio"], half(r["ppl_ratio_ci"], 1), r["positions"]});
  }
  return table;
}

Table tool_table(const Json& rows) {
  Table table({"method", "requests", "function right %", "± %", "p(function) %", "argument right %", "± arg. %",
               "p(argument) %", "choices as exact %", "answer is JSON %", "± JSON", "is a call %", "right call %", "± right",
               "answer as exact %"});
  for (const Json& r : rows) {
    const auto shown = [&](const char* key) { return r.contains(key) ? percent(r[key]) : Json(); };
    const auto margin = [&](const char* key) { return r.contains(key) ? half(r[key], 100) : Json(); };
    const Json same = (percent(r["same_function"]).get<double>() + percent(r["same_argument"]).get<double>()) / 2;
    table.add({r["method"], r["requests"], percent(r["function_accuracy"]), half(r["function_accuracy_ci"], 100),
               percent(r["function_probability"]), percent(r["argument_accuracy"]), half(r["argument_accuracy_ci"], 100),
               percent(r["argument_probability"]), same, shown("json_valid"), margin("json_valid_ci"), shown("call_valid"),
               shown("call_right"), margin("call_right_ci"), shown("same_answer")});
  }
  return table;
}

std::string csv(const Json& rows) {
  std::vector<std::string> columns;
  for (const auto& [key, value] : rows[0].items()) {
    if (!value.is_array()) {
      columns.push_back(key);
    } else if (key.ends_with("_ci")) {  // accuracies by depth are only in the JSON
      columns.push_back(key + "_low");
      columns.push_back(key + "_high");
    }
  }
  Table table(columns);
  for (const Json& row : rows) {
    std::vector<Json> cells;
    for (const auto& [key, value] : row.items()) {
      if (!value.is_array()) {
        cells.push_back(value);
      } else if (key.ends_with("_ci")) {
        cells.insert(cells.end(), value.begin(), value.end());
      }
    }
    table.add(std::move(cells));
  }
  return table.csv();
}

}  // namespace

std::string confidence_source(std::size_t sequences) {
  return sequences >= kFewSequences ? fmt::format("bootstrap over {} sequences", sequences)
                                    : "bootstrap over blocks of 64 positions: too few sequences to draw from";
}

void check_sample(std::int64_t positions) {
  if (positions >= kLeastPositions) return;
  fail("{} positions are too few for a claim, the least is {}: use more --sequences, a larger -c, or --allow-small", positions,
       kLeastPositions);
}

Json kl_rows(const std::vector<MethodResult>& results, const EvalFrame& frame) {
  const DepthBin all{frame.from, frame.n_ctx - 1};
  // A bin needs the minimum too, over all sequences.
  const int n = results.empty() ? 0 : static_cast<int>(results.back().sequences.size());
  if (n == 0) return Json::array();
  const int least = frame.allow_small ? 1 : (kLeastPositions + n - 1) / n;
  const std::vector<DepthBin> bins = depth_bins(all.first, all.end, least);
  Json rows = Json::array();
  for (const MethodResult& r : results) {
    if (r.sequences.empty()) continue;  // exact is what the others are compared with
    if (bins.size() > 1) {
      for (const DepthBin& bin : bins) rows.push_back(kl_row(r, frame, bin, bin.label()));
    }
    rows.push_back(kl_row(r, frame, all, "all"));
  }
  return rows;
}

Json retrieval_rows(const std::vector<MethodResult>& results, const EvalFrame& frame) {
  Json rows = Json::array();
  if (frame.questions.empty()) return rows;
  for (const MethodResult& r : results) {
    for (const std::string kind : {"needle", "two-facts", "lookup", ""}) {
      const Tally t = count(r, results[0], frame, kind);
      if (t.asked > 0 && (frame.allow_small || t.asked >= kLeastQuestions)) rows.push_back(retrieval_row(r, t, kind));
    }
  }
  return rows;
}

Json tool_rows(const std::vector<MethodResult>& results, const EvalFrame& frame) {
  Json rows = Json::array();
  for (const MethodResult& r : results) {
    CallTally t;
    for (std::size_t c = 0; c < frame.calls.size(); ++c) {
      for (std::size_t i = 0; i < frame.calls[c].size(); ++i) t.add(frame.calls[c][i], r.chats[c][i], results[0].chats[c][i]);
    }
    if (t.requests > 0 && (frame.allow_small || t.requests >= kLeastQuestions)) rows.push_back(t.row(r.name, frame.answers));
  }
  return rows;
}

Json continuation_rows(const std::vector<MethodResult>& results, const EvalFrame& frame) {
  Json rows = Json::array();
  for (const MethodResult& r : results) {
    const auto prompts = static_cast<std::int64_t>(r.equal_tokens.size());
    if (prompts == 0 || (!frame.allow_small && prompts < kLeastQuestions)) continue;
    for (int length = 8; length <= frame.continuation_tokens; length *= 2) {
      const auto equal = std::count_if(r.equal_tokens.begin(), r.equal_tokens.end(), [&](int n) { return n >= length; });
      const Estimate share = share_of(equal, prompts);
      double prefix = 0;
      for (const int n : r.equal_tokens) prefix += static_cast<double>(std::min(n, length)) / length;
      Json row;
      row["method"] = r.name;
      row["length"] = length;
      row["prompts"] = prompts;
      row["same"] = share.value;
      row["same_ci"] = interval(share);
      row["equal_prefix"] = prefix / static_cast<double>(prompts);
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

void print_evaluation(const Json& result, Format format) {
  if (format == Format::json) {
    print(result.dump(1) + "\n");
    return;
  }
  if (format == Format::csv) {
    for (const char* part : {"rows", "retrieval", "tools", "continuations"}) {
      if (result[part].empty()) continue;
      print(csv(result[part]));
      return;
    }
    return;
  }
  std::string out;
  if (!result["rows"].empty()) {
    out += kl_table(result["rows"]).markdown();
    out += fmt::format("\n{}: {} sequences of {} tokens; KL(exact || method) in nats; ± = half of the 95 % interval, {}\n",
                       result["model"].get<std::string>(), result["sequences"].get<std::size_t>(), result["context"].get<int>(),
                       result["confidence"].get<std::string>());
    if (result["rows"][0]["method"] == kFloorMethod)
      out += "noise-floor: exact against exact with one bit of every query flipped; smaller figures mean nothing\n";
  }
  if (!result["retrieval"].empty()) {
    Table table(
        {"method", "facts found", "questions", "right %", "± %", "chance %", "p(right) %", "choice as exact %", "± same"});
    for (const Json& r : result["retrieval"]) {
      table.add({r["method"], r["kind"], r["questions"], percent(r["accuracy"]), half(r["accuracy_ci"], 100),
                 percent(r["chance"]), percent(r["right_probability"]), percent(r["same_choice"]),
                 half(r["same_choice_ci"], 100)});
    }
    out += fmt::format("\n{}", table.markdown());
  }
  if (!result["tools"].empty()) out += fmt::format("\n{}", tool_table(result["tools"]).markdown());
  if (!result["continuations"].empty()) {
    Table table({"method", "greedy tokens", "prompts", "identical %", "± %", "equal prefix %"});
    for (const Json& r : result["continuations"]) {
      table.add(
          {r["method"], r["length"], r["prompts"], percent(r["same"]), half(r["same_ci"], 100), percent(r["equal_prefix"])});
    }
    out += fmt::format("\n{}", table.markdown());
  }
  for (const Json& note : result["notes"]) out += fmt::format("\n{}\n", note.get<std::string>());
  print(out);
}

}  // namespace oscar::cli
