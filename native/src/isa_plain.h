// The vector operations that kernels need, in plain C++: for other machines, and as a reference for testing the
// vectorised ones.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "float4.h"
#include "half.h"

namespace OSTRO_ISA {

using ostro::Half;
using ostro::kBiasedFloats;

// Tests set it to the width of the kernels they compare with.
#ifdef OSTRO_PLAIN_PANEL
constexpr int kPanel = OSTRO_PLAIN_PANEL;
#else
constexpr int kPanel = 4;
#endif
// One size of tiles: each is a separate kernel, and compiling more would take longer than everything else.
constexpr int kTileRows = 1;
constexpr int kTileSums = 1;
constexpr int kTilePanels = 1;
constexpr int kOneRowPanels = 1, kAhead = 1024;
constexpr int kFloatRows = 4, kWideRows = 0;
constexpr int kInt8Bias = 0, kInt4Bias = 0;
constexpr float kInt4Factor = 16.0f;

// clang-format off: a table, one operation per line
struct Floats { float at[kPanel]; };
struct Ints { int32_t at[kPanel]; };
struct Bytes { int8_t at[4 * kPanel]; };
struct Run { const int8_t* at; };

#define EACH(n) for (int i = 0; i < (n); ++i)
inline Floats all(float value) { Floats a; EACH(kPanel) a.at[i] = value; return a; }
inline Floats zeros() { return all(0.0f); }
inline Floats load(const float* from) { Floats a; EACH(kPanel) a.at[i] = from[i]; return a; }
inline Floats load(const Half* from) { Floats a; EACH(kPanel) a.at[i] = ostro::to_float(from[i]); return a; }
inline void store(float* to, Floats a) { EACH(kPanel) to[i] = a.at[i]; }
inline void store(Half* to, Floats a) { EACH(kPanel) to[i] = ostro::to_half(a.at[i]); }
inline Floats operator+(Floats a, Floats b) { EACH(kPanel) a.at[i] += b.at[i]; return a; }
inline Floats operator-(Floats a, Floats b) { EACH(kPanel) a.at[i] -= b.at[i]; return a; }
inline Floats operator*(Floats a, Floats b) { EACH(kPanel) a.at[i] *= b.at[i]; return a; }
inline Floats operator/(Floats a, Floats b) { EACH(kPanel) a.at[i] /= b.at[i]; return a; }
inline Floats operator*(Floats a, float b) { return a * all(b); }
inline Floats madd(Floats sum, Floats a, Floats b) { EACH(kPanel) sum.at[i] = std::fma(a.at[i], b.at[i], sum.at[i]); return sum; }
inline Floats madd(Floats sum, Floats a, float b) { return madd(sum, a, all(b)); }
// NaN if either is NaN.
inline float larger(float a, float b) { return a > b || a != a ? a : b; }
inline float smaller(float a, float b) { return a < b || a != a ? a : b; }
inline Floats max(Floats a, Floats b) { EACH(kPanel) a.at[i] = larger(a.at[i], b.at[i]); return a; }
inline Floats min(Floats a, Floats b) { EACH(kPanel) a.at[i] = smaller(a.at[i], b.at[i]); return a; }
inline Floats abs(Floats a) { EACH(kPanel) a.at[i] = std::fabs(a.at[i]); return a; }
// Adds the upper half to the lower until four are left, then neighbours.
inline float total(Floats a) {
  for (int half = kPanel / 2; half >= 4; half /= 2) EACH(half) a.at[i] += a.at[half + i];
  return (a.at[0] + a.at[1]) + (a.at[2] + a.at[3]);
}
inline float largest(Floats a) { EACH(kPanel) a.at[0] = larger(a.at[0], a.at[i]); return a.at[0]; }
// 2 to the power of the integer in the low bits of `n`, -126 to 127
inline Floats power_of_two(Floats n) {
  EACH(kPanel) n.at[i] = std::bit_cast<float>((std::bit_cast<uint32_t>(n.at[i]) << 23) + (127u << 23));
  return n;
}

// Floats with these exponents and no further bits.
inline Floats load_powers(const uint8_t* from) { Floats a; EACH(kPanel) a.at[i] = std::bit_cast<float>(static_cast<uint32_t>(from[i]) << 23); return a; }
inline Floats load(const int8_t* from) { Floats a; EACH(kPanel) a.at[i] = from[i]; return a; }
inline Ints ints(int32_t value) { Ints a; EACH(kPanel) a.at[i] = value; return a; }
inline Floats as_floats(Ints a) { Floats b; std::memcpy(&b, &a, sizeof b); return b; }
inline Run run(const int8_t* from) { return {from}; }
inline Bytes bytes(const uint8_t* from) { Bytes a; std::memcpy(&a, from, sizeof a); return a; }
inline Bytes signed_codes(Bytes a) { return a; }
inline Bytes low_signed(Bytes a) { EACH(4 * kPanel) a.at[i] = static_cast<int8_t>(static_cast<uint8_t>(a.at[i]) << 4); return a; }
inline Bytes high_signed(Bytes a) { EACH(4 * kPanel) a.at[i] = static_cast<int8_t>(a.at[i] & 0xF0); return a; }
inline Bytes low_unsigned(Bytes a) { EACH(4 * kPanel) a.at[i] &= 0x0F; return a; }
inline Bytes high_unsigned(Bytes a) { EACH(4 * kPanel) a.at[i] = static_cast<int8_t>(static_cast<uint8_t>(a.at[i]) >> 4); return a; }
// Also the bits of `more` from `first` on, after the lowest four.
template <int first, int count>
inline Bytes with_bits(Bytes low, Bytes more) {
  EACH(4 * kPanel) low.at[i] = static_cast<int8_t>(low.at[i] | (static_cast<uint8_t>(more.at[i]) >> first & ((1 << count) - 1)) << 4);
  return low;
}
template <int number>
inline Bytes plus(Bytes a) { EACH(4 * kPanel) a.at[i] = static_cast<int8_t>(a.at[i] + number); return a; }
// Four-bit floats, doubled and biased.
inline Bytes looked_up(Bytes a) { EACH(4 * kPanel) a.at[i] = kBiasedFloats[static_cast<uint8_t>(a.at[i])]; return a; }
inline void store(uint8_t* to, Bytes a) { std::memcpy(to, &a, sizeof a); }
template <int step>
inline Ints dot(Ints sum, Bytes codes, Run activations) {
  EACH(kPanel) for (int k = 0; k < 4; ++k) sum.at[i] += codes.at[4 * i + k] * activations.at[4 * step + k];
  return sum;
}
inline void store_rounded(int8_t* to, Floats a) { EACH(kPanel) to[i] = static_cast<int8_t>(std::fmin(127.0f, std::fmax(-128.0f, std::nearbyint(a.at[i])))); }
#undef EACH
// clang-format on

}  // namespace OSTRO_ISA
