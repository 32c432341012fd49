#include "settings.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>

#include "oscar/base/error.h"
#include "oscar/cache/windows.h"
#include "oscar/io/gguf.h"
#include "oscar/rivals/rivals.h"

namespace oscar::cli {
namespace {

struct Key {
  const char* name;
  std::string Settings::*value;
};
constexpr std::array<Key, 13> kKeys{{{"sink", &Settings::sink},
                                     {"recent", &Settings::recent},
                                     {"rollback", &Settings::rollback},
                                     {"codec", &Settings::codec},
                                     {"k_bits", &Settings::k_bits},
                                     {"v_bits", &Settings::v_bits},
                                     {"layer_bits", &Settings::layer_bits},
                                     {"k_mean", &Settings::k_mean},
                                     {"v_mean", &Settings::v_mean},
                                     {"clip_k", &Settings::clip_k},
                                     {"clip_v", &Settings::clip_v},
                                     {"log", &Settings::log},
                                     {"perturb_q", &Settings::perturb_q}}};

// What an unset key means: the windows' own defaults, or (null) whatever the artifact says.
nlohmann::json builtin(const std::string& key) {
  if (key == "sink") return Windows{}.sink;
  if (key == "recent") return Windows{}.recent;
  if (key == "rollback") return Windows{}.rollback;
  if (key == "log") return 1;
  if (key == "perturb_q") return 0;
  return nullptr;
}

void check_word(const std::string& name, const std::string& value, std::initializer_list<const char*> words) {
  if (value.empty()) return;
  for (const char* word : words) {
    if (value == word) return;
  }
  fail("{} is {}, but only {} make sense", name, value, fmt::join(words, ", "));
}

void check_rate(const std::string& name, const std::string& value) {
  if (!value.empty() && !find_rate(value)) fail("{} is {}, but only {} make sense", name, value, rate_names());
}

void check_count(const std::string& name, const std::string& value, int least = 0) {
  if (value.empty()) return;
  int number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc{} || end != value.data() + value.size() || number < least) {
    fail("{} is \"{}\", but it counts tokens: a whole number from {}", name, value, least);
  }
}

void check_clip(const std::string& name, const std::string& value) {
  if (value.empty()) return;
  double number = -1;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc{} || end != value.data() + value.size() || !(number >= 0 && number <= 1)) {
    fail("{} is \"{}\", but it is a share of coordinates: 0 (no clipping) to 1", name, value);
  }
}

void override_setting(Settings& settings, const std::string& assignment) {
  const std::size_t equals = assignment.find('=');
  const std::string key = assignment.substr(0, equals);
  const std::string value = equals == std::string::npos ? "" : assignment.substr(equals + 1);
  if (value.empty()) fail("variant setting \"{}\" is not of the form key=value", assignment);
  if (key == "mode") {
    settings.mode = value;
    return;
  }
  if (key == "artifact" || key == "oscar") {
    settings.artifact = value;
    return;
  }
  std::vector<std::string> names{"mode", "artifact"};
  for (const Key& known : kKeys) {
    if (key == known.name) {
      settings.*known.value = value;
      return;
    }
    names.emplace_back(known.name);
  }
  fail("variant setting {} is unknown: it is one of {}", key, fmt::join(names, ", "));
}

}  // namespace

void add_host(Command& command, HostOptions& options, const std::string& context_help) {
  command.option("-m,--model", options.model, "FILE", "model, GGUF", "LLAMA_ARG_MODEL");
  command.option("-c,--ctx-size", options.n_ctx, "N", context_help, "LLAMA_ARG_CTX_SIZE");
  command.option("-t,--threads", options.n_threads, "N", "threads, 0 = all processors", "LLAMA_ARG_THREADS");
  command.option("-b,--batch-size", options.n_batch, "N", "logical batch: tokens per call", "LLAMA_ARG_BATCH");
  command.option("-ub,--ubatch-size", options.n_ubatch, "N", "physical batch: tokens per graph", "LLAMA_ARG_UBATCH");
  command.flag("-v,--verbose", options.verbose, "show llama.cpp's own messages");
}

void check(const HostOptions& options) {
  if (options.model.empty()) fail("no model was named: use -m MODEL.gguf");
  if (options.n_ctx < 0) fail("-c {} makes no sense: it is a number of tokens", options.n_ctx);
  if (options.n_threads < 0 || options.n_threads > 512)
    fail("-t {} makes no sense: 0 (all processors) to 512", options.n_threads);
  if (options.n_batch < 1) fail("-b {} makes no sense: at least 1 token", options.n_batch);
  if (options.n_ubatch < 1) fail("-ub {} makes no sense: at least 1 token", options.n_ubatch);
}

