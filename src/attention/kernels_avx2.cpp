// AVX2 + FMA + F16C. Only compiler intrinsics and raw pointers here: an inline function of a shared header could be emitted
// with these instructions and then be the copy that the linker keeps for everybody.
#include "attention/kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include "attention/code_kernels.h"
#include "attention/float_kernels.h"
#include "attention/kernel_table.h"
#include "attention/simd/avx2.h"

namespace oscar::attention {

const Kernels* avx2_kernels() {
  static constexpr Kernels kernels = kernel_table<FloatKernels<Avx2>, CodeKernels<Avx2, Sse>>("avx2");
  return &kernels;
}

}  // namespace oscar::attention

#else

namespace oscar::attention {

const Kernels* avx2_kernels() { return nullptr; }

}  // namespace oscar::attention

#endif
