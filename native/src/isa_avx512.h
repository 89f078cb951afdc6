// The vector operations that kernels need, for x86 with AVX-512 and VNNI dot products.
#pragma once

// GCC 11 and 12 warn about values that their own header leaves undefined on purpose.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <bit>
#include <cstdint>
#include <cstring>

#include "float4.h"
#include "half.h"
#include "kernels.h"

namespace OSTRO_ISA {

using ostro::Half;
using ostro::kBiasedFloats;

constexpr int kPanel = 16;
constexpr int kTileRows = 4;
constexpr int kTileSums = 8;
// Tiles of floats have up to kFloatRows rows and two panels, or up to kWideRows and four.
constexpr int kFloatRows = 12, kWideRows = 6;
constexpr int kTilePanels = 4;
constexpr int kOneRowPanels = 2, kAhead = 2048;
// Dot products take unsigned codes and signed activations.
constexpr int kInt8Bias = 128, kInt4Bias = 8;
constexpr float kInt4Factor = 1.0f;

using Floats = __m512;
using Ints = __m512i;
using Bytes = __m512i;  // four columns for each row of a panel
struct Run {
  const int8_t* activations;  // sixteen; loaded where they are used, because a load can broadcast four of them
};

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats all(float value) { return _mm512_set1_ps(value); }
inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline Floats load(const Half* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline void store(float* to, Floats value) { _mm512_storeu_ps(to, value); }
inline void store(Half* to, Floats value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}
// sum + a * b, rounded once
inline Floats madd(Floats sum, Floats a, Floats b) { return _mm512_fmadd_ps(a, b, sum); }
inline Floats madd(Floats sum, Floats a, float b) { return madd(sum, a, all(b)); }
#define OSTRO_HAS_FACTOR
using Factor = Floats;
// GCC would broadcast it from memory in each multiplication, and loops over a state wait for loads.
inline Factor factor(float value) {
  Floats a = all(value);
  asm("" : "+v"(a));
  return a;
}
// NaN if either is NaN: the instruction alone would return b.
inline Floats or_nan(Floats value, Floats a) {
  return _mm512_mask_mov_ps(value, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), a);
}
inline Floats max(Floats a, Floats b) { return or_nan(_mm512_max_ps(a, b), a); }
inline Floats min(Floats a, Floats b) { return or_nan(_mm512_min_ps(a, b), a); }
inline Floats abs(Floats a) { return _mm512_abs_ps(a); }
inline float total(Floats a) {
  const __m256 eight = _mm512_castps512_ps256(a) + _mm512_extractf32x8_ps(a, 1);
  __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
  four = four + _mm_movehdup_ps(four);
  return _mm_cvtss_f32(four) + _mm_cvtss_f32(_mm_movehl_ps(four, four));
}
inline float largest(Floats a) {
  a = max(a, _mm512_shuffle_f32x4(a, a, 0b01001110));
  a = max(a, _mm512_shuffle_f32x4(a, a, 0b10110001));
  a = max(a, _mm512_permute_ps(a, 0b01001110));
  return _mm512_cvtss_f32(max(a, _mm512_permute_ps(a, 0b10110001)));
}
// 2 to the power of the integer in the low bits of `n`, -126 to 127
inline Floats power_of_two(Floats n) {
  const Ints exponent = _mm512_slli_epi32(_mm512_castps_si512(n), 23);
  return _mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(127 << 23)));
}

inline Ints ints(int32_t value) { return _mm512_set1_epi32(value); }
inline Floats as_floats(Ints a) { return _mm512_castsi512_ps(a); }
inline Run run(const int8_t* from) { return {from}; }
inline Bytes bytes(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline Bytes signed_codes(Bytes a) { return _mm512_xor_si512(a, _mm512_set1_epi8(static_cast<char>(kInt8Bias))); }
inline Bytes low_unsigned(Bytes a) { return _mm512_and_si512(a, _mm512_set1_epi8(0x0F)); }
inline Bytes high_unsigned(Bytes a) { return low_unsigned(_mm512_srli_epi16(a, 4)); }
inline Bytes with_bias(Bytes a) { return _mm512_xor_si512(a, _mm512_set1_epi8(kInt4Bias)); }
inline Bytes low_signed(Bytes a) { return with_bias(low_unsigned(a)); }
inline Bytes high_signed(Bytes a) { return with_bias(high_unsigned(a)); }
// Also the bits of `more` from `first` on, after the lowest four.
template <int first, int count>
inline Bytes with_bits(Bytes low, Bytes more) {
  const Bytes moved = first > 4 ? _mm512_srli_epi16(more, first - 4) : _mm512_slli_epi16(more, 4 - first);
  constexpr int kOrAnd = 0xF8;
  return _mm512_ternarylogic_epi32(low, moved, _mm512_set1_epi8(((1 << count) - 1) << 4), kOrAnd);
}
template <int number>
inline Bytes plus(Bytes a) {
  return _mm512_add_epi8(a, _mm512_set1_epi8(number));
}
// Four-bit floats, doubled and biased.
inline Bytes looked_up(Bytes a) {
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kBiasedFloats));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), a);
}
inline void store(uint8_t* to, Bytes a) { _mm512_storeu_si512(to, a); }

