// The vector operations that kernels need, for x86 with AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cstdint>
#include <cstring>

#include "float4.h"
#include "half.h"
#include "kernels.h"

namespace OSTRO_ISA {

using ostro::Half;
using ostro::kBiasedFloats;

constexpr int kPanel = 8;
constexpr int kTileRows = 2;
constexpr int kTileSums = 4;
// Tiles of floats have up to kFloatRows rows and two panels, or up to kWideRows and four.
constexpr int kFloatRows = 6, kWideRows = 2;
constexpr int kTilePanels = 4;
constexpr int kOneRowPanels = 2, kAhead = 2048;
// Four-bit codes are stored unsigned, which saves an instruction per dot product; eight-bit ones must stay signed.
constexpr int kInt8Bias = 0, kInt4Bias = 8;
constexpr float kInt4Factor = 1.0f;

using Floats = __m256;
using Ints = __m256i;
// Four columns for each row of a panel, and whether they are signed: a constant wherever `dot` is compiled.
struct Bytes {
  __m256i codes;
  bool has_sign;
};
struct Run {
  const int8_t* activations;  // sixteen; loaded where they are used, because a load can broadcast four of them
};

inline Floats zeros() { return _mm256_setzero_ps(); }
inline Floats all(float value) { return _mm256_set1_ps(value); }
inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
inline Floats load(const Half* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline void store(float* to, Floats value) { _mm256_storeu_ps(to, value); }
inline void store(Half* to, Floats value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}
// sum + a * b, rounded once
inline Floats madd(Floats sum, Floats a, Floats b) { return _mm256_fmadd_ps(a, b, sum); }
inline Floats madd(Floats sum, Floats a, float b) { return madd(sum, a, all(b)); }
// NaN if either is NaN: the instruction alone would return b.
inline Floats or_nan(Floats value, Floats a) { return _mm256_or_ps(value, _mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
inline Floats max(Floats a, Floats b) { return or_nan(_mm256_max_ps(a, b), a); }
inline Floats min(Floats a, Floats b) { return or_nan(_mm256_min_ps(a, b), a); }
inline Floats abs(Floats a) { return _mm256_andnot_ps(all(-0.0f), a); }
inline float total(Floats a) {
  __m128 four = _mm256_castps256_ps128(a) + _mm256_extractf128_ps(a, 1);
  four = four + _mm_movehdup_ps(four);
  return _mm_cvtss_f32(four) + _mm_cvtss_f32(_mm_movehl_ps(four, four));
}
inline float largest(Floats a) {
  a = max(a, _mm256_permute2f128_ps(a, a, 1));
  a = max(a, _mm256_permute_ps(a, 0b01001110));
  return _mm256_cvtss_f32(max(a, _mm256_permute_ps(a, 0b10110001)));
}
// 2 to the power of the integer in the low bits of `n`, -126 to 127
inline Floats power_of_two(Floats n) {
  const Ints exponent = _mm256_slli_epi32(_mm256_castps_si256(n), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(127 << 23)));
}

inline Ints ints(int32_t value) { return _mm256_set1_epi32(value); }
inline Floats as_floats(Ints a) { return _mm256_castsi256_ps(a); }
inline Run run(const int8_t* from) { return {from}; }
inline Bytes bytes(const uint8_t* from) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), false}; }
inline Bytes signed_codes(Bytes a) { return {a.codes, true}; }
inline Bytes low_unsigned(Bytes a) { return {_mm256_and_si256(a.codes, _mm256_set1_epi8(0x0F)), false}; }
inline Bytes high_unsigned(Bytes a) { return low_unsigned({_mm256_srli_epi16(a.codes, 4), false}); }
inline Bytes with_bias(Bytes a) { return {_mm256_xor_si256(a.codes, _mm256_set1_epi8(kInt4Bias)), false}; }
inline Bytes low_signed(Bytes a) { return with_bias(low_unsigned(a)); }
inline Bytes high_signed(Bytes a) { return with_bias(high_unsigned(a)); }
// Also the bits of `more` from `first` on, after the lowest four.
template <int first, int count>
inline Bytes with_bits(Bytes low, Bytes more) {
  const __m256i moved = first > 4 ? _mm256_srli_epi16(more.codes, first - 4) : _mm256_slli_epi16(more.codes, 4 - first);
  const __m256i wanted = _mm256_and_si256(moved, _mm256_set1_epi8(((1 << count) - 1) << 4));
  return {_mm256_or_si256(low.codes, wanted), false};
}
template <int number>
inline Bytes plus(Bytes a) {
  return {_mm256_add_epi8(a.codes, _mm256_set1_epi8(number)), false};
}
// Four-bit floats, doubled and biased.
inline Bytes looked_up(Bytes a) {
  const __m128i table = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kBiasedFloats));
  return {_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), a.codes), false};
}
inline void store(uint8_t* to, Bytes a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), a.codes); }

