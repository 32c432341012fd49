// The methods that `oscar eval` sets side by side: a label and what it changes in the settings, written as in compare
// --variant.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "settings.h"

namespace oscar::cli {

struct Method {
  std::string name;
  std::string variant;  // "key=value,..."; empty: the settings as they are
  Settings settings;    // filled by choose_methods
};

// exact first, then the noise floor when `floor`, then the methods called `names` (comma-separated; empty: the default ones),
// then the rivals when `all`, then one method per variant. Error for an unknown name or a wrong setting.
std::vector<Method> choose_methods(const Settings& common, const std::string& names, bool floor, bool all,
                                   const std::vector<std::string>& variants);

std::string method_names();  // for --help

}  // namespace oscar::cli
