// Proof, before anything is patched, that this program's ggml is laid out as we were compiled for.
#pragma once

#include <string>

#include "host.h"

namespace oscar::llama {

// Empty: sound. Else one sentence. Runs a one-node graph on a throw-away backend of the device.
std::string self_probe(ggml_backend_dev_t cpu);

// op_params that make a node a custom operation, built by the host's own public constructor.
void make_custom(ggml_tensor* node, ggml_custom_op_t function, void* userdata);

}  // namespace oscar::llama
