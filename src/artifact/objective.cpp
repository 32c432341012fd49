#include "objective.h"

#include <algorithm>
#include <array>

#include "oscar/artifact/rotation_zoo.h"
#include "oscar/base/error.h"
#include "oscar/method/rotation.h"

namespace oscar {
namespace {

std::string_view moment_of(std::string_view objective) { return objective.substr(0, objective.find('_')); }

}  // namespace

Objective parse_objective(std::string_view text) {
  constexpr std::array<std::string_view, 6> kMoments = {"qqt", "ktk", "sst", "oot", "vtv", "hadamard"};
  Objective objective{std::string(moment_of(text)), "plain"};
  if (std::find(kMoments.begin(), kMoments.end(), objective.moment) == kMoments.end()) {
    fail("objective '{}' is unknown; it must start with qqt, ktk, sst, oot, vtv or hadamard", text);
  }
  if (objective.moment.size() < text.size()) objective.composition = text.substr(objective.moment.size() + 1);
  parse_composition(objective.composition);  // throws for an unknown one
  return objective;
}

void check_objective(const std::string& objective) { (void)parse_objective(objective); }

bool is_key_objective(const std::string& objective) {
  const std::string_view moment = moment_of(objective);
  return moment == "qqt" || moment == "ktk";
}

bool is_value_objective(const std::string& objective) {
  const std::string_view moment = moment_of(objective);
  return moment == "sst" || moment == "oot" || moment == "vtv";
}

}  // namespace oscar
