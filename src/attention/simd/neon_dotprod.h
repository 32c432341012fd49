// What the byte dot products of ARMv8.2 change of neon.h.
#pragma once

#include "attention/simd/neon.h"

namespace oscar::attention {
namespace {

struct NeonDotProduct : Neon {
  using Sums = int32x4_t;  // one per word
  static constexpr int kHeldWords = 64;
  static Sums start(const IntegerQuery& q) { return vdupq_n_s32(128 * (q.even_sum + q.odd_sum) - q.even - q.odd); }
  static void add_key_products(Sums& sums, Words codes, Words query) {
    sums = vdotq_s32(sums, vreinterpretq_s8_u32(codes), vreinterpretq_s8_u32(query));
  }
  static Floats key_total(Sums sums) { return vcvtq_f32_s32(sums); }

  static Sums no_sums() { return vdupq_n_s32(0); }
  static void add_value_products(Sums& sums, Words weights, Words codes) {
    sums = vreinterpretq_s32_u32(
        vdotq_u32(vreinterpretq_u32_s32(sums), vreinterpretq_u8_u32(weights), vreinterpretq_u8_u32(codes)));
  }
  static Floats value_total(Sums sums) { return vcvtq_f32_s32(sums); }
};

}  // namespace
}  // namespace oscar::attention
