// Panels of packed weights as kernels read them, and what becomes of their products with rows. Included once per
// instruction set.
#pragma once

#include <algorithm>

#include "activations.inl"
#include "math.inl"

namespace OSTRO_ISA {

using namespace ostro;

// Calls body.operator()<panels>(first panel) for kTilePanels panels at a time, then for single ones: numbers of
// panels are multiples of kTilePanels nearly always, and each size of tiles takes time to compile.
template <int size = kTilePanels, typename Body>
inline void each_panels(int begin, int end, const Body& body) {
  for (; begin + size <= end; begin += size) body.template operator()<size>(begin);
  if constexpr (size > 1)
    if (begin < end) each_panels<1>(begin, end, body);
}

template <int panels, int rows>
struct Sums {
  Floats at[panels][rows];
};

// During summation, sums are in a local array that nothing points to, so they stay in registers.
template <int panels, int rows>
OSTRO_INLINE void keep_sums(const Floats (&sums)[panels][rows], Floats (*to)[rows]) {
  for (int panel = 0; panel < panels; ++panel)
    for (int row = 0; row < rows; ++row) to[panel][row] = sums[panel][row];
}

// Post-processes and stores a tile's sums.
template <int panels, int rows>
inline void finish(const Sums<panels, rows>& sums, float factor, After after, const float* bias, int panel, float* out,
                   long stride) {
  for (int row = 0; row < rows; ++row) {
    Floats value[panels];
    for (int i = 0; i < panels; ++i) {
      value[i] = sums.at[i][row] * factor;
      if (bias) value[i] = value[i] + load(bias + (panel + i) * kPanel);
    }
    float* to = out + row * stride;
    if (has_gates(after)) {
      // A single panel of gates is stored where the result will be, for the panel of ups, which comes next.
      if constexpr (panels == 1) {
        float* at = to + panel / 2 * kPanel;
        store(at, panel % 2 ? gated(after, load(at), value[0]) : value[0]);
      }
      for (int i = 0; i + 1 < panels; i += 2)
        store(to + (panel + i) / 2 * kPanel, gated(after, value[i], value[i + 1]));
      continue;
    }
    for (int i = 0; i < panels; ++i) {
      float* at = to + (panel + i) * kPanel;
      store(at, after == After::kAdd ? load(at) + value[i] : value[i]);
    }
  }
}

template <Form form>
constexpr int code_bytes = form.code_bytes(1) * kPanel;
// Bytes of a group's scales, or of its minima; on average, if blocks have some of their own.
template <Form form>
constexpr int number_bytes = form.number_bytes(kBlock) * kPanel / kBlock;

// Codes, scales and minima of consecutive panels of equal length.
struct Place {
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* minima;

