#include "pack.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <system_error>
#include <thread>
#include <vector>

#include "float4.h"
#include "half.h"

namespace ostro {
namespace {

// One group of a row: value = scale * code + minimum. K types multiply both with whole numbers, scales with one for each
// half.
struct Coded {
  int8_t codes[kGroup];
  float scale, minimum;
  int8_t scale_factors[2], minimum_factor;
};

float half_at(const uint8_t* at) {
  Half half;
  std::memcpy(&half, at, sizeof half);
  return to_float(half);
}

float float_at(int32_t source, const uint8_t* row, int col) {
  if (source == kF16) return half_at(row + 2 * col);
  uint32_t bits = 0;
  if (source == kBF16) {
    uint16_t upper;
    std::memcpy(&upper, row + 2 * col, sizeof upper);
    bits = static_cast<uint32_t>(upper) << 16;
  } else {
    std::memcpy(&bits, row + 4 * col, sizeof bits);
  }
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

bool is_float(int32_t source) { return source == kF32 || source == kF16 || source == kBF16; }

float rounded(float value) { return to_float(to_half(value)); }

// NaN and infinity must not vanish: the whole group becomes NaN, and so does every logit.
bool all_finite(const float* from) {
  return std::all_of(from, from + kGroup, [](float value) { return std::isfinite(value); });
}

// Quantizes to eight bits, symmetric around zero.
void to_eight_bits(const float* from, Coded& to) {
  float peak = 0.0f;
  for (int i = 0; i < kGroup; ++i) peak = std::max(peak, std::fabs(from[i]));
  to.scale = rounded(peak / 127.0f);
  for (int i = 0; i < kGroup; ++i) {
    const float code = to.scale > 0.0f ? std::nearbyint(from[i] / to.scale) : 0.0f;
    to.codes[i] = static_cast<int8_t>(std::clamp(code, -127.0f, 127.0f));
  }
}

// Quantizes with this minimum and scale; returns the squared error.
float four_bit_error(const float* from, float minimum, float scale, int8_t* codes) {
  float error = 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    const float code = scale > 0.0f ? std::clamp(std::nearbyint((from[i] - minimum) / scale), 0.0f, 15.0f) : 0.0f;
    const float off = scale * code + minimum - from[i];
    codes[i] = static_cast<int8_t>(code);
    error += off * off;
  }
  return error;
}

// Quantizes to four bits: from the smallest value to the largest, or a slightly narrower range if that is closer.
void to_four_bits(const float* from, Coded& to) {
  const auto [low, high] = std::minmax_element(from, from + kGroup);
  float least = INFINITY;
  int8_t codes[kGroup];
  for (const float share : {1.0f, 0.95f, 0.9f, 0.85f}) {
    const float inset = (*high - *low) * (1.0f - share) / 2;
    const float minimum = rounded(*low + inset), scale = rounded((*high - *low) * share / 15.0f);
    const float error = four_bit_error(from, minimum, scale, codes);
    if (!(error < least)) continue;
    least = error;
    to.minimum = minimum;
    to.scale = scale;
    std::copy(codes, codes + kGroup, to.codes);
  }
}

void nibbles(const uint8_t* from, int offset, int8_t* codes) {
  for (int i = 0; i < 16; ++i) {
    codes[i] = static_cast<int8_t>((from[i] & 15) + offset);
    codes[i + 16] = static_cast<int8_t>((from[i] >> 4) + offset);
  }
}

// Adds the fifth bits, stored in one 32-bit word.
void fifth_bits(const uint8_t* from, int8_t* codes) {
  uint32_t bits;
  std::memcpy(&bits, from, sizeof bits);
  for (int i = 0; i < kGroup; ++i) codes[i] = static_cast<int8_t>(codes[i] + ((bits >> i & 1) << 4));
}

// The six-bit scale and minimum of one of a super-block's eight groups.
void k_scales(const uint8_t* packed, int group, int& scale, int& minimum) {
  if (group < 4) {
    scale = packed[group] & 63;
    minimum = packed[group + 4] & 63;
  } else {
    scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4;
    minimum = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4;
  }
}

void read_k45(bool five, const uint8_t* row, int group, Coded& to) {
  const uint8_t* block = row + group / 8 * (five ? 176 : 144);
  const int at = group % 8;
  int scale, minimum;
  k_scales(block + 4, at, scale, minimum);
  to.scale = half_at(block);
  to.minimum = -half_at(block + 2);
  std::fill_n(to.scale_factors, 2, static_cast<int8_t>(scale));
  to.minimum_factor = static_cast<int8_t>(minimum);
  const uint8_t* low = block + (five ? 48 : 16) + at / 2 * 32;
  for (int i = 0; i < kGroup; ++i) {
    int code = at % 2 ? low[i] >> 4 : low[i] & 15;
    if (five) code |= (block[16 + i] >> at & 1) << 4;
    to.codes[i] = static_cast<int8_t>(code);
  }
}

void read_k6(const uint8_t* row, int group, Coded& to) {
  const uint8_t* block = row + group / 8 * 210;
  const int at = group % 8, half = at / 4, quarter = at % 4;
  const uint8_t* low = block + 64 * half + 32 * (quarter % 2);
  const uint8_t* high = block + 128 + 32 * half;
  for (int i = 0; i < kGroup; ++i) {
    const int bits = quarter < 2 ? low[i] & 15 : low[i] >> 4;
    to.codes[i] = static_cast<int8_t>((bits | (high[i] >> 2 * quarter & 3) << 4) - 32);
  }
  to.scale = half_at(block + 208);
  std::memcpy(to.scale_factors, block + 192 + 2 * at, 2);
}

Coded read_group(int32_t source, const uint8_t* row, int group, bool four_bits) {
  Coded to{};
  switch (source) {
    case kQ4_0: {
      const uint8_t* block = row + group * 18;
      to.scale = half_at(block);
      nibbles(block + 2, -8, to.codes);
      break;
    }
    case kQ4_1: {
      const uint8_t* block = row + group * 20;
      to.scale = half_at(block);
      to.minimum = half_at(block + 2);
      nibbles(block + 4, 0, to.codes);
      break;
    }
    case kQ5_0: {
      const uint8_t* block = row + group * 22;
      to.scale = half_at(block);
      nibbles(block + 6, -16, to.codes);
      fifth_bits(block + 2, to.codes);
      break;
    }
    case kQ5_1: {
      const uint8_t* block = row + group * 24;
      to.scale = half_at(block);
      to.minimum = half_at(block + 2);
      nibbles(block + 8, 0, to.codes);
      fifth_bits(block + 4, to.codes);
      break;
    }
    case kQ8_0: {
      const uint8_t* block = row + group * 34;
      to.scale = half_at(block);
      std::memcpy(to.codes, block + 2, kGroup);
      break;
    }
    case kMXFP4: {
      // The file's exponents are those of numbers that are not doubled. 255 is NaN there, and becomes infinity.
      const uint8_t* block = row + group * 17;
      to.scale_factors[0] = static_cast<int8_t>(block[0] == 255 ? 255 : std::max(block[0] - 1, 0));
      nibbles(block + 1, 0, to.codes);
      break;
    }
    case kQ4_K: read_k45(false, row, group, to); break;
    case kQ5_K: read_k45(true, row, group, to); break;
    case kQ6_K: read_k6(row, group, to); break;
    default: {
      float values[kGroup];
      for (int i = 0; i < kGroup; ++i) values[i] = float_at(source, row, group * kGroup + i);
      if (!all_finite(values)) to.scale = NAN;
      else if (four_bits) to_four_bits(values, to);
      else to_eight_bits(values, to);
    }
  }
  return to;
}

// A row's scales or minima in a panel.
template <typename Byte>
struct Numbers {
  const Form& form;
  Byte* first;
  int panel, row;

