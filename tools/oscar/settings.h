// What run, compare and exec let the user say about OSCAR itself, and how it reaches the plug-in: as JSON when it is loaded in
// this process, as OSCAR_* variables when it is loaded in another.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli.h"
#include "oscar/artifact/artifact.h"

namespace oscar::cli {

inline constexpr bool kWithLlama = OSCAR_WITH_LLAMA != 0;

// Flags every command that loads a model has, with llama.cpp's names and twins.
struct HostOptions {
  std::string model;
  int n_ctx = 0;
  int n_threads = 0;  // 0: all processors
  int n_batch = 2048;
  int n_ubatch = 512;
  bool verbose = false;
};
void add_host(Command& command, HostOptions& options, const std::string& context_help);
void check(const HostOptions& options);

struct Settings {
  std::string mode = "oscar";
  std::string artifact;  // empty: looked for beside the model
  std::string sink, recent, rollback, codec, k_bits, v_bits, layer_bits, k_mean, v_mean, clip_k, clip_v, log,
      perturb_q;  // empty: the plug-in's or artifact's default
};

// --k-bits, --v-bits and --layer-bits; `otherwise`: what holds without them.
void add_rates(Command& command, std::string& k_bits, std::string& v_bits, std::string& layer_bits, const char* otherwise,
               const char* layers_otherwise);
void add_settings(Command& command, Settings& settings, bool with_mode);
void add_cache_settings(Command& command, Settings& settings);  // all but the mode and what codes the rows
GivenRates given_rates(const Settings& settings);               // as checked
// Range and word checks, so that a typing error is reported before a model is loaded.
void check(const Settings& settings);
// A --variant, "key=value,key=value,...", applied over `settings`.
void override_settings(Settings& settings, const std::string& variant);

// First position of a sequence whose query can see coded rows: sink + recent, the plug-in's where none are given.
int first_coded_query(const Settings& settings);

bool uses_artifact(const std::string& mode);
// Finds the artifact, checks that it belongs to the model; Error says how to make one. Empty when the mode needs none.
std::string resolve_artifact(const Settings& settings, const std::filesystem::path& model);

// Every key is present, so that one configuration replaces another completely.
nlohmann::json plugin_json(const Settings& settings, const std::string& artifact);
std::vector<std::pair<std::string, std::string>> plugin_environment(const Settings& settings, const std::string& artifact);

// liboscar-llama.so: OSCAR_PLUGIN, else beside this program or in the library directory of its prefix; Error when absent.
std::filesystem::path find_plugin();
[[noreturn]] void requires_llama(const std::string& command);

}  // namespace oscar::cli
