// ASIMD as every ARMv8 processor has it.
#include "attention/kernels.h"

#if defined(__aarch64__) && defined(__ARM_NEON) && !defined(__AARCH64EB__)

#include "attention/code_kernels.h"
#include "attention/float_kernels.h"
#include "attention/simd/neon.h"

namespace oscar::attention {

const Kernels* neon_kernels() {
  using Code = CodeKernels<Neon, NeonBytes>;
  using Float = FloatKernels<Neon>;
  static constexpr Kernels kernels = {"neon",
                                      Float::widen,
                                      Float::mask_row,
                                      Float::dots,
                                      Float::transpose,
                                      Float::multiply,
                                      Float::weighted_sum,
                                      Float::project,
                                      Float::mirrored_multiply,
                                      Float::logits,
                                      Float::exponentials,
                                      Code::transpose_words,
                                      Code::interleave,
                                      Code::look_up,
                                      Code::unpack_keys,
                                      Code::spread,
                                      Code::key_scores,
                                      nullptr,
                                      Code::quantise_weights,
                                      Code::weigh,
                                      Code::value_sums,
                                      nullptr,
                                      Float::complex_multiply};
  return &kernels;
}

}  // namespace oscar::attention

#else

namespace oscar::attention {

const Kernels* neon_kernels() { return nullptr; }

}  // namespace oscar::attention

#endif
