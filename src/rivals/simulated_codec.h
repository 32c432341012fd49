// A Codec whose code of a row is the decoded row, as f32.
#pragma once

#include <memory>
#include <string>

#include "oscar/codec/codec.h"
#include "oscar/rivals/rivals.h"
#include "rivals/simulation.h"

namespace oscar::rival {

// layer.mean_pre_rope: removed before and added after; empty: none. bits: per element, nominal.
std::shared_ptr<const Codec> make_simulated_codec(std::string name, bool is_k, RivalLayer layer, double bits,
                                                  Simulation simulation);

}  // namespace oscar::rival
