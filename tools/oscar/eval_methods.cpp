#include "eval_methods.h"

#include <algorithm>
#include <array>

#include "eval_report.h"
#include "oscar/base/error.h"
#include "oscar/rivals/rivals.h"

namespace oscar::cli {
namespace {

struct Known {
  const char* name;
  const char* variant;
};
constexpr std::array<Known, 4> kOurs = {{{"spectral-2", "codec=spectral,k_bits=2,v_bits=2"},
                                         {"spectral-3", "codec=spectral,k_bits=3,v_bits=3"},
                                         {"oscar-repaired", "codec=int2"},
                                         {"oscar-published", "codec=int2,k_mean=none,v_mean=none,clip_k=0.96,clip_v=0.92"}}};
Method made(const Settings& common, const std::string& name, const std::string& variant) {
  Method method;
  method.name = name;
  method.variant = variant;
  method.settings = common;
  method.settings.mode = "oscar";
  override_settings(method.settings, variant);
  check(method.settings);
  if (method.settings.mode == "stock")
    fail("eval measures inside OSCAR's attention, and {} is llama.cpp's own: use oscar compare --mode-b stock", name);
  return method;
}

const Known* find(const std::string& name) {
  for (const Known& known : kOurs) {
    if (name == known.name) return &known;
  }
  return nullptr;
}

}  // namespace

std::string method_names() {
  std::vector<std::string> names;
  names.reserve(std::size(kOurs));
  for (const Known& known : kOurs) names.emplace_back(known.name);
  return fmt::format("{}", fmt::join(names, ","));
}

std::vector<Method> choose_methods(const Settings& common, const std::string& names, bool floor, bool all,
                                   const std::vector<std::string>& variants) {
  std::vector<Method> out;
  const auto add = [&out](Method method) {
    const bool known = std::any_of(out.begin(), out.end(), [&](const Method& other) { return other.name == method.name; });
    if (known) fail("method {} is asked for twice", method.name);
    out.push_back(std::move(method));
  };
  add(made(common, kBaseMethod, "mode=exact"));
  if (floor) add(made(common, kFloorMethod, "mode=exact,perturb_q=1"));
  const std::string wanted = names.empty() ? method_names() : names;
  for (std::size_t begin = 0; begin <= wanted.size();) {
    const std::size_t comma = std::min(wanted.find(',', begin), wanted.size());
    const std::string name = wanted.substr(begin, comma - begin);
    const Known* known = find(name);
    if (known == nullptr)
      fail("there is no method {}: the methods are {}; --all adds the rivals, --variant codec=sim:NAME one of them", name,
           method_names());
    add(made(common, name, known->variant));
    begin = comma + 1;
  }
  if (all) {
    for (const RivalInfo& rival : rivals()) add(made(common, std::string(rival.name), fmt::format("codec=sim:{}", rival.name)));
  }
  for (const std::string& variant : variants) add(made(common, variant, variant));
  return out;
}

}  // namespace oscar::cli
