// ASIMD with the dot product of unsigned by signed bytes that comes with ARMv8.6's I8MM: codes of keys stay as they are.
#include "attention/kernels.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD) && defined(__ARM_FEATURE_MATMUL_INT8) && !defined(__AARCH64EB__)

#include "attention/code_kernels.h"
#include "attention/simd/neon_dotprod.h"

namespace oscar::attention {
namespace {

struct NeonI8mm : NeonDotProduct {
  static Words key_bytes(Words codes) { return codes; }
  static Sums start(const IntegerQuery& q) { return vdupq_n_s32(-q.even - q.odd); }
  static void add_key_products(Sums& sums, Words codes, Words query) {
    sums = vusdotq_s32(sums, vreinterpretq_u8_u32(codes), vreinterpretq_s8_u32(query));
  }
};

}  // namespace

const Kernels* neon_i8mm_kernels() {
  using Code = CodeKernels<NeonI8mm, NeonBytes>;
  static const Kernels kernels = [] {
    Kernels k = *neon_dotprod_kernels();
    k.name = "neon-i8mm";
    k.unpack_keys = Code::unpack_keys;
    k.key_scores = Code::key_scores;
    return k;
  }();
  return &kernels;
}

}  // namespace oscar::attention

#else

namespace oscar::attention {

const Kernels* neon_i8mm_kernels() { return nullptr; }

}  // namespace oscar::attention

#endif
