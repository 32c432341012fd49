// A program with "ggml 9.9.9" inside: it exports the version function and nothing else, loads the plug-in as ggml would, and
// says what came back. Anything the plug-in did to this process beyond reading the version would crash it.
#include <dlfcn.h>

#include <cstdio>

extern "C" __attribute__((visibility("default"))) const char* ggml_version(void) { return "9.9.9"; }
extern "C" __attribute__((visibility("default"))) const char* ggml_commit(void) { return "unknown"; }

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::printf("cannot load: %s\n", dlerror());
    return 1;
  }
  const auto init = reinterpret_cast<void* (*)()>(dlsym(library, "ggml_backend_init"));
  if (init == nullptr) {
    std::printf("no ggml_backend_init\n");
    return 1;
  }
  std::printf("registration: %s\n", init() == nullptr ? "none" : "accepted");
  return 0;
}