  // In blocks, of a number's factor.
  Byte* at(int index) const {
    if (form.scales == kPowerScales) return first + static_cast<int64_t>(index) * panel + row;
    if (form.scales == kHalfScales) return first + (static_cast<int64_t>(index) * panel + row) * 2;
    return half(index) - row * 2 + (2 + index % in_block()) * panel + row;
  }
  Byte* half(int index) const {
    if (form.scales != kBlockScales) return at(index);
    return first + form.number_bytes(kBlock) * panel * (index / in_block()) + row * 2;
  }
  int in_block() const { return kBlock * form.per_group(); }

  void put(int index, float value, int8_t factor) const {
    if (form.scales != kHalfScales) *at(index) = static_cast<uint8_t>(factor);
    if (form.scales == kPowerScales) return;
    const Half number = to_half(value);
    std::memcpy(half(index), &number, sizeof number);
  }

  float get(int index) const {
    if (form.scales == kHalfScales) return half_at(at(index));
    if (form.scales == kPowerScales) return std::bit_cast<float>(static_cast<uint32_t>(*at(index)) << 23);
    return half_at(half(index)) * static_cast<float>(static_cast<int8_t>(*at(index)));
  }
};

// The byte offset of a code within its panel's group.
int code_at(const Form& form, int panel, int row, int col) {
  const int step = col / 4 % (form.is_narrow() ? 4 : 8);
  return (step * panel + row) * 4 + col % 4;
}

// What is added to codes in files before they are stored.
int stored_bias(const Form& form) { return form.codes == kInt6Halves ? 32 : form.codes == kInt5 ? 16 : 0; }

// The byte offset, within its panel's group, of the bits of a code beyond the lowest four, and the first one's place.
struct HighBits {
  int at, first;