void add_rates(Command& command, std::string& k_bits, std::string& v_bits, std::string& layer_bits, const char* otherwise,
               const char* layers_otherwise) {
  command.option("--k-bits", k_bits, "BITS", fmt::format("spectral keys: {}; default: {}", rate_names(), otherwise),
                 "OSCAR_K_BITS");
  command.option("--v-bits", v_bits, "BITS", fmt::format("spectral values: {}; default: {}", rate_names(), otherwise),
                 "OSCAR_V_BITS");
  command.option("--layer-bits", layer_bits, "LAYERS:RATE[,...]",
                 fmt::format("spectral: layers with other rates, as in 0:3,1:3/2.5,5-7:k3 (K and V; K/V; only K); default: {}",
                             layers_otherwise),
                 "OSCAR_LAYER_BITS");
}

void add_cache_settings(Command& command, Settings& settings) {
  command.option("--oscar", settings.artifact, "FILE",
                 "calibration artifact; default: MODEL.oscar.safetensors or the cache directory", "OSCAR_ARTIFACT");
  command.option("--sink", settings.sink, "N", "first N positions of a sequence stay at 16 bit; plug-in's default 64",
                 "OSCAR_SINK");
  command.option("--recent", settings.recent, "N", "last N positions before a query stay at 16 bit; plug-in's default 256",
                 "OSCAR_RECENT");
  command.option("--rollback", settings.rollback, "N",
                 "16-bit copies kept this much longer, for rejected drafts; plug-in's default 64", "OSCAR_ROLLBACK");
  command.option("--log", settings.log, "N", "plug-in's messages: 0 errors, 1 its configuration line, 2 every decision",
                 "OSCAR_LOG");
}

void add_settings(Command& command, Settings& settings, bool with_mode) {
  if (with_mode) {
    command.option("--mode", settings.mode, "MODE",
                   "oscar: 2-bit cache; exact: OSCAR's own store with every row at 16 bit; delegate: hooks that only forward "
                   "(bit-identical "
                   "to llama.cpp); stock: no plug-in at all",
                   "OSCAR_MODE");
  }
  add_cache_settings(command, settings);
  command.option("--codec", settings.codec, "NAME",
                 "spectral, int2, or sim:NAME for a simulated rival (see compare); default: the artifact's", "OSCAR_CODEC");
  add_rates(command, settings.k_bits, settings.v_bits, settings.layer_bits, "the artifact's",
            "the artifact's (none: no layer)");
  command.option("--k-mean", settings.k_mean, "MODE", "mean removed from K: none, static or rope; default: the artifact's",
                 "OSCAR_K_MEAN");
  command.option("--v-mean", settings.v_mean, "MODE", "mean removed from V: none or static; default: the artifact's",
                 "OSCAR_V_MEAN");
  command.option("--clip-k", settings.clip_k, "RATIO", "clip ratio of K, 0 to 1, 0 = off; default: the artifact's",
                 "OSCAR_CLIP_K");
  command.option("--clip-v", settings.clip_v, "RATIO", "clip ratio of V, 0 to 1, 0 = off; default: the artifact's",
                 "OSCAR_CLIP_V");
}

GivenRates given_rates(const Settings& settings) {
  GivenRates rates{find_rate(settings.k_bits), find_rate(settings.v_bits), std::nullopt};
  if (!settings.layer_bits.empty()) rates.layers = parse_layer_rates(settings.layer_bits);
  return rates;
}

void check(const Settings& settings) {
  check_word("mode", settings.mode, {"oscar", "exact", "delegate", "stock", "off"});
  if (is_rival(settings.codec)) {
    check_rival(settings.codec);
  } else {
    check_word("codec", settings.codec, {"spectral", "int2", "sim:NAME"});
  }
  check_rate("k_bits", settings.k_bits);
  check_rate("v_bits", settings.v_bits);
  if (!settings.layer_bits.empty()) (void)parse_layer_rates(settings.layer_bits);
  check_word("k_mean", settings.k_mean, {"none", "static", "rope"});
  check_word("v_mean", settings.v_mean, {"none", "static"});
  check_word("log", settings.log, {"0", "1", "2"});
  check_word("perturb_q", settings.perturb_q, {"0", "1"});
  check_count("sink", settings.sink);
  check_count("recent", settings.recent, 1);
  check_count("rollback", settings.rollback);
  check_clip("clip_k", settings.clip_k);
  check_clip("clip_v", settings.clip_v);
}

