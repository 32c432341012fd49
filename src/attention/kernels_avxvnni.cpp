// AVX2 with the byte dot products of AVX-VNNI (client processors without AVX-512).
#include "attention/kernels.h"

#if defined(__AVXVNNI__) && defined(__AVX2__) && defined(__FMA__)

#include "attention/code_kernels.h"
#include "attention/simd/avx2.h"

namespace oscar::attention {
namespace {

struct AvxVnni : Avx2 {
  static constexpr int kLongestSum = 1 << 24;
  static Sums start(const IntegerQuery& q) { return _mm256_set1_epi32(-(q.even + q.odd)); }
  static void add_key_products(Sums& sums, Words codes, Words query) { sums = _mm256_dpbusd_avx_epi32(sums, codes, query); }
  static void add_value_products(Sums& sums, Words weights, Words codes) {
    sums = _mm256_dpbusd_avx_epi32(sums, weights, codes);
  }
  static Floats key_total(Sums sums) { return _mm256_cvtepi32_ps(sums); }
  static Floats value_total(Sums sums) { return key_total(sums); }
};

}  // namespace

const Kernels* avxvnni_kernels() {
  using Code = CodeKernels<AvxVnni, Sse>;
  static const Kernels kernels = [] {
    Kernels k = *avx2_kernels();
    k.name = "avxvnni";
    k.key_scores = Code::key_scores;
    k.value_sums = Code::value_sums;
    return k;
  }();
  return &kernels;
}

}  // namespace oscar::attention

#else

namespace oscar::attention {

const Kernels* avxvnni_kernels() { return nullptr; }

}  // namespace oscar::attention

#endif
