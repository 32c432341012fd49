// AVX-512 with VNNI: what gains from wider vectors; the rest is AVX2's.
#include "attention/kernels.h"

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 finds its own intrinsics' undefined operands.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)

#include "attention/code_kernels.h"
#include "attention/float_kernels.h"
#include "attention/simd/avx2.h"
#include "attention/simd/avx512.h"

namespace oscar::attention {
namespace {

// Rows may end within a vector.
void dots(const float* q, std::int64_t ldq, int rows, const float* k, std::int64_t ldk, int dim, float* s) {
  const bool whole = dim % Avx512::kWords == 0;
  (whole ? FloatKernels<Avx512>::dots : avx2_kernels()->dots)(q, ldq, rows, k, ldk, dim, s);
}

}  // namespace

const Kernels* avx512_kernels() {
  using Code = CodeKernels<Avx512, Sse>;
  using Float = FloatKernels<Avx512>;
  static const Kernels kernels = [] {
    Kernels k = *avx2_kernels();
    k.name = "avx512";
    k.widen = Float::widen;
    k.dots = dots;
    k.multiply = Float::multiply;
    k.weighted_sum = Float::weighted_sum;
    k.mirrored_multiply = Float::mirrored_multiply;
    k.logits = Float::logits;
    k.exponentials = Float::exponentials;
    k.complex_multiply = Float::complex_multiply;
    k.unpack_keys = Code::unpack_keys;
    k.spread = Code::spread;
    k.key_scores = Code::key_scores;
    k.packed_key_scores = Code::packed_key_scores;
    k.packed_value_sums = Code::packed_value_sums;
    k.quantise_weights = Code::quantise_weights;
    k.weigh = Code::weigh;
    k.value_sums = Code::value_sums;
    return k;
  }();
  return &kernels;
}

}  // namespace oscar::attention

#else

namespace oscar::attention {

const Kernels* avx512_kernels() { return nullptr; }

}  // namespace oscar::attention

#endif