void override_settings(Settings& settings, const std::string& variant) {
  std::vector<std::string> assignments;
  for (std::size_t begin = 0; begin <= variant.size();) {
    const std::size_t comma = std::min(variant.find(',', begin), variant.size());
    const std::string part = variant.substr(begin, comma - begin);
    // layer_bits is a list itself: what is no assignment goes on with it.
    if (!assignments.empty() && assignments.back().starts_with("layer_bits=") && part.find('=') == std::string::npos) {
      assignments.back() += "," + part;
    } else {
      assignments.push_back(part);
    }
    begin = comma + 1;
  }
  for (const std::string& assignment : assignments) override_setting(settings, assignment);
}

int first_coded_query(const Settings& settings) {
  const Windows windows;
  return (settings.sink.empty() ? windows.sink : std::stoi(settings.sink)) +
         (settings.recent.empty() ? windows.recent : std::stoi(settings.recent));
}

bool uses_artifact(const std::string& mode) { return mode == "oscar"; }

std::string resolve_artifact(const Settings& settings, const std::filesystem::path& model) {
  const GgufModel description = describe_model(Gguf(model));
  if (!uses_artifact(settings.mode)) return "";
  const auto found = find_artifact(model, settings.artifact, description.fingerprint);
  if (!found) {
    fail("there is no calibration artifact for {}: make one with oscar calibrate -m {} -f TEXT, or name one with --oscar",
         model.filename().string(), model.filename().string());
  }
  const Artifact artifact = load_artifact(*found);
  if (artifact.model.fingerprint != description.fingerprint) {
    fail("{} was calibrated for another model ({}, {}), not for {}: calibrate this one or name its artifact with --oscar",
         found->string(), artifact.model.name, artifact.model.architecture, model.filename().string());
  }
  return std::filesystem::absolute(*found).string();
}

nlohmann::json plugin_json(const Settings& settings, const std::string& artifact) {
  nlohmann::json out{{"mode", settings.mode == "stock" ? std::string("off") : settings.mode}, {"strict", 1}};
  out["artifact"] = artifact.empty() ? nlohmann::json() : nlohmann::json(artifact);
  for (const Key& key : kKeys) {
    const std::string& value = settings.*key.value;
    const std::string name = key.name;
    if (value.empty()) {
      out[name] = builtin(name);
    } else if (name == "codec" || name == "k_mean" || name == "v_mean" || name == "layer_bits") {
      out[name] = value;
    } else if (name == "clip_k" || name == "clip_v" || name == "k_bits" || name == "v_bits") {
      out[name] = std::stod(value);
    } else {
      out[name] = std::stoi(value);
    }
  }
  return out;
}

std::vector<std::pair<std::string, std::string>> plugin_environment(const Settings& settings, const std::string& artifact) {
  std::vector<std::pair<std::string, std::string>> out{
      {"OSCAR_MODE", settings.mode == "stock" ? std::string("off") : settings.mode}};
  if (!artifact.empty()) out.emplace_back("OSCAR_ARTIFACT", artifact);
  for (const Key& key : kKeys) {
    if (!(settings.*key.value).empty()) {
      std::string name = "OSCAR_";
      for (const char* c = key.name; *c != '\0'; ++c) name += *c == '_' ? '_' : static_cast<char>(*c - 'a' + 'A');
      out.emplace_back(name, settings.*key.value);
    }
  }
  return out;
}

std::filesystem::path find_plugin() {
  namespace fs = std::filesystem;
  const char* const file = "liboscar-llama.so";
  if (const char* named = std::getenv("OSCAR_PLUGIN"); named != nullptr && *named != '\0') {
    if (!fs::is_regular_file(named)) fail("OSCAR_PLUGIN={} is not a file", named);
    return fs::absolute(named);
  }
  const fs::path here = fs::read_symlink("/proc/self/exe").parent_path();
  // Beside the program, or installed (bin and lib of one prefix).
  for (const char* relative : {".", "../lib/oscar", "../lib", "../lib64/oscar", OSCAR_LIBDIR_FROM_BIN}) {
    const fs::path candidate = here / relative / file;
    if (fs::is_regular_file(candidate)) return fs::canonical(candidate);
  }
  fail("{} is neither beside this program nor in its prefix's lib: install it there or set OSCAR_PLUGIN to its path", file);
}

void requires_llama(const std::string& command) {
  fail(
      "{} needs llama.cpp, and this oscar was built without it: rebuild with cmake -DOSCAR_LLAMA_DIR=<llama.cpp build "
      "directory>",
      command);
}

}  // namespace oscar::cli