// Adds to each row's sum its four codes times activations 4 * step .. 4 * step + 3 of the run.
//
// The instruction multiplies unsigned by signed bytes and adds pairs in sixteen bits, which may saturate: so signs are
// moved to the activations. Activations are within +-127, and 2 * 128 * 127 fits.
template <int step>
inline Ints dot(Ints sum, Bytes w, Run run) {
  int32_t four;
  std::memcpy(&four, run.activations + 4 * step, sizeof four);
  const __m256i x = _mm256_set1_epi32(four);
  const __m256i pairs = w.has_sign ? _mm256_maddubs_epi16(_mm256_abs_epi8(w.codes), _mm256_sign_epi8(x, w.codes))
                                   : _mm256_maddubs_epi16(w.codes, x);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

// Floats with these exponents and no further bits.
inline Floats load_powers(const uint8_t* from) {
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 23));
}
inline Floats load(const int8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
inline void store_rounded(int8_t* to, Floats a) {
  // Values too large for an integer would become the smallest one.
  const Ints whole = _mm256_cvtps_epi32(_mm256_min_ps(a, all(127.0f)));
  const __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(narrow, narrow));
}

#define OSTRO_HAS_QUANTIZE
// Absolute values are compared as integers, which have the same order; NaN is the largest of them.
inline Ints magnitudes(const float* from) {
  return _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), _mm256_set1_epi32(0x7FFFFFFF));
}
inline Ints group_magnitudes(const float* from) {
  return _mm256_max_epi32(_mm256_max_epi32(magnitudes(from), magnitudes(from + 8)),
                          _mm256_max_epi32(magnitudes(from + 16), magnitudes(from + 24)));
}

inline float group_peak(const float* from) {
  const Ints eight = group_magnitudes(from);
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0b01001110));
  return std::bit_cast<float>(_mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0b10110001))));
}

inline ostro::CodeSums quantize_group(const float* from, float peak, int8_t* codes) {
  const Floats inverse = all(peak > 0.0f ? 127.0f / peak : 0.0f);
  Ints whole[4];
  // Values too large for an integer would become the smallest one.
  for (int i = 0; i < 4; ++i) whole[i] = _mm256_cvtps_epi32(_mm256_min_ps(load(from + 8 * i) * inverse, all(127.0f)));
  const Ints mixed = _mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]), _mm256_packs_epi32(whole[2], whole[3]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes),
                      _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
  const Ints sums = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), mixed), _mm256_set1_epi16(1));
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0b10110001));
  const int32_t half = _mm_cvtsi128_si32(four);
  return {half, half + _mm_extract_epi32(four, 2)};
}

#define OSTRO_HAS_PEAKS
constexpr int kPeaks = 8;
// Transposes eight vectors of maxima by halves, and takes maxima on the way.
inline void group_peaks(const float* from, float* peaks) {
  Ints most[kPeaks];
  for (int i = 0; i < kPeaks; ++i) most[i] = group_magnitudes(from + 32 * i);
  for (int i = 0; i < 4; ++i)
    most[i] = _mm256_max_epi32(_mm256_permute2x128_si256(most[i], most[i + 4], 0x20),
                               _mm256_permute2x128_si256(most[i], most[i + 4], 0x31));
  // Now each half has four candidates of one group, of group 0 and 4 for most[0].
  for (int i = 0; i < 2; ++i)
    most[i] =
        _mm256_max_epi32(_mm256_unpacklo_epi64(most[i], most[i + 2]), _mm256_unpackhi_epi64(most[i], most[i + 2]));
  const Floats low = _mm256_castsi256_ps(most[0]), high = _mm256_castsi256_ps(most[1]);
  const Ints last = _mm256_max_epi32(_mm256_castps_si256(_mm256_shuffle_ps(low, high, 0x88)),
                                     _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0xDD)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(peaks),
                      _mm256_permutevar8x32_epi32(last, _mm256_setr_epi32(0, 2, 1, 3, 4, 6, 5, 7)));
}

}  // namespace OSTRO_ISA
