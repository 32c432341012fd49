// The plug-in's configuration: environment (OSCAR_*) merged with JSON given through oscar_llama_configure().
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "oscar/artifact/artifact.h"
#include "oscar/cache/windows.h"

namespace oscar::llama {

enum class Mode { oscar, exact, delegate, capture, off };
std::string_view to_string(Mode mode);

struct Config {
  Mode mode = Mode::oscar;
  std::string artifact;  // path; empty: looked for beside the model
  std::string stats;     // path; empty: none
  bool strict = false;
  bool check = false;      // test hook: compare attention with the reference
  bool perturb_q = false;  // measuring hook: flip one bit of every query, to see what rounding alone does
  int log = 1;
  Windows windows;
  std::optional<MeanMode> k_mean, v_mean;
  std::optional<float> clip_k, clip_v;
  std::optional<std::string> codec;
  GivenRates rates;  // k_bits, v_bits, layer_bits
};

Config config();                    // a copy of the current values
void configure_from_environment();  // once; throws Error naming the variable
// After the environment, so that explicit settings win. Throws Error naming the key; nothing is changed then.
void configure_from_json(std::string_view text);

}  // namespace oscar::llama
