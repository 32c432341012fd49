// ASIMD of ARMv8.0 (NEON) in the vocabulary of code_kernels.h; see avx2.h.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "attention/kernels.h"

namespace oscar::attention {
namespace {

struct Neon {
  using Words = uint32x4_t;
  using Floats = float32x4_t;
  static constexpr int kWords = 4;
  static constexpr int kRegisters = 32;

  static Words load(const std::uint32_t* p) { return vld1q_u32(p); }
  static void store(std::uint32_t* p, Words v) { vst1q_u32(p, v); }
  static Words all(std::uint32_t x) { return vdupq_n_u32(x); }
  static Words both(Words a, Words b) { return vandq_u32(a, b); }
  static Words either(Words a, Words b) { return vorrq_u32(a, b); }
  static Words shift_right(Words v, int n) { return vshlq_u32(v, vdupq_n_s32(-n)); }
  static Words shift_left(Words v, int n) { return vshlq_u32(v, vdupq_n_s32(n)); }

  template <int n>
  static Words left(Words v) {
    return vshlq_n_u32(v, n);
  }
  template <int n>
  static Words right(Words v) {
    return vshrq_n_u32(v, n);
  }

  static Floats load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, Floats v) { vst1q_f32(p, v); }
  static Floats all(float x) { return vdupq_n_f32(x); }
  static Floats zero() { return vdupq_n_f32(0.0F); }
  static Floats add(Floats a, Floats b) { return vaddq_f32(a, b); }
  static Floats multiply(Floats a, Floats b) { return vmulq_f32(a, b); }
  static Floats multiply_add(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
  static Floats subtract(Floats a, Floats b) { return vsubq_f32(a, b); }
  static Floats divide(Floats a, Floats b) { return vdivq_f32(a, b); }
  static Floats reverse(Floats v) {
    const float32x4_t pairs = vrev64q_f32(v);
    return vextq_f32(pairs, pairs, 2);
  }
  // Of a number and a NaN the number, as the plain kernels.
  static Floats larger(Floats a, Floats b) { return vmaxnmq_f32(a, b); }
  static Floats smaller(Floats a, Floats b) { return vminnmq_f32(a, b); }
  static Floats absolute(Floats v) { return vabsq_f32(v); }
  static Floats with_sign(Floats size, Floats sign) { return vbslq_f32(vdupq_n_u32(0x80000000U), sign, size); }
  static Floats round(Floats v) { return vrndnq_f32(v); }
  static Floats times_power_of_two(Floats v, Floats n) {
    return vmulq_f32(v, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23)));
  }
  static Floats zero_below(Floats v, Floats x, Floats limit) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(v), vcltq_f32(x, limit)));
  }
  static Floats where_equal(Floats a, Floats b, Floats yes, Floats no) { return vbslq_f32(vceqq_f32(a, b), yes, no); }
  static float sum(Floats v) { return vaddvq_f32(v); }
  static float largest(Floats v) { return vmaxnmvq_f32(v); }

  static Floats widen(const std::uint16_t* halves) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves))); }
  static float widen_one(std::uint16_t half) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(half))), 0); }
  static Words different(Floats a, Floats b) { return vmvnq_u32(vceqq_f32(a, b)); }
  static bool any(Words v) { return vmaxvq_u32(v) != 0; }
  static void store_sums(Floats a, Floats b, Floats c, Floats d, float* p) {
    vst1q_f32(p, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
  }
  static void transpose(Floats (&rows)[4]) {
    const float32x4_t ab = vtrn1q_f32(rows[0], rows[1]), AB = vtrn2q_f32(rows[0], rows[1]);
    const float32x4_t cd = vtrn1q_f32(rows[2], rows[3]), CD = vtrn2q_f32(rows[2], rows[3]);
    const auto low = [](Floats x, Floats y) { return vcombine_f32(vget_low_f32(x), vget_low_f32(y)); };
    const auto high = [](Floats x, Floats y) { return vcombine_f32(vget_high_f32(x), vget_high_f32(y)); };
    rows[0] = low(ab, cd);
    rows[1] = low(AB, CD);
    rows[2] = high(ab, cd);
    rows[3] = high(AB, CD);
  }

  // Sums are one 16-bit lane per byte, for half as many words as there are registers. There is no product of a signed and an
  // unsigned byte: codes of keys are kept less 128 and start() makes up for it.
  struct Sums {
    int16x8_t low, high;  // words 0, 1 and 2, 3
  };
  static constexpr int kHeldWords = 32;
  static constexpr int kLongestSum = 1 << 24;  // 64 products of values, at most 255 * 15 each, fit an unsigned lane
  static Words key_bytes(Words codes) { return veorq_u32(codes, vdupq_n_u32(0x80808080U)); }

  // Lanes wrap; those of bytes 0 and 1 are added before they are widened, and those of 2 and 3: their centred sums fit.
  static Sums start(const IntegerQuery& q) {
    const std::int32_t even = 128 * q.even_sum - q.even;
    const std::int32_t odd = 128 * q.odd_sum - q.odd;
    const int16x8_t lanes =
        vreinterpretq_s16_u64(vdupq_n_u64(static_cast<std::uint64_t>(static_cast<std::uint16_t>(even)) |
                                          static_cast<std::uint64_t>(static_cast<std::uint16_t>(odd)) << 32));
    return {lanes, lanes};
  }
  static void add_key_products(Sums& sums, Words codes, Words query) {
    const int8x16_t a = vreinterpretq_s8_u32(codes);
    const int8x16_t b = vreinterpretq_s8_u32(query);
    sums.low = vmlal_s8(sums.low, vget_low_s8(a), vget_low_s8(b));
    sums.high = vmlal_high_s8(sums.high, a, b);
  }
  static Floats key_total(const Sums& sums) { return vcvtq_f32_s32(vpaddlq_s16(vpaddq_s16(sums.low, sums.high))); }

  static Sums no_sums() { return {vdupq_n_s16(0), vdupq_n_s16(0)}; }
  static void add_value_products(Sums& sums, Words weights, Words codes) {
    const uint8x16_t a = vreinterpretq_u8_u32(weights);
    const uint8x16_t b = vreinterpretq_u8_u32(codes);
    sums.low = vreinterpretq_s16_u16(vmlal_u8(vreinterpretq_u16_s16(sums.low), vget_low_u8(a), vget_low_u8(b)));
    sums.high = vreinterpretq_s16_u16(vmlal_high_u8(vreinterpretq_u16_s16(sums.high), a, b));
  }
  static Floats value_total(const Sums& sums) {
    const uint32x4_t low = vpaddlq_u16(vreinterpretq_u16_s16(sums.low));
    const uint32x4_t high = vpaddlq_u16(vreinterpretq_u16_s16(sums.high));
    return vcvtq_f32_u32(vpaddq_u32(low, high));
  }

  static Words no_words() { return vdupq_n_u32(0); }
  static void store_bytes(std::uint8_t* p, Floats v, Words& sums) {
    const uint32x4_t x = vcvtnq_u32_f32(v);
    sums = vaddq_u32(sums, x);
    const uint16x4_t narrow = vqmovn_u32(x);
    const std::uint32_t bytes = vget_lane_u32(vreinterpret_u32_u8(vqmovn_u16(vcombine_u16(narrow, narrow))), 0);
    __builtin_memcpy(p, &bytes, sizeof bytes);
  }
  static std::int32_t sum(Words v) { return static_cast<std::int32_t>(vaddvq_u32(v)); }
};

