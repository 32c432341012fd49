// RoPE as the host's graph computes it.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "host.h"
#include "oscar/method/rope.h"

namespace oscar::llama {

// Parameters of a ROPE node (op_params and frequency factors); Error when it is a kind we cannot reproduce (vision, offset).
RopeParams rope_params(const ggml_tensor* rope);

// The ROPE node whose result SET_ROWS stores as K, through views and copies; null: K is not rotated.
const ggml_tensor* rope_feeding(const ggml_tensor* set_rows);

// Positions of the batch's tokens when this node carries them (ROPE on activations with an input as second operand).
std::span<const std::int32_t> rope_positions(const ggml_tensor* rope);

// Empty when both describe the same rotation (float fields up to 1e-6 relative), else the first difference in words.
std::string difference(const RopeParams& expected, const RopeParams& actual);

}  // namespace oscar::llama
