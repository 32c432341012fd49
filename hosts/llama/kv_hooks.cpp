// The functions llama.cpp's buffers call, and the table of KV buffers.
#include <algorithm>
#include <array>
#include <charconv>
#include <exception>
#include <string_view>

#include "kv_buffer.h"
#include "report.h"

namespace oscar::llama {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<std::unique_ptr<KvBuffer>> live;  // in order of creation, which statistics promise; few
  std::vector<nlohmann::json> freed;

  auto find(ggml_backend_buffer_t buffer) {
    return std::find_if(live.begin(), live.end(), [buffer](const auto& kv) { return kv->buffer == buffer; });
  }
};
Registry& registry() {
  static auto* r = new Registry;  // outlives static destruction: hosts free buffers late
  return *r;
}

ggml_backend_buffer_type& own_type() {
  static ggml_backend_buffer_type type = {};
  return type;
}

KvBuffer* find_buffer(ggml_backend_buffer_t buffer) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  const auto found = r.find(buffer);
  return found == r.live.end() ? nullptr : found->get();
}

// Nothing may be thrown into C code; an error here means rows would be lost, and there is no channel to report it.
template <class F>
auto guarded(F&& f) {
  try {
    return f();
  } catch (const std::exception& e) {
    die(e.what());
  }
}

void free_hook(ggml_backend_buffer_t buffer) {
  Registry& r = registry();
  std::unique_ptr<KvBuffer> kv;
  {
    const std::lock_guard lock(r.mutex);
    const auto found = r.find(buffer);
    kv = std::move(*found);
    r.live.erase(found);
    guarded([&] { r.freed.push_back(kv->statistics()); });
  }
  buffer->context = kv->original_context;
  buffer->size = kv->size;
  buffer->buft = kv->original_type;
  const auto original = kv->original.free_buffer;
  kv.reset();
  if (original != nullptr) original(buffer);
}

void* base_hook(ggml_backend_buffer_t buffer) { return static_cast<KvBuffer*>(buffer->context)->base; }

template <class F>
auto with(ggml_backend_buffer_t buffer, F&& f) {
  auto& kv = *static_cast<KvBuffer*>(buffer->context);
  const std::lock_guard lock(kv.mutex);
  return guarded([&] { return f(kv); });
}

void memset_hook(ggml_backend_buffer_t b, ggml_tensor* t, std::uint8_t value, std::size_t offset, std::size_t size) {
  with(b, [&](KvBuffer& kv) { kv.fill(t, value, offset, size); });
}
// A saved row that cannot be used is the one error with a channel: the callers on this path are C++, and llama.cpp's state
// readers catch exceptions, restore nothing and say so to their caller, who goes on with an empty sequence.
void set_hook(ggml_backend_buffer_t b, ggml_tensor* t, const void* data, std::size_t offset, std::size_t size) {
  const std::string unusable = with(b, [&](KvBuffer& kv) {
    try {
      kv.write(t, data, offset, size);
    } catch (const UnusableRow& e) {
      return std::string(e.what());
    }
    return std::string();
  });
  if (unusable.empty()) return;
  say(0, "error: a saved state was not restored: " + unusable);
  throw std::runtime_error(unusable);
}
void get_hook(ggml_backend_buffer_t b, const ggml_tensor* t, void* data, std::size_t offset, std::size_t size) {
  with(b, [&](KvBuffer& kv) { kv.read(t, data, offset, size); });
}
bool copy_hook(ggml_backend_buffer_t b, const ggml_tensor* from, ggml_tensor* to) {
  return with(b, [&](KvBuffer& kv) { return kv.copy(from, to); });
}
// Sliding-window caches go back to stock, except that we must learn of their end.
void restore(KvBuffer& kv) {
  kv.buffer->iface = kv.original;
  kv.buffer->iface.free_buffer = free_hook;
  kv.buffer->buft = kv.original_type;
  kv.buffer->context = kv.original_context;
}

void clear_hook(ggml_backend_buffer_t b, std::uint8_t value) {
  with(b, [&](KvBuffer& kv) {
    kv.clear(value);
    if (kv.service == Service::sliding) restore(kv);
  });
}

ggml_status init_hook(ggml_backend_buffer_t buffer, ggml_tensor* tensor);

