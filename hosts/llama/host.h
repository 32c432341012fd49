// ggml functions of the program that loaded us. We never link libggml: names and scopes of the libraries differ between
// builds (RTLD_LOCAL wheels, renamed sonames), so functions are looked up in the very module that called us.
#pragma once

#include <string>

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml.h"

namespace oscar::llama {

#define OSCAR_HOST_FUNCTIONS(X) \
  X(ggml_backend_dev_count)     \
  X(ggml_backend_dev_get)       \
  X(ggml_backend_graph_compute) \
  X(ggml_init)                  \
  X(ggml_free)                  \
  X(ggml_new_tensor_1d)         \
  X(ggml_new_tensor_2d)         \
  X(ggml_new_tensor_4d)         \
  X(ggml_custom_4d)             \
  X(ggml_set_rows)              \
  X(ggml_rope_ext)              \
  X(ggml_flash_attn_ext)        \
  X(ggml_reshape_1d)            \
  X(ggml_view_1d)               \
  X(ggml_permute)               \
  X(ggml_transpose)             \
  X(ggml_new_graph_custom)      \
  X(ggml_build_forward_expand)  \
  X(ggml_graph_n_nodes)         \
  X(ggml_graph_node)            \
  X(ggml_nbytes)                \
  X(ggml_op_name)               \
  X(ggml_type_name)

struct Host {
// A declared name takes no parentheses.
#define OSCAR_DECLARE(name) decltype(&::name) name = nullptr;  // NOLINT(bugprone-macro-parentheses)
  OSCAR_HOST_FUNCTIONS(OSCAR_DECLARE)
#undef OSCAR_DECLARE
  std::string version;  // ggml_version() of the program, set even when it is refused
};
const Host& host();

// Finds the functions from an address inside the calling module and checks the version FIRST: nothing else of the program is
// touched unless it runs exactly the ggml this file was compiled for. Empty: ready; else one sentence saying why not.
std::string bind_host(void* caller);

// The tensor that owns the memory a view looks into.
inline const ggml_tensor* root_of(const ggml_tensor* tensor) {
  while (tensor != nullptr && tensor->view_src != nullptr) tensor = tensor->view_src;
  return tensor;
}

}  // namespace oscar::llama