  HighBits(const Form& form, int panel, int row, int col) {
    const int step = col / 4, steps = 8 / form.high_bits();
    at = ((4 + step / steps) * panel + row) * 4 + col % 4;
    first = step % steps * form.high_bits();
  }
};

// Overwrites some bits of a byte.
void put_bits(uint8_t& byte, int first, int count, int bits) {
  const int mask = ((1 << count) - 1) << first;
  byte = static_cast<uint8_t>((byte & ~mask) | (bits << first & mask));
}

void pack_group(const Coded& group, const Form& form, int panel, int row, uint8_t* codes) {
  for (int col = 0; col < kGroup; ++col) {
    const int code = group.codes[col] + stored_bias(form);
    uint8_t& at = codes[code_at(form, panel, row, col)];
    if (!form.is_narrow()) {
      at = static_cast<uint8_t>(code);
      continue;
    }
    put_bits(at, col < kGroup / 2 ? 0 : 4, 4, code);
    if (form.high_bits()) {
      const HighBits place(form, panel, row, col);
      put_bits(codes[place.at], place.first, form.high_bits(), code >> 4);
    }
  }
}

int read_code(const Form& form, int panel, int row, int col, const uint8_t* codes) {
  const uint8_t byte = codes[code_at(form, panel, row, col)];
  if (!form.is_narrow()) return static_cast<int8_t>(byte);
  int code = col < kGroup / 2 ? byte & 15 : byte >> 4;
  if (form.codes == kInt4) return code > 7 ? code - 16 : code;
  if (form.high_bits()) {
    const HighBits place(form, panel, row, col);
    code |= (codes[place.at] >> place.first & ((1 << form.high_bits()) - 1)) << 4;
  }
  return form.codes == kFloat4 ? kDoubledFloats[code] : code - stored_bias(form);
}

// Packs one panel, consisting of these rows.
void pack_panel(int32_t source, const uint8_t* const* rows, const Matrix& matrix, int panel, int64_t index,
                uint8_t* to) {
  const Layout layout(matrix);
  if (matrix.form().is_float()) {
    for (int col = 0; col < matrix.cols; ++col)
      for (int row = 0; row < panel; ++row) {
        const float value = rows[row] ? float_at(source, rows[row], col) : 0.0f;
        const int64_t at = (index * matrix.cols + col) * panel + row;
        const Half half = to_half(value);
        if (matrix.codes == kFloat16) std::memcpy(to + at * 2, &half, sizeof half);
        else std::memcpy(to + at * 4, &value, sizeof value);
      }
    return;
  }
  const Form form = matrix.form();
  const int groups = matrix.cols / kGroup;
  uint8_t* codes = to + index * panel * form.code_bytes(groups);
  const int64_t numbers = index * panel * form.number_bytes(groups);
  uint8_t *scales = to + layout.scales_at() + numbers, *minima = to + layout.minima_at() + numbers;
  for (int group = 0; group < groups; ++group, codes += panel * form.code_bytes(1))
    for (int row = 0; row < panel; ++row) {
      const Coded coded = rows[row] ? read_group(source, rows[row], group, form.is_narrow()) : Coded{};
      pack_group(coded, form, panel, row, codes);
      for (int part = 0; part < form.per_group(); ++part)
        Numbers<uint8_t>{form, scales, panel, row}.put(group * form.per_group() + part, coded.scale,
                                                       coded.scale_factors[part]);
      if (form.has_minima) Numbers<uint8_t>{form, minima, panel, row}.put(group, coded.minimum, coded.minimum_factor);
    }
}

}  // namespace

bool choose_format(int32_t source, int bits, Matrix& matrix) {
  auto choose = [&](Codes codes, Scales scales, bool minima) {
    matrix.codes = codes;
    matrix.scales = scales;
    matrix.has_minima = minima;
    return matrix.cols % matrix.form().unit() == 0;
  };
  if (is_float(source) && bits && matrix.cols % kGroup == 0)
    return bits == 4 ? choose(kUnsigned4, kHalfScales, true) : choose(kInt8, kHalfScales, false);
  switch (source) {
    case kF16: return choose(kFloat16, kHalfScales, false);
    case kF32:
    case kBF16: return choose(kFloat32, kHalfScales, false);
    case kQ4_0: return choose(kInt4, kHalfScales, false);
    case kQ4_1: return choose(kUnsigned4, kHalfScales, true);
    case kQ5_0: return choose(kInt5, kHalfScales, false);
    case kQ5_1: return choose(kUnsigned5, kHalfScales, true);
    case kQ8_0: return choose(kInt8, kHalfScales, false);
    case kQ4_K: return choose(kUnsigned4, kBlockScales, true);
    case kQ5_K: return choose(kUnsigned5, kBlockScales, true);
    case kQ6_K: return choose(kInt6Halves, kBlockScales, false);
    case kMXFP4: return choose(kFloat4, kPowerScales, false);
    default: return false;
  }
}

bool is_packable(const Matrix& matrix, int panel) {
  // Sizes up to this do not overflow when multiplied.
  constexpr int64_t kMostValues = int64_t{1} << 48;
  if (panel <= 0 || matrix.rows <= 0 || matrix.cols <= 0 || matrix.rows % panel) return false;
  if (static_cast<int64_t>(matrix.rows) * matrix.cols > kMostValues) return false;
  if (matrix.has_minima != 0 && matrix.has_minima != 1) return false;
  const Form form = matrix.form();
  return std::find(std::begin(kForms), std::end(kForms), form) != std::end(kForms) && matrix.cols % form.unit() == 0;
}

void pack_matrix(int32_t source, const uint8_t* const* rows, const Matrix& matrix, int panel, int threads,
                 uint8_t* to) {
  const int panels = matrix.rows / panel;
  auto share = [&](int index) {
    for (int at = index; at < panels; at += threads)
      pack_panel(source, rows + static_cast<int64_t>(at) * panel, matrix, panel, at, to);
  };
  std::vector<std::jthread> others;
  int started = 1;
  try {
    for (; started < threads; ++started) others.emplace_back(share, started);
  } catch (const std::system_error&) {
    // If no more threads can be created, this one does their shares.
  }
  share(0);
  for (; started < threads; ++started) share(started);
}

void unpack_row(const Matrix& matrix, int panel, int row, float* to) {
  const int64_t index = row / panel;
  const int within = row % panel;
  if (matrix.form().is_float()) {
    for (int col = 0; col < matrix.cols; ++col) {
      const int64_t at = (index * matrix.cols + col) * panel + within;
      if (matrix.codes == kFloat16) to[col] = half_at(matrix.data + at * 2);
      else std::memcpy(to + col, matrix.data + at * 4, sizeof(float));
    }
    return;
  }
  const Form form = matrix.form();
  const int groups = matrix.cols / kGroup;
  const uint8_t* codes = matrix.data + index * panel * form.code_bytes(groups);
  const int64_t numbers = index * panel * form.number_bytes(groups);
  const uint8_t *scales = matrix.scale_data + numbers, *minima = matrix.minimum_data + numbers;
  for (int group = 0; group < groups; ++group, codes += panel * form.code_bytes(1), to += kGroup) {
    const float minimum = form.has_minima ? Numbers<const uint8_t>{form, minima, panel, within}.get(group) : 0.0f;
    for (int part = 0; part < form.per_group(); ++part) {
      const float scale = Numbers<const uint8_t>{form, scales, panel, within}.get(group * form.per_group() + part);
      const int count = kGroup / form.per_group();
      for (int col = part * count; col < (part + 1) * count; ++col)
        to[col] = scale * static_cast<float>(read_code(form, panel, within, col, codes)) + minimum;
    }
  }
}

}  // namespace ostro