// From now on the host's accesses go through us.
KvBuffer& convert(ggml_backend_buffer_t buffer) {
  Config c = config();
  auto kv = std::make_unique<KvBuffer>(buffer, c);
  kv->original.init_tensor = nullptr;  // ours, set by watch(); the CPU's own is empty
  if (c.mode == Mode::delegate || c.mode == Mode::capture) kv->service = Service::delegate;
  ggml_backend_buffer_i hooks = {};
  hooks.free_buffer = free_hook;
  hooks.get_base = base_hook;
  hooks.init_tensor = init_hook;
  hooks.memset_tensor = memset_hook;
  hooks.set_tensor = set_hook;
  hooks.get_tensor = get_hook;
  hooks.cpy_tensor = copy_hook;
  hooks.clear = clear_hook;
  buffer->iface = hooks;
  buffer->buft = &own_type();
  buffer->context = kv.get();
  KvBuffer& result = *kv;
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  r.live.push_back(std::move(kv));
  return result;
}

ggml_status init_hook(ggml_backend_buffer_t buffer, ggml_tensor* tensor) {
  if (tensor->view_src != nullptr) return GGML_STATUS_SUCCESS;
  const bool converted = buffer->iface.free_buffer == free_hook;
  const bool is_cache = is_cache_name(tensor->name, nullptr, nullptr);
  if (!converted && !is_cache) return GGML_STATUS_SUCCESS;
  return guarded([&] {
    KvBuffer& kv = converted ? *static_cast<KvBuffer*>(buffer->context) : convert(buffer);
    if (is_cache) {
      kv.add(tensor);
    } else {
      kv.add_foreign(tensor);
    }
    if (kv.service == Service::sliding) restore(kv);
    return GGML_STATUS_SUCCESS;
  });
}

const char* type_name(ggml_backend_buffer_type_t) { return "OSCAR"; }
bool type_is_host(ggml_backend_buffer_type_t) { return false; }  // nobody may read our memory directly

ggml_backend_buffer_type_t g_cpu_type = nullptr;
// States kept "on device" are allocated with the type of our buffers: plain memory.
ggml_backend_buffer_t type_alloc(ggml_backend_buffer_type_t, std::size_t size) {
  return g_cpu_type->iface.alloc_buffer(g_cpu_type, size);
}

}  // namespace

bool is_cache_name(std::string_view name, bool* is_k, int* layer) {
  constexpr std::string_view kPrefix = "cache_";
  if (!name.starts_with(kPrefix)) return false;
  name.remove_prefix(kPrefix.size());
  if (!name.starts_with("k_l") && !name.starts_with("v_l")) return false;  // cache_r_l, cache_idx_k_l...: other things
  const bool k = name.front() == 'k';
  name.remove_prefix(3);
  int number = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
  if (error != std::errc() || end != name.data() + name.size() || number < 0) return false;
  if (is_k != nullptr) *is_k = k;
  if (layer != nullptr) *layer = number;
  return true;
}

void watch(ggml_backend_buffer_t buffer) {
  if (buffer != nullptr && buffer->iface.init_tensor == nullptr) buffer->iface.init_tensor = init_hook;
}

void install_buffer_type(ggml_backend_buffer_type_t cpu) {
  g_cpu_type = cpu;
  own_type() = *cpu;
  own_type().iface.get_name = type_name;
  own_type().iface.is_host = type_is_host;
  own_type().iface.alloc_buffer = type_alloc;
}

ggml_backend_buffer_type_t kv_buffer_type() { return &own_type(); }

KvBuffer* find_buffer(const ggml_tensor* tensor) {
  const ggml_tensor* root = root_of(tensor);
  if (root == nullptr || root->buffer == nullptr || root->buffer->iface.free_buffer != free_hook) return nullptr;
  return find_buffer(root->buffer);
}

nlohmann::json cache_statistics(bool locked) {
  Registry& r = registry();
  nlohmann::json list = nlohmann::json::array();
  std::unique_lock guard(r.mutex, std::try_to_lock);
  if (!guard.owns_lock() && !locked) guard.lock();
  for (const auto& freed : r.freed) list.push_back(freed);
  for (const auto& kv : r.live) {
    std::unique_lock own(kv->mutex, std::try_to_lock);
    if (!own.owns_lock() && !locked) own.lock();  // waits for the running graph at most
    list.push_back(kv->statistics());
  }
  return list;
}

}  // namespace oscar::llama
