// The vector operations that kernels need, for ARM with dot products (ARMv8.2).
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "float4.h"
#include "half.h"
#include "kernels.h"

namespace OSTRO_ISA {

using ostro::Half;
using ostro::kBiasedFloats;

constexpr int kPanel = 4;
constexpr int kTileRows = 8;
constexpr int kTileSums = 8;
// Tiles of floats have up to kFloatRows rows and two panels, or up to kWideRows and four.
constexpr int kFloatRows = 4, kWideRows = 4;
constexpr int kTilePanels = 4;
constexpr int kOneRowPanels = 1, kAhead = 1024;
// Added to signed codes to suit the dot-product instruction, which takes signed codes here.
constexpr int kInt8Bias = 0, kInt4Bias = 0;
// Signed four-bit codes are used in the upper half of their byte: multiplied by sixteen.
constexpr float kInt4Factor = 16.0f;

using Floats = float32x4_t;
using Ints = int32x4_t;
using Bytes = int8x16_t;  // four columns for each row of a panel
using Run = int8x16_t;    // sixteen activations

inline Floats zeros() { return vdupq_n_f32(0.0f); }
inline Floats all(float value) { return vdupq_n_f32(value); }
inline Floats load(const float* from) { return vld1q_f32(from); }
inline Floats load(const Half* from) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(from))));
}
inline void store(float* to, Floats value) { vst1q_f32(to, value); }
inline void store(Half* to, Floats value) {
  vst1_u16(reinterpret_cast<uint16_t*>(to), vreinterpret_u16_f16(vcvt_f16_f32(value)));
}
// sum + a * b, rounded once
inline Floats madd(Floats sum, Floats a, Floats b) { return vfmaq_f32(sum, a, b); }
inline Floats madd(Floats sum, Floats a, float b) { return vfmaq_n_f32(sum, a, b); }
inline Floats max(Floats a, Floats b) { return vmaxq_f32(a, b); }
inline Floats min(Floats a, Floats b) { return vminq_f32(a, b); }
inline Floats abs(Floats a) { return vabsq_f32(a); }
inline float total(Floats a) { return vaddvq_f32(a); }
inline float largest(Floats a) { return vmaxvq_f32(a); }

#define OSTRO_HAS_LANES
using Four = float32x4_t;
inline Four load_four(const float* from) { return vld1q_f32(from); }
template <int at>
inline Floats madd_lane(Floats sum, Floats a, Four b) {
  asm("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(sum) : "w"(a), "w"(b), "i"(at));
  return sum;
}

// 2 to the power of the integer in the low bits of `n`, -126 to 127
inline Floats power_of_two(Floats n) {
  return vreinterpretq_f32_s32(vaddq_s32(vshlq_n_s32(vreinterpretq_s32_f32(n), 23), vdupq_n_s32(127 << 23)));
}

// Broadcasting loads cost as much as arithmetic, and so do register copies: so a value that is the same in every lane
// and is overwritten at once is loaded each time. Compilers merge equal loads, unless each reads another `copy` of the
// number and, within a loop, depends on `each` iteration.
struct alignas(16) Broadcast {
  float at[4];
};
constexpr Broadcast broadcast(float value) { return {{value, value, value, value}}; }
template <int copy>
inline Floats load_broadcast(const Broadcast& from) {
  Floats value;
  asm("ldr %q0, %1" : "=w"(value) : "m"(from), "i"(copy));
  return value;
}
// Loaded in every iteration: a multiply-add would overwrite a constant, so one in a register would be copied each time.
inline Floats load_constant(const Broadcast& from) {
  Floats value;
  asm volatile("ldr %q0, %1" : "=w"(value) : "m"(from));
  return value;
}
template <int32_t value>
alignas(16) static constexpr int32_t four_ints[4] = {value, value, value, value};
template <int32_t value, int copy>
inline Ints fresh_ints(const void* each) {
  Ints loaded;
  asm("ldr %q0, %1" : "=w"(loaded) : "m"(four_ints<value>), "i"(copy), "r"(each));
  return loaded;
}

inline Ints ints(int32_t value) { return vdupq_n_s32(value); }
inline Floats as_floats(Ints a) { return vreinterpretq_f32_s32(a); }
inline Run run(const int8_t* from) { return vld1q_s8(from); }
inline Bytes bytes(const uint8_t* from) { return vreinterpretq_s8_u8(vld1q_u8(from)); }
inline Bytes signed_codes(Bytes a) { return a; }
inline Bytes low_signed(Bytes a) { return vshlq_n_s8(a, 4); }
inline Bytes high_signed(Bytes a) { return vandq_s8(a, vdupq_n_s8(static_cast<int8_t>(0xF0))); }
inline Bytes low_unsigned(Bytes a) { return vandq_s8(a, vdupq_n_s8(0x0F)); }
inline Bytes high_unsigned(Bytes a) { return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(a), 4)); }
// Also the bits of `more` from `first` on, after the lowest four.
template <int first, int count>
inline Bytes with_bits(Bytes low, Bytes more) {
  uint8x16_t moved = vreinterpretq_u8_s8(more);
  if constexpr (first < 4) moved = vshlq_n_u8(moved, 4 - first);
  if constexpr (first > 4) moved = vshrq_n_u8(moved, first - 4);
  return vorrq_s8(low, vreinterpretq_s8_u8(vandq_u8(moved, vdupq_n_u8(((1 << count) - 1) << 4))));
}
template <int number>
inline Bytes plus(Bytes a) {
  return vaddq_s8(a, vdupq_n_s8(number));
}
// Four-bit floats, doubled and biased.
inline Bytes looked_up(Bytes a) { return vqtbl1q_s8(vld1q_s8(kBiasedFloats), vreinterpretq_u8_s8(a)); }
inline void store(uint8_t* to, Bytes a) { vst1q_u8(to, vreinterpretq_u8_s8(a)); }