// 16 bytes at a time.
struct NeonBytes {
  using Bytes = uint8x16_t;
  static Bytes load(const std::uint8_t* p) { return vld1q_u8(p); }
  static void store(std::uint32_t* p, Bytes v) { vst1q_u32(p, vreinterpretq_u32_u8(v)); }
  static Bytes low_bytes(Bytes a, Bytes b) { return vzip1q_u8(a, b); }
  static Bytes high_bytes(Bytes a, Bytes b) { return vzip2q_u8(a, b); }
  static Bytes low_halves(Bytes a, Bytes b) { return bytes(vzip1q_u16(halves(a), halves(b))); }
  static Bytes high_halves(Bytes a, Bytes b) { return bytes(vzip2q_u16(halves(a), halves(b))); }
  static Bytes low_words(Bytes a, Bytes b) { return bytes(vzip1q_u32(words(a), words(b))); }
  static Bytes high_words(Bytes a, Bytes b) { return bytes(vzip2q_u32(words(a), words(b))); }
  static Bytes low_doubles(Bytes a, Bytes b) { return vcombine_u8(vget_low_u8(a), vget_low_u8(b)); }
  static Bytes high_doubles(Bytes a, Bytes b) { return vcombine_u8(vget_high_u8(a), vget_high_u8(b)); }

 private:
  static uint16x8_t halves(Bytes v) { return vreinterpretq_u16_u8(v); }
  static uint32x4_t words(Bytes v) { return vreinterpretq_u32_u8(v); }
  static Bytes bytes(uint16x8_t v) { return vreinterpretq_u8_u16(v); }
  static Bytes bytes(uint32x4_t v) { return vreinterpretq_u8_u32(v); }
};

}  // namespace
}  // namespace oscar::attention
