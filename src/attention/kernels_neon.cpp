// ASIMD as every ARMv8 processor has it.
#include "attention/kernels.h"

#if defined(__aarch64__) && defined(__ARM_NEON) && !defined(__AARCH64EB__)

#include "attention/code_kernels.h"
#include "attention/float_kernels.h"
#include "attention/kernel_table.h"
#include "attention/simd/neon.h"

namespace oscar::attention {

const Kernels* neon_kernels() {
  static constexpr Kernels kernels = kernel_table<FloatKernels<Neon>, CodeKernels<Neon, NeonBytes>>("neon");
  return &kernels;
}

}  // namespace oscar::attention

#else

namespace oscar::attention {

const Kernels* neon_kernels() { return nullptr; }

}  // namespace oscar::attention

#endif
