#include "eval_methods.h"

#include <algorithm>
#include <array>

#include "oscar/base/error.h"

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
// Other published methods, simulated by a codec of the plug-in: rounding and memory as published, no speed.
constexpr std::array<Known, 10> kRivals = {{{"q8_0", "codec=sim:q8_0"},
                                            {"q4_0", "codec=sim:q4_0"},
                                            {"q4_0-hadamard", "codec=sim:q4_0-hadamard"},
                                            {"fp8", "codec=sim:fp8"},
                                            {"kivi2-g32", "codec=sim:kivi2-g32"},
                                            {"kivi4-g32", "codec=sim:kivi4-g32"},
                                            {"quarot2", "codec=sim:quarot2"},
                                            {"turboquant2", "codec=sim:turboquant2"},
                                            {"kvarn2", "codec=sim:kvarn2"},
                                            {"kvquant2", "codec=sim:kvquant2"}}};

Method made(const Settings& common, const std::string& name, const std::string& variant) {
  Method method;
  method.name = name;
  method.variant = variant;
  method.settings = common;
  method.settings.mode = "oscar";
  override_settings(method.settings, variant);
  check(method.settings);
  return method;
}

const Known* find(const std::string& name) {
  for (const Known& known : kOurs) {
    if (name == known.name) return &known;
  }
  for (const Known& known : kRivals) {
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

std::vector<Method> choose_methods(const Settings& common, const std::string& names, bool rivals,
                                   const std::vector<std::string>& variants, std::vector<std::string>& skipped) {
  std::vector<Method> out;
  const auto add = [&out](Method method) {
    const bool known = std::any_of(out.begin(), out.end(), [&](const Method& other) { return other.name == method.name; });
    if (known) fail("method {} is asked for twice", method.name);
    out.push_back(std::move(method));
  };
  add(made(common, kBaseMethod, "mode=exact"));
  add(made(common, kFloorMethod, "mode=exact,perturb_q=1"));
  const std::string wanted = names.empty() ? method_names() : names;
  for (std::size_t begin = 0; begin <= wanted.size();) {
    const std::size_t comma = std::min(wanted.find(',', begin), wanted.size());
    const std::string name = wanted.substr(begin, comma - begin);
    const Known* known = find(name);
    if (known == nullptr) fail("there is no method {}: the methods are {}, and with --all the rivals", name, method_names());
    add(made(common, name, known->variant));
    begin = comma + 1;
  }
  if (rivals) {
    for (const Known& rival : kRivals) {
      if (std::any_of(out.begin(), out.end(), [&](const Method& other) { return other.name == rival.name; })) continue;
      try {
        Method method = made(common, rival.name, rival.variant);
        method.optional = true;
        add(std::move(method));
      } catch (const Error& error) {
        skipped.push_back(fmt::format("{} is left out: {}", rival.name, error.what()));
      }
    }
  }
  for (const std::string& variant : variants) add(made(common, variant, variant));
  return out;
}

}  // namespace oscar::cli
