// Entry points: ggml plug-in (GGML_BACKEND_PATH, ggml_backend_load), LD_PRELOAD shim, C API.
#include "plugin_api.h"

#include <dlfcn.h>

#include <exception>
#include <mutex>
#include <string>

#include "config.h"
#include "host.h"
#include "interpose.h"
#include "report.h"
#include "self_probe.h"
#include "statistics.h"

namespace oscar::llama {
namespace {

const char* registry_name(ggml_backend_reg_t) { return "OSCAR"; }
std::size_t device_count(ggml_backend_reg_t) { return 0; }
ggml_backend_dev_t no_device(ggml_backend_reg_t, std::size_t) { return nullptr; }
void* no_proc(ggml_backend_reg_t, const char*) { return nullptr; }

ggml_backend_reg g_registry = {GGML_BACKEND_API_VERSION, {registry_name, device_count, no_device, no_proc}, nullptr};

// A host that refuses us would unmap code that vtables and exit handlers still point to.
void stay_loaded() {
  Dl_info info = {};
  if (dladdr(reinterpret_cast<void*>(&stay_loaded), &info) != 0) dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
}

ggml_backend_reg_t attach(void* caller) {
  static std::mutex mutex;
  static ggml_backend_reg_t attached = nullptr;
  const std::lock_guard lock(mutex);
  if (attached != nullptr) return attached;  // preloaded and named in GGML_BACKEND_PATH
  stay_loaded();
  configure_from_environment();
  install_statistics_writer();
  if (config().mode == Mode::off) return attached = &g_registry;
  if (const std::string reason = bind_host(caller); !reason.empty()) {
    refuse(reason);
    return nullptr;
  }
  const ggml_backend_dev_t cpu = find_cpu();
  if (cpu == nullptr) {
    refuse("no CPU device is registered yet; load the plug-in after the CPU backend");
    return nullptr;
  }
  if (const std::string reason = self_probe(cpu); !reason.empty()) {
    refuse("ggml " + host().version + " does not behave as the certified release does: " + reason);
    return nullptr;
  }
  interpose(cpu);
  say(2, "attached to ggml " + host().version + ", mode " + std::string(to_string(config().mode)));
  return attached = &g_registry;
}

// One sentence per thread, as the C API promises.
template <class F>
const char* sentence_of(F&& f) {
  thread_local std::string sentence;
  try {
    f();
    return nullptr;
  } catch (const std::exception& e) {
    sentence = e.what();
    return sentence.c_str();
  }
}

}  // namespace
}  // namespace oscar::llama

extern "C" {

OSCAR_API ggml_backend_reg_t ggml_backend_init(void);
OSCAR_API void llama_backend_init(void);

ggml_backend_reg_t ggml_backend_init(void) {
  void* caller = __builtin_return_address(0);
  try {
    return oscar::llama::attach(caller);
  } catch (const std::exception& e) {
    oscar::llama::die(e.what());  // a wrong configuration; running on as if it were right would be worse
  }
}

// LD_PRELOAD: programs built without loadable backends never look at GGML_BACKEND_PATH, but all of them call this.
void llama_backend_init(void) {
  const auto real = reinterpret_cast<void (*)()>(dlsym(RTLD_NEXT, "llama_backend_init"));
  if (real != nullptr) real();
  static bool loaded = false;
  if (loaded) return;
  loaded = true;
  const auto load = reinterpret_cast<void* (*)(const char*)>(dlsym(RTLD_DEFAULT, "ggml_backend_load"));
  Dl_info self = {};
  if (load == nullptr || dladdr(reinterpret_cast<void*>(&llama_backend_init), &self) == 0 || load(self.dli_fname) == nullptr) {
    if (oscar::llama::last_refusal().empty()) oscar::llama::refuse("the plug-in could not be loaded into this program's ggml");
  }
}

const char* oscar_llama_configure(const char* json) {
  return oscar::llama::sentence_of([json] {
    oscar::llama::configure_from_json(json != nullptr ? json : "");
    oscar::llama::install_statistics_writer();
  });
}

const char* oscar_llama_stats(void) {
  thread_local std::string text;
  const char* error = oscar::llama::sentence_of([] { text = oscar::llama::statistics_text(false); });
  return error != nullptr ? error : text.c_str();
}

}  // extern "C"
