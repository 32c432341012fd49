// ASIMD with the byte dot products of ARMv8.2 (signed by signed, unsigned by unsigned).
#include "attention/kernels.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD) && !defined(__AARCH64EB__)

#include "attention/code_kernels.h"
#include "attention/simd/neon_dotprod.h"

namespace oscar::attention {

const Kernels* neon_dotprod_kernels() {
  using Code = CodeKernels<NeonDotProduct, NeonBytes>;
  static const Kernels kernels = [] {
    Kernels k = *neon_kernels();
    k.name = "neon-dotprod";
    k.key_scores = Code::key_scores;
    k.value_sums = Code::value_sums;
    return k;
  }();
  return &kernels;
}

}  // namespace oscar::attention

#else

namespace oscar::attention {

const Kernels* neon_dotprod_kernels() { return nullptr; }

}  // namespace oscar::attention

#endif