// Adds to each row's sum its four codes times activations 4 * step .. 4 * step + 3 of the run.
template <int step>
inline Ints dot(Ints sum, Bytes codes, Run activations) {
  return vdotq_laneq_s32(sum, codes, activations, step);
}

// Floats with these exponents and no further bits.
inline Floats load_powers(const uint8_t* from) {
  uint32_t word;
  std::memcpy(&word, from, sizeof word);
  return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(word)))), 23));
}
inline Floats load(const int8_t* from) {
  uint32_t word;
  std::memcpy(&word, from, sizeof word);
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(word)))));
}
inline void store_rounded(int8_t* to, Floats a) {
  const int16x4_t narrow = vqmovn_s32(vcvtnq_s32_f32(a));
  const int8x8_t bytes = vqmovn_s16(vcombine_s16(narrow, narrow));
  const uint32_t word = vget_lane_u32(vreinterpret_u32_s8(bytes), 0);
  std::memcpy(to, &word, sizeof word);
}

#define OSTRO_HAS_QUANTIZE
inline float group_peak(const float* from) {
  Floats most[8];
  for (int i = 0; i < 8; ++i) most[i] = vabsq_f32(vld1q_f32(from + 4 * i));
  for (int half = 4; half; half /= 2)
    for (int i = 0; i < half; ++i) most[i] = vmaxq_f32(most[i], most[i + half]);
  return vmaxvq_f32(most[0]);
}

inline ostro::CodeSums quantize_group(const float* from, float peak, int8_t* codes) {
  const float inverse = peak > 0.0f ? 127.0f / peak : 0.0f;
  int8x16_t bytes[2];
  for (int half = 0; half < 2; ++half) {
    // Adding 1.5 * 2^23 rounds them, and their codes are the lowest bytes of the sums.
    int16x8_t sums[4];
    for (int i = 0; i < 4; ++i) {
      const Floats x = vld1q_f32(from + 16 * half + 4 * i);
      sums[i] = vreinterpretq_s16_f32(vaddq_f32(vmulq_n_f32(x, inverse), all(ostro::kFloatBase)));
    }
    const int16x8_t low = vuzp1q_s16(sums[0], sums[1]), high = vuzp1q_s16(sums[2], sums[3]);
    bytes[half] = vuzp1q_s8(vreinterpretq_s8_s16(low), vreinterpretq_s8_s16(high));
    vst1q_s8(codes + 16 * half, bytes[half]);
  }
  const int32x4_t half = vdotq_s32(vdupq_n_s32(0), bytes[0], vdupq_n_s8(1));
  return {vaddvq_s32(half), vaddvq_s32(vdotq_s32(half, bytes[1], vdupq_n_s8(1)))};
}

}  // namespace OSTRO_ISA