  // The panel that begins this many groups later.
  template <Form form>
  Place after(int groups) const {
    const long count = groups;
    return {codes + count * code_bytes<form>, scales + count * number_bytes<form>, minima + count * number_bytes<form>};
  }
};

// Bytes of one scale or minimum per row of a panel; and of the halves before them that those of a block are multiplied
// with.
template <Form form>
constexpr int number_step = kPanel * (form.scales == kHalfScales    ? 2
                                      : form.scales == kFloatScales ? 4
                                                                    : 1);
template <Form form>
constexpr int halves_step = form.scales == kBlockScales ? kPanel * 2 : 0;
template <Form form>
constexpr int block_groups = form.scales == kBlockScales ? kBlock : 1;

template <Form form>
OSTRO_INLINE Floats load_halves(const uint8_t* from) {
  return form.scales == kBlockScales ? load(reinterpret_cast<const Half*>(from)) : zeros();
}

template <Form form>
OSTRO_INLINE Floats load_numbers(const uint8_t* from, Floats halves) {
  if constexpr (form.scales == kHalfScales) return load(reinterpret_cast<const Half*>(from));
  else if constexpr (form.scales == kFloatScales) return load(reinterpret_cast<const float*>(from));
  else if constexpr (form.scales == kPowerScales) return load_powers(from);
  else return halves * load(reinterpret_cast<const int8_t*>(from));
}

// By index, in a panel's scales or minima.
template <Form form>
inline Floats numbers_at(const uint8_t* from, int index) {
  constexpr int each = block_groups<form> * form.per_group();
  from += static_cast<long>(index / each) * (halves_step<form> + each * number_step<form>);
  return load_numbers<form>(from + halves_step<form> + index % each * number_step<form>, load_halves<form>(from));
}

// Narrow codes unpacked to bytes, with float scales. Signed ones get the same bias, whatever it was, so that they share
// kernels; codes with minima are unsigned, and need none.
constexpr int kSpreadBias = 32;
constexpr Form unpacked(Form form) {
  const bool has_bias = !form.has_minima && (form.codes != kInt4 || kInt4Bias);
  const Codes codes = !has_bias ? kSpread : form.per_group() == 2 ? kSpreadHalves : kSpreadBiased;
  return {codes, kFloatScales, form.has_minima};
}

// What is added to codes for dot products.
template <Form form>
constexpr int code_bias = form.has_minima               ? 0
                          : form.codes == kSpreadBiased ? kSpreadBias
                          : form.codes == kSpreadHalves ? kSpreadBias
                          : form.codes == kInt6Halves   ? 32
                          : form.codes == kInt5         ? 16
                          : form.codes == kFloat4       ? kFloatBias
                          : form.codes == kInt4         ? kInt4Bias
                          : form.codes == kInt8         ? kInt8Bias
                                                        : 0;

// A step's codes in the form that dot products take.
template <Form form, int half, int step>
OSTRO_INLINE Bytes step_codes(const uint8_t* codes) {
  if constexpr (!form.is_narrow()) {
    const Bytes eight = bytes(codes + (4 * half + step) * kPanel * 4);
    return form.codes == kInt8 ? signed_codes(eight) : eight;
  } else {
    const Bytes both = bytes(codes + step * kPanel * 4);
    if constexpr (form.codes == kInt4) return half ? high_signed(both) : low_signed(both);
    const Bytes low = half ? high_unsigned(both) : low_unsigned(both);
    if constexpr (form.codes == kFloat4) return looked_up(low);
    const uint8_t* planes = codes + 4 * kPanel * 4;
    if constexpr (form.high_bits() == 1) return with_bits<4 * half + step, 1>(low, bytes(planes));
    if constexpr (form.high_bits() == 2) return with_bits<2 * step, 2>(low, bytes(planes + half * kPanel * 4));
    return low;
  }
}

// What sums have to be multiplied with.
template <Form form>
constexpr float code_factor = form.codes == kInt4 ? 1.0f / kInt4Factor : 1.0f;

// Unpacks scales and minima of some groups into the scratch.
template <Form form>
inline Place unpack_numbers(const Place& from, int groups, uint8_t* scratch) {
  auto* scales = reinterpret_cast<float*>(scratch);
  float* minima = scales + groups * form.per_group() * kPanel;
  for (int i = 0; i < groups * form.per_group(); ++i) store(scales + i * kPanel, numbers_at<form>(from.scales, i));
  for (int i = 0; form.has_minima && i < groups; ++i) store(minima + i * kPanel, numbers_at<form>(from.minima, i));
  return {from.codes, scratch, reinterpret_cast<const uint8_t*>(minima)};
}

// Unpacks the weights of some groups into the scratch: codes with this bias, scales, minima.
template <Form form, int to_bias>
static Place unpack(const Place& from, int groups, uint8_t* scratch) {
  constexpr int bias = to_bias - code_bias<form>;
  const uint8_t* codes = from.codes;
  uint8_t* to = scratch;
  for (int group = 0; group < groups; ++group, codes += code_bytes<form>, to += 8 * kPanel * 4)
    each_lane<8>([&]<int step>() OSTRO_BODY {
      const Bytes eight = step_codes<form, step / 4, step % 4>(codes);
      store(to + step * kPanel * 4, bias ? plus<bias>(eight) : eight);
    });
  Place place = unpack_numbers<form>(from, groups, to);
  place.codes = scratch;
  return place;
}

}  // namespace OSTRO_ISA
