// AVX2 + FMA + F16C. Only compiler intrinsics and raw pointers here: an inline function of a shared header could be emitted
// with these instructions and then be the copy that the linker keeps for everybody.
#include "attention/kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include "attention/code_kernels.h"
#include "attention/float_kernels.h"
#include "attention/simd/avx2.h"

namespace oscar::attention {

const Kernels* avx2_kernels() {
  using Code = CodeKernels<Avx2, Sse>;
  using Float = FloatKernels<Avx2>;
  static constexpr Kernels kernels = {"avx2",
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

const Kernels* avx2_kernels() { return nullptr; }

}  // namespace oscar::attention

#endif
