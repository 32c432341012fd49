#include "bench_model.h"

#include <nlohmann/json.hpp>

#include "bench_runs.h"
#include "child.h"
#include "oscar/base/error.h"

namespace oscar::cli {
namespace {

// The last lines of what a program said.
std::string last_words(const std::string& text) {
  std::string trimmed = text.substr(0, text.find_last_not_of(" \n\r\t") + 1);
  std::size_t begin = trimmed.size();
  for (int lines = 0; lines < 3 && begin != std::string::npos && begin > 0; ++lines) begin = trimmed.rfind('\n', begin - 1);
  return begin == std::string::npos ? trimmed : trimmed.substr(begin == 0 ? 0 : begin + 1);
}

}  // namespace

ModelSpeed parse_llama_bench(const std::string& text, const ModelBench& bench) {
  const nlohmann::json tests = nlohmann::json::parse(text, nullptr, false);
  if (!tests.is_array()) fail("{} did not print JSON with -o json", bench.llama_bench.string());
  ModelSpeed speed;
  for (const nlohmann::json& test : tests) {
    const auto number = [&](const char* key) {
      const auto found = test.find(key);
      return found != test.end() && found->is_number() ? found->get<std::int64_t>() : -1;
    };
    if (number("n_depth") != bench.depth) continue;
    std::vector<double> samples;
    if (const auto found = test.find("samples_ts"); found != test.end() && found->is_array()) {
      for (const nlohmann::json& sample : *found) {
        if (sample.is_number()) samples.push_back(sample.get<double>());
      }
    }
    if (samples.empty()) continue;
    const double median = spread_of(std::move(samples)).median;
    if (number("n_prompt") == bench.n_prompt && number("n_gen") == 0) speed.prefill = median;
    if (number("n_prompt") == 0 && number("n_gen") == bench.n_gen) speed.decode = median;
  }
  if (!(speed.prefill > 0 && speed.decode > 0)) {
    fail("{} printed no samples_ts of pp{} and tg{} at depth {}: is it too old?", bench.llama_bench.string(), bench.n_prompt,
         bench.n_gen, bench.depth);
  }
  return speed;
}

ModelSpeed measure_model(const ModelBench& bench, const std::string& cache) {
  const bool ours = cache == "ours";
  std::vector<std::string> args;
  if (ours) {
    args = {std::filesystem::read_symlink("/proc/self/exe").string(), "exec"};
    if (!bench.artifact.empty()) args.insert(args.end(), {"--oscar", bench.artifact});
    args.emplace_back("--");
  }
  const std::string type = ours ? "f16" : cache;
  args.insert(args.end(), {bench.llama_bench.string(),
                           "-m",
                           bench.model.string(),
                           "-fa",
                           "1",
                           "-ctk",
                           type,
                           "-ctv",
                           type,
                           "-t",
                           std::to_string(bench.threads),
                           "-p",
                           std::to_string(bench.n_prompt),
                           "-n",
                           std::to_string(bench.n_gen),
                           "-d",
                           std::to_string(bench.depth),
                           "-r",
                           std::to_string(bench.repetitions),
                           "-o",
                           "json"});
  // A plug-in in the user's own environment stays out of stock runs.
  const ChildOutput done = run_captured(args, {{"OSCAR_MODE", ours ? "oscar" : "off"}, {"OSCAR_LOG", "0"}});
  if (done.code != 0) {
    fail("llama-bench with {} ended with status {}: {}", ours ? "OSCAR" : "the " + cache + " cache", done.code,
         last_words(done.err));
  }
  return parse_llama_bench(done.out, bench);
}

}  // namespace oscar::cli
