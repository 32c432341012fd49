// Which table of kernels runs: the best one that the processor has, or the one that OSCAR_CPU names.
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdlib>

#include "attention/kernels.h"
#include "oscar/attention/attention.h"
#include "oscar/base/error.h"

namespace oscar {
namespace attention {
namespace {

bool avx2_usable() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, features = 0, d = 0;  // F16C by hand: clang 14 has no name for it
  const bool has_f16c = __get_cpuid(1, &a, &b, &features, &d) != 0 && (features & bit_F16C) != 0;
  return avx2_kernels() != nullptr && has_f16c && __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
#else
  return false;
#endif
}

std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> tables;
  if (avx2_usable()) tables.push_back(avx2_kernels());
  tables.push_back(&scalar_kernels());
  return tables;
}

}  // namespace

const Kernels& active_kernels() {
  const std::vector<const Kernels*> tables = usable_kernels();
  const char* wanted = std::getenv("OSCAR_CPU");
  if (wanted == nullptr || *wanted == '\0') return *tables.front();
  std::string names;
  for (const Kernels* table : tables) {
    if (std::string_view(table->name) == wanted) return *table;
    names += (names.empty() ? "" : ", ") + std::string(table->name);
  }
  fail("OSCAR_CPU={} is not usable on this processor; choose one of: {}", wanted, names);
}

}  // namespace attention

std::vector<std::string_view> cpu_paths() {
  std::vector<std::string_view> names;
  for (const attention::Kernels* table : attention::usable_kernels()) names.emplace_back(table->name);
  return names;
}

std::string_view cpu_path() { return attention::active_kernels().name; }

}  // namespace oscar
