#include "config.h"

#include <array>
#include <charconv>
#include <cstdlib>
#include <mutex>

#include "oscar/base/error.h"
#include "oscar/rivals/rivals.h"

namespace oscar::llama {
namespace {

constexpr std::array<std::pair<std::string_view, Mode>, 5> kModes = {{{"oscar", Mode::oscar},
                                                                      {"exact", Mode::exact},
                                                                      {"delegate", Mode::delegate},
                                                                      {"capture", Mode::capture},
                                                                      {"off", Mode::off}}};

constexpr std::array<std::string_view, 18> kKeys = {"mode",     "artifact", "strict",     "stats",  "sink",   "recent",
                                                    "rollback", "k_mean",   "v_mean",     "clip_k", "clip_v", "codec",
                                                    "k_bits",   "v_bits",   "layer_bits", "log",    "check",  "perturb_q"};

std::mutex& mutex() {
  static std::mutex m;
  return m;
}

Config& current() {
  static auto* c = new Config;  // read by the statistics writer until the very end of the process
  return *c;
}

int to_int(std::string_view key, std::string_view text, int lowest) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < lowest) {
    fail("{}: '{}' is not a whole number of at least {}", key, text, lowest);
  }
  return value;
}

float to_clip(std::string_view key, const std::string& text) {
  char* end = nullptr;
  const float value = std::strtof(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(value <= 1.0F))
    fail("{}: '{}' is not a clip ratio (at most 1; 0 switches clipping off)", key, text);
  return value;
}

double to_bits(std::string_view key, const std::string& text) {
  const std::optional<double> rate = find_rate(text);
  if (!rate) fail("{}: '{}' is not {}", key, text, rate_names());
  return *rate;
}

bool to_bool(std::string_view key, std::string_view text) {
  if (text == "1" || text == "true" || text == "on") return true;
  if (text == "0" || text == "false" || text == "off" || text.empty()) return false;
  fail("{}: '{}' is neither 0 nor 1", key, text);
}

// One setting, as text. `key` is spelled as in plugin_api.h.
void set(Config& c, std::string_view key, const std::string& text) {
  if (key == "mode") {
    for (const auto& [name, mode] : kModes) {
      if (text == name) {
        c.mode = mode;
        return;
      }
    }
    fail("mode: '{}' is unknown; use oscar, exact, delegate, capture or off", text);
  }
  if (key == "artifact") {
    c.artifact = text;
  } else if (key == "strict") {
    c.strict = to_bool(key, text);
  } else if (key == "stats") {
    c.stats = text;
  } else if (key == "check") {
    c.check = to_bool(key, text);
  } else if (key == "perturb_q") {
    c.perturb_q = to_bool(key, text);
  } else if (key == "log") {
    c.log = to_int(key, text, 0);
  } else if (key == "sink") {
    c.windows.sink = to_int(key, text, 0);
  } else if (key == "recent") {
    c.windows.recent = to_int(key, text, 1);
  } else if (key == "rollback") {
    c.windows.rollback = to_int(key, text, 0);
  } else if (key == "k_mean") {
    c.k_mean = parse_mean_mode(text);
  } else if (key == "v_mean") {
    c.v_mean = parse_mean_mode(text);
    if (c.v_mean == MeanMode::rope) fail("v_mean: values carry no RoPE; use none or static");
  } else if (key == "clip_k") {
    c.clip_k = to_clip(key, text);
  } else if (key == "clip_v") {
    c.clip_v = to_clip(key, text);
  } else if (key == "codec") {
    if (is_rival(text)) {
      check_rival(text);
    } else if (text != "int2" && text != "spectral") {
      fail("codec: '{}' is unknown; use spectral, int2 or sim:NAME", text);
    }
    c.codec = text;
  } else if (key == "k_bits") {
    c.rates.k = to_bits(key, text);
  } else if (key == "v_bits") {
    c.rates.v = to_bits(key, text);
  } else if (key == "layer_bits") {
    c.rates.layers = parse_layer_rates(text);
  } else {
    fail("configuration key '{}' is unknown", key);
  }
}

}  // namespace

std::string_view to_string(Mode mode) {
  for (const auto& [name, value] : kModes) {
    if (value == mode) return name;
  }
  return "?";
}

Config config() {
  const std::lock_guard lock(mutex());
  return current();
}

namespace {

void read_environment() {  // lock held
  static bool done = false;
  if (done) return;
  Config c = current();
  for (const std::string_view key : kKeys) {
    std::string name = "OSCAR_";
    for (const char ch : key) name += static_cast<char>(ch >= 'a' && ch <= 'z' ? ch - 'a' + 'A' : ch);
    const char* value = std::getenv(name.c_str());
    if (value == nullptr || *value == '\0') continue;
    try {
      set(c, key, value);
    } catch (const Error& e) {
      fail("environment variable {}: {}", name, e.what());
    }
  }
  current() = c;
  done = true;
}

}  // namespace

void configure_from_environment() {
  const std::lock_guard lock(mutex());
  read_environment();
}

void configure_from_json(std::string_view text) {
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  if (!json.is_object()) fail("the configuration is not a JSON object");
  const std::lock_guard lock(mutex());
  read_environment();
  Config c = current();
  for (const auto& [key, value] : json.items()) {
    if (value.is_null()) {  // back to the artifact's or the built-in value
      if (key == "k_mean") {
        c.k_mean.reset();
      } else if (key == "v_mean") {
        c.v_mean.reset();
      } else if (key == "clip_k") {
        c.clip_k.reset();
      } else if (key == "clip_v") {
        c.clip_v.reset();
      } else if (key == "codec") {
        c.codec.reset();
      } else if (key == "k_bits") {
        c.rates.k.reset();
      } else if (key == "v_bits") {
        c.rates.v.reset();
      } else if (key == "layer_bits") {
        c.rates.layers.reset();
      } else if (key == "artifact") {
        c.artifact.clear();
      } else if (key == "stats") {
        c.stats.clear();
      } else {
        fail("configuration key '{}' cannot be null", key);
      }
      continue;
    }
    set(c, key, value.is_string() ? value.get<std::string>() : value.dump());
  }
  current() = c;
}

}  // namespace oscar::llama