// Adds to each row's sum its four codes times activations 4 * step .. 4 * step + 3 of the run.
template <int step>
inline Ints dot(Ints sum, Bytes codes, Run run) {
  int32_t four;
  std::memcpy(&four, run.activations + 4 * step, sizeof four);
  return _mm512_dpbusd_epi32(sum, codes, _mm512_set1_epi32(four));
}

// Floats with these exponents and no further bits.
inline Floats load_powers(const uint8_t* from) {
  const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 23));
}
inline Floats load(const int8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
inline void store_rounded(int8_t* to, Floats a) {
  // Values too large for an integer would become the smallest one.
  const Ints whole = _mm512_cvtps_epi32(_mm512_min_ps(a, all(127.0f)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(whole));
}

#define OSTRO_HAS_QUANTIZE
// Absolute values are compared as integers, which have the same order; NaN is the largest of them.
inline Ints magnitudes(const float* from) {
  return _mm512_and_si512(_mm512_loadu_si512(from), _mm512_set1_epi32(0x7FFFFFFF));
}

inline float group_peak(const float* from) {
  return std::bit_cast<float>(_mm512_reduce_max_epi32(_mm512_max_epi32(magnitudes(from), magnitudes(from + 16))));
}

inline ostro::CodeSums quantize_group(const float* from, float peak, int8_t* codes) {
  const Floats inverse = all(peak > 0.0f ? 127.0f / peak : 0.0f);
  __m128i sums[2];
  for (int half = 0; half < 2; ++half) {
    // Values too large for an integer would become the smallest one.
    const Ints whole = _mm512_cvtps_epi32(_mm512_min_ps(load(from + 16 * half) * inverse, all(127.0f)));
    const __m128i narrow = _mm512_cvtsepi32_epi8(whole);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + 16 * half), narrow);
    sums[half] = _mm_dpbusd_epi32(_mm_setzero_si128(), _mm_set1_epi8(1), narrow);
  }
  const __m128i pairs = _mm_hadd_epi32(sums[0], _mm_add_epi32(sums[0], sums[1]));
  const auto both = std::bit_cast<uint64_t>(_mm_cvtsi128_si64(_mm_hadd_epi32(pairs, pairs)));
  return {static_cast<int32_t>(both), static_cast<int32_t>(both >> 32)};
}

#define OSTRO_HAS_PEAKS
constexpr int kPeaks = 16;
// Transposes sixteen vectors of maxima by halves, and takes maxima on the way.
inline void group_peaks(const float* from, float* peaks) {
  Ints most[kPeaks];
  for (int i = 0; i < kPeaks; ++i)
    most[i] = _mm512_max_epi32(magnitudes(from + 32 * i), magnitudes(from + 32 * i + 16));
  for (int i = 0; i < 8; ++i)
    most[i] = _mm512_max_epi32(_mm512_shuffle_i32x4(most[i], most[i + 8], 0x44),
                               _mm512_shuffle_i32x4(most[i], most[i + 8], 0xEE));
  for (int i = 0; i < 4; ++i)
    most[i] = _mm512_max_epi32(_mm512_shuffle_i32x4(most[i], most[i + 4], 0x88),
                               _mm512_shuffle_i32x4(most[i], most[i + 4], 0xDD));
  // Now each quarter has four candidates of one group, of group 0, 8, 4 and 12 for most[0].
  for (int i = 0; i < 2; ++i)
    most[i] =
        _mm512_max_epi32(_mm512_unpacklo_epi64(most[i], most[i + 2]), _mm512_unpackhi_epi64(most[i], most[i + 2]));
  const Floats low = _mm512_castsi512_ps(most[0]), high = _mm512_castsi512_ps(most[1]);
  const Ints last = _mm512_max_epi32(_mm512_castps_si512(_mm512_shuffle_ps(low, high, 0x88)),
                                     _mm512_castps_si512(_mm512_shuffle_ps(low, high, 0xDD)));
  const Ints order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  _mm512_storeu_si512(peaks, _mm512_permutexvar_epi32(order, last));
}

}  // namespace OSTRO_ISA
