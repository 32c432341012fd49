// What errors of a head's values cost at the output of its layer: W_o^T W_o, from the model file.
#pragma once

#include <vector>

#include "oscar/io/gguf.h"

namespace oscar::cli {

// [n_head, v_dim, v_dim] row-major; empty when the file has no output projection of that shape for the layer.
std::vector<float> output_metric(const Gguf& file, const LayerShape& shape);

}  // namespace oscar::cli
