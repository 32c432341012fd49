#include "host.h"

#include <dlfcn.h>

#include <fmt/format.h>

namespace oscar::llama {
namespace {

Host& mutable_host() {
  static Host h;
  return h;
}

}  // namespace

const Host& host() { return mutable_host(); }

std::string bind_host(void* caller) {
  Host& h = mutable_host();
  void* module = nullptr;
  Dl_info info = {};
  if (dladdr(caller, &info) != 0 && info.dli_fname != nullptr) {
    module = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    if (module != nullptr && dlsym(module, "ggml_version") == nullptr) {
      dlclose(module);
      module = nullptr;
    }
  }
  if (module == nullptr) module = dlopen(nullptr, RTLD_NOW);  // the program itself and its global libraries

  const auto version = reinterpret_cast<const char* (*)()>(dlsym(module, "ggml_version"));
  if (version == nullptr) {
    return "this program exports no ggml functions (a static build?); use a build with shared "
           "libraries";
  }
  h.version = version();
  if (h.version != OSCAR_GGML_VERSION) {
    return fmt::format(
        "this plug-in was built for ggml {} but the program runs ggml {}; "
        "build OSCAR with -DOSCAR_LLAMA_DIR= of that llama.cpp",
        OSCAR_GGML_VERSION, h.version);
  }
#define OSCAR_BIND(name)                                              \
  h.name = reinterpret_cast<decltype(&::name)>(dlsym(module, #name)); \
  if (h.name == nullptr) return fmt::format("this program's ggml {} does not export {}", h.version, #name);
  OSCAR_HOST_FUNCTIONS(OSCAR_BIND)
#undef OSCAR_BIND
  return {};
}

}  // namespace oscar::llama
