#include "interpose.h"

#include <map>
#include <memory>
#include <mutex>

#include "graph_pass.h"
#include "kv_buffer.h"
#include "report.h"

namespace oscar::llama {
namespace {

ggml_backend_device_i g_device = {};
ggml_backend_buffer_type_i g_type = {};

struct Backend {
  explicit Backend(ggml_backend_t handle) : original(handle->iface), pass(handle, original.graph_compute) {}
  ggml_backend_i original;
  GraphPass pass;
};

struct Backends {
  std::mutex mutex;
  std::map<ggml_backend_t, std::unique_ptr<Backend>> all;
};
Backends& backends() {
  static auto* b = new Backends;  // outlives static destruction
  return *b;
}

Backend& find(ggml_backend_t handle) {
  Backends& b = backends();
  const std::lock_guard lock(b.mutex);
  return *b.all.at(handle);
}

ggml_status compute_hook(ggml_backend_t handle, ggml_cgraph* graph) {
  try {
    return find(handle).pass.compute(graph);
  } catch (const std::exception& e) {
    die(e.what());
  }
}

void free_backend_hook(ggml_backend_t handle) {
  std::unique_ptr<Backend> backend;
  {
    Backends& b = backends();
    const std::lock_guard lock(b.mutex);
    const auto found = b.all.find(handle);
    backend = std::move(found->second);
    b.all.erase(found);
  }
  handle->iface = backend->original;
  handle->iface.free(handle);
}

ggml_backend_t init_backend_hook(ggml_backend_dev_t device, const char* params) {
  const ggml_backend_t handle = g_device.init_backend(device, params);
  if (handle == nullptr) return nullptr;
  try {
    auto backend = std::make_unique<Backend>(handle);
    handle->iface.graph_compute = compute_hook;
    handle->iface.free = free_backend_hook;
    Backends& b = backends();
    const std::lock_guard lock(b.mutex);
    b.all[handle] = std::move(backend);
  } catch (const std::exception& e) {
    die(e.what());
  }
  return handle;
}

bool supports_type_hook(ggml_backend_dev_t device, ggml_backend_buffer_type_t type) {
  return type == kv_buffer_type() || g_device.supports_buft(device, type);
}

ggml_backend_buffer_t alloc_hook(ggml_backend_buffer_type_t type, std::size_t size) {
  const ggml_backend_buffer_t buffer = g_type.alloc_buffer(type, size);
  watch(buffer);
  return buffer;
}

}  // namespace

ggml_backend_dev_t find_cpu() {
  for (std::size_t i = 0; i < host().ggml_backend_dev_count(); ++i) {
    const ggml_backend_dev_t device = host().ggml_backend_dev_get(i);
    if (device->iface.get_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU) return device;
  }
  return nullptr;
}

void interpose(ggml_backend_dev_t cpu) {
  const ggml_backend_buffer_type_t type = cpu->iface.get_buffer_type(cpu);
  g_device = cpu->iface;
  g_type = type->iface;
  install_buffer_type(type);
  type->iface.alloc_buffer = alloc_hook;
  cpu->iface.init_backend = init_backend_hook;
  cpu->iface.supports_buft = supports_type_hook;
}

}  // namespace oscar::llama
