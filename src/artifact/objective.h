// Names of what a rotation was fitted to: "<moment>_<composition>", "qqt_r_h_pbr"; the moment alone means the plain basis.
#pragma once

#include <string>
#include <string_view>

namespace oscar {

struct Objective {
  std::string moment;       // qqt, ktk (keys); sst, oot, vtv (values); hadamard (either)
  std::string composition;  // a name of rotation.h
};

// Error naming the known words when either part is unknown.
Objective parse_objective(std::string_view text);

}  // namespace oscar
