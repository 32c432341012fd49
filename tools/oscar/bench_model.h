// A stock llama-bench, with and without OSCAR, as one measurement of prefill and decode at a depth.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace oscar::cli {

struct ModelBench {
  std::filesystem::path llama_bench, model;
  std::string artifact;  // empty: as `oscar exec` finds it
  int threads = 0;
  std::int64_t depth = 0;
  int n_prompt = 512, n_gen = 32;
  int repetitions = 2;  // inside one process, which reads the depth's tokens once
};

struct ModelSpeed {
  double prefill = 0, decode = 0;  // tokens per second, medians of the repetitions
};

// `cache`: "ours", or a cache type of llama.cpp. Error with the program's own words when it fails or OSCAR did not serve.
ModelSpeed measure_model(const ModelBench& bench, const std::string& cache);
// From llama-bench's `-o json`; `build`: its commit and number, when asked for.
ModelSpeed parse_llama_bench(const std::string& text, const ModelBench& bench);

}  // namespace oscar::cli
