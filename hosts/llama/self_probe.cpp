#include "self_probe.h"

#include <fmt/format.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

namespace oscar::llama {
namespace {

struct ContextDeleter {
  void operator()(ggml_context* c) const { host().ggml_free(c); }
};
using Context = std::unique_ptr<ggml_context, ContextDeleter>;

Context make_context(std::size_t bytes, void* memory, bool no_alloc) {
  ggml_init_params params = {bytes, memory, no_alloc};
  return Context(host().ggml_init(params));
}

void count_call(ggml_tensor*, int, int, void* userdata) { static_cast<std::atomic<int>*>(userdata)->fetch_add(1); }

// The operation numbers compiled into us against those the program's constructors produce.
std::string check_operations() {
  const Host& h = host();
  const Context owner = make_context(std::size_t{256} * 1024, nullptr, true);
  ggml_context* c = owner.get();
  ggml_tensor* rows = h.ggml_new_tensor_2d(c, GGML_TYPE_F32, 64, 4);
  ggml_tensor* half = h.ggml_new_tensor_2d(c, GGML_TYPE_F16, 64, 8);
  ggml_tensor* index = h.ggml_new_tensor_1d(c, GGML_TYPE_I64, 4);
  ggml_tensor* position = h.ggml_new_tensor_1d(c, GGML_TYPE_I32, 4);
  ggml_tensor* q = h.ggml_new_tensor_4d(c, GGML_TYPE_F32, 64, 4, 2, 1);
  ggml_tensor* kv = h.ggml_new_tensor_4d(c, GGML_TYPE_F16, 64, 8, 2, 1);
  ggml_tensor* mask = h.ggml_new_tensor_4d(c, GGML_TYPE_F16, 8, 64, 1, 1);
  ggml_tensor* heads = h.ggml_new_tensor_4d(c, GGML_TYPE_F32, 64, 2, 4, 1);
  const ggml_tensor* set_rows = h.ggml_set_rows(c, half, rows, index);
  const ggml_tensor* attention = h.ggml_flash_attn_ext(c, q, kv, kv, mask, 0.5F, 2.0F, 3.0F);
  const ggml_tensor* rope =
      h.ggml_rope_ext(c, heads, position, nullptr, 32, GGML_ROPE_TYPE_NEOX, 77, 5.0F, 6.0F, 0.7F, 0.8F, 9.0F, 10.0F);
  const struct {
    const ggml_tensor* node;
    ggml_op expected;
  } table[] = {{set_rows, GGML_OP_SET_ROWS},
               {attention, GGML_OP_FLASH_ATTN_EXT},
               {rope, GGML_OP_ROPE},
               {h.ggml_reshape_1d(c, rows, 256), GGML_OP_RESHAPE},
               {h.ggml_view_1d(c, rows, 64, 0), GGML_OP_VIEW},
               {h.ggml_permute(c, q, 0, 2, 1, 3), GGML_OP_PERMUTE},
               {h.ggml_transpose(c, rows), GGML_OP_TRANSPOSE},
               {rows, GGML_OP_NONE},
               {h.ggml_custom_4d(c, GGML_TYPE_F32, 1, 1, 1, 1, nullptr, 0, count_call, 1, nullptr), GGML_OP_CUSTOM}};
  for (const auto& entry : table) {
    if (entry.node->op != entry.expected)
      return fmt::format("operation {} has number {} here", h.ggml_op_name(entry.node->op), static_cast<int>(entry.node->op));
  }
  float f[4] = {};
  std::memcpy(f, attention->op_params, 3 * sizeof(float));
  if (f[0] != 0.5F || f[1] != 2.0F || f[2] != 3.0F) return "the parameters of FLASH_ATTN_EXT are laid out differently";
  std::memcpy(f, &rope->op_params[5], 4 * sizeof(float));
  if (rope->op_params[1] != 32 || rope->op_params[4] != 77 || f[0] != 5.0F || f[1] != 6.0F || f[2] != 0.7F || f[3] != 0.8F) {
    return "the parameters of ROPE are laid out differently";
  }
  if (set_rows->src[1] != index || root_of(set_rows) != half || attention->src[1] != kv || attention->src[3] != mask ||
      rope->src[1] != position) {
    return "operands of SET_ROWS, FLASH_ATTN_EXT or ROPE are ordered differently";
  }
  return {};
}

// What the graph pass does, once: a view node is turned into a custom operation for one run, and restored.
std::string round_trip(ggml_backend_dev_t cpu) {
  const Host& h = host();
  const std::unique_ptr<ggml_backend, void (*)(ggml_backend_t)> backend(cpu->iface.init_backend(cpu, nullptr),
                                                                        [](ggml_backend_t b) {
                                                                          if (b != nullptr) b->iface.free(b);
                                                                        });
  if (!backend) return "the CPU device makes no backend";
  const auto& i = backend->iface;
  if (i.get_name == nullptr || i.free == nullptr || i.graph_compute == nullptr || i.graph_plan_compute == nullptr) {
    return "a required function of the CPU backend is missing";
  }
  if (i.set_tensor_async != nullptr || i.get_tensor_async != nullptr || i.cpy_tensor_async != nullptr ||
      i.event_record != nullptr) {
    return "the CPU backend has functions that it does not have in the certified release";
  }
  const Context owner = make_context(std::size_t{1024} * 1024, nullptr, false);
  ggml_context* c = owner.get();
  ggml_tensor* data = h.ggml_new_tensor_1d(c, GGML_TYPE_F32, 8);
  ggml_tensor* node = h.ggml_reshape_1d(c, data, 8);
  ggml_cgraph* graph = h.ggml_new_graph_custom(c, 16, false);
  h.ggml_build_forward_expand(graph, node);
  if (h.ggml_graph_n_nodes(graph) != 1 || h.ggml_graph_node(graph, 0) != node) return "a one-node graph has other nodes";
  std::atomic<int> calls{0};
  make_custom(node, count_call, &calls);
  const ggml_status status = h.ggml_backend_graph_compute(backend.get(), graph);
  if (status != GGML_STATUS_SUCCESS || calls.load() < 1) return "a custom operation is not called";
  return {};
}

}  // namespace

void make_custom(ggml_tensor* node, ggml_custom_op_t function, void* userdata) {
  alignas(16) std::byte memory[4096];  // one tensor; on the stack, because this runs for every operation of every graph
  const Context owner = make_context(sizeof(memory), memory, true);
  const ggml_tensor* custom =
      host().ggml_custom_4d(owner.get(), GGML_TYPE_F32, 1, 1, 1, 1, nullptr, 0, function, GGML_N_TASKS_MAX, userdata);
  std::memcpy(node->op_params, custom->op_params, sizeof(node->op_params));
  node->op = custom->op;
}

std::string self_probe(ggml_backend_dev_t cpu) {
  const auto& d = cpu->iface;
  if (d.get_name == nullptr || d.init_backend == nullptr || d.get_buffer_type == nullptr || d.supports_buft == nullptr ||
      d.supports_op == nullptr) {
    return "a required function of the CPU device is missing";
  }
  if (d.event_new != nullptr) return "the CPU device has functions that it does not have in the certified release";
  const ggml_backend_buffer_type_t type = d.get_buffer_type(cpu);
  if (type == nullptr || type->iface.get_name == nullptr || type->iface.alloc_buffer == nullptr ||
      type->iface.get_alignment == nullptr || type->iface.is_host == nullptr || !type->iface.is_host(type)) {
    return "the CPU buffer type is laid out differently";
  }
#if GGML_BACKEND_API_VERSION >= 3
  if (type->iface.alloc_buffer_n != nullptr) return "the CPU buffer type allocates lists of tensors by itself";
#endif
  if (std::string error = check_operations(); !error.empty()) return error;
  return round_trip(cpu);
}

}  // namespace oscar::llama
