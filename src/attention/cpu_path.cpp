// Which table of kernels runs: the best one that the processor has, or the one that OSCAR_CPU names.
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include <cstdlib>

#include "attention/kernels.h"
#include "oscar/attention/attention.h"
#include "oscar/base/error.h"

namespace oscar {
namespace attention {
namespace {

#if defined(__x86_64__)
bool avx2_usable() {
  unsigned a = 0, b = 0, features = 0, d = 0;  // F16C by hand: clang 14 has no name for it
  const bool has_f16c = __get_cpuid(1, &a, &b, &features, &d) != 0 && (features & bit_F16C) != 0;
  return has_f16c && __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0;
}

bool avxvnni_usable() {  // GCC 12 and clang 14 have no name for it
  unsigned features = 0, b = 0, c = 0, d = 0;
  return avx2_usable() && __get_cpuid_count(7, 1, &features, &b, &c, &d) != 0 && (features & (1U << 4)) != 0;
}

bool avx512_usable() {
  return avx2_usable() && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
         __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0 &&
         __builtin_cpu_supports("avx512vnni") != 0;
}
#elif defined(__aarch64__)
#if defined(__linux__)  // bits of asm/hwcap.h, by hand: older headers lack them
bool dotprod_usable() { return (getauxval(AT_HWCAP) & (1UL << 20)) != 0; }
bool i8mm_usable() { return dotprod_usable() && (getauxval(AT_HWCAP2) & (1UL << 13)) != 0; }
#else                   // what the whole program is compiled for
#if defined(__ARM_FEATURE_DOTPROD)
bool dotprod_usable() { return true; }
#else
bool dotprod_usable() { return false; }
#endif
bool i8mm_usable() { return false; }
#endif
#endif

std::vector<const Kernels*> usable_kernels() {
  std::vector<const Kernels*> tables;
  // Not even the function that makes a table may run on a processor without its instructions.
  [[maybe_unused]] const auto offer = [&](const Kernels* (*make_table)(), bool usable) {
    const Kernels* table = usable ? make_table() : nullptr;
    if (table != nullptr) tables.push_back(table);
  };
#if defined(__x86_64__)
  offer(avx512_kernels, avx512_usable());
  offer(avxvnni_kernels, avxvnni_usable());
  offer(avx2_kernels, avx2_usable());
#elif defined(__aarch64__)
  offer(neon_i8mm_kernels, i8mm_usable());
  offer(neon_dotprod_kernels, dotprod_usable());
  offer(neon_kernels, true);
#endif
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
