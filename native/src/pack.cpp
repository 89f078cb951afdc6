#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "half.h"

namespace ostro {
namespace {

// One group of a row: value = scale * code + minimum, with a scale for each half.
struct Coded {
  int8_t codes[kGroup];
  float scale[2];
  float minimum;
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
  to.scale[0] = rounded(peak / 127.0f);
  for (int i = 0; i < kGroup; ++i) {
    const float code = to.scale[0] > 0.0f ? std::nearbyint(from[i] / to.scale[0]) : 0.0f;
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
    to.scale[0] = scale;
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
  to.scale[0] = half_at(block) * static_cast<float>(scale);
  to.minimum = -half_at(block + 2) * static_cast<float>(minimum);
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
  const float scale = half_at(block + 208);
  for (int i = 0; i < 2; ++i) to.scale[i] = scale * static_cast<float>(static_cast<int8_t>(block[192 + 2 * at + i]));
}

Coded read_group(int32_t source, const uint8_t* row, int group, bool four_bits) {
  Coded to{};
  switch (source) {
    case kQ4_0: {
      const uint8_t* block = row + group * 18;
      to.scale[0] = half_at(block);
      nibbles(block + 2, -8, to.codes);
      break;
    }
    case kQ4_1: {
      const uint8_t* block = row + group * 20;
      to.scale[0] = half_at(block);
      to.minimum = half_at(block + 2);
      nibbles(block + 4, 0, to.codes);
      break;
    }
    case kQ5_0: {
      const uint8_t* block = row + group * 22;
      to.scale[0] = half_at(block);
      nibbles(block + 6, -16, to.codes);
      fifth_bits(block + 2, to.codes);
      break;
    }
    case kQ5_1: {
      const uint8_t* block = row + group * 24;
      to.scale[0] = half_at(block);
      to.minimum = half_at(block + 2);
      nibbles(block + 8, 0, to.codes);
      fifth_bits(block + 4, to.codes);
      break;
    }
    case kQ8_0: {
      const uint8_t* block = row + group * 34;
      to.scale[0] = half_at(block);
      std::memcpy(to.codes, block + 2, kGroup);
      break;
    }
    case kQ4_K: read_k45(false, row, group, to); break;
    case kQ5_K: read_k45(true, row, group, to); break;
    case kQ6_K: read_k6(row, group, to); break;
    default: {
      float values[kGroup];
      for (int i = 0; i < kGroup; ++i) values[i] = float_at(source, row, group * kGroup + i);
      if (!all_finite(values)) to.scale[0] = NAN;
      else if (four_bits) to_four_bits(values, to);
      else to_eight_bits(values, to);
    }
  }
  return to;
}

bool is_four(const Matrix& matrix) { return matrix.codes == kInt4 || matrix.codes == kUnsigned4; }

void put_number(const Matrix& matrix, uint8_t* to, int64_t index, float value) {
  if (matrix.scales == kHalfScales) {
    const Half half = to_half(value);
    std::memcpy(to + index * 2, &half, sizeof half);
  } else {
    std::memcpy(to + index * 4, &value, sizeof value);
  }
}

float number_at(const Matrix& matrix, const uint8_t* from, int64_t index) {
  if (matrix.scales == kHalfScales) return half_at(from + index * 2);
  float value;
  std::memcpy(&value, from + index * 4, sizeof value);
  return value;
}

// The byte offset of a code within its panel's group.
int code_at(const Matrix& matrix, int panel, int row, int col) {
  const int step = col / 4 % (is_four(matrix) ? 4 : 8);
  return (step * panel + row) * 4 + col % 4;
}

void pack_group(const Coded& group, const Matrix& matrix, int panel, int row, uint8_t* codes) {
  for (int col = 0; col < kGroup; ++col) {
    uint8_t& at = codes[code_at(matrix, panel, row, col)];
    const auto code = static_cast<uint8_t>(group.codes[col]);
    if (!is_four(matrix)) at = code;
    else if (col < kGroup / 2) at = (at & 0xF0) | (code & 15);
    else at = (at & 15) | static_cast<uint8_t>(code << 4);
  }
}

// Packs one panel, consisting of these rows.
void pack_panel(int32_t source, const uint8_t* const* rows, const Matrix& matrix, int panel, int64_t index,
                uint8_t* to) {
  const Layout layout(matrix);
  if (matrix.codes == kFloat32 || matrix.codes == kFloat16) {
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
  const int groups = matrix.cols / kGroup, halves = matrix.codes == kInt8Halves ? 2 : 1;
  const int group_bytes = panel * kGroup / (is_four(matrix) ? 2 : 1);
  for (int group = 0; group < groups; ++group) {
    const int64_t at = index * groups + group;
    for (int row = 0; row < panel; ++row) {
      const Coded coded = rows[row] ? read_group(source, rows[row], group, is_four(matrix)) : Coded{};
      pack_group(coded, matrix, panel, row, to + at * group_bytes);
      for (int half = 0; half < halves; ++half)
        put_number(matrix, to + layout.scales_at(), (at * halves + half) * panel + row, coded.scale[half]);
      if (matrix.has_minima) put_number(matrix, to + layout.minima_at(), at * panel + row, coded.minimum);
    }
  }
}

}  // namespace

bool choose_format(int32_t source, int bits, Matrix& matrix) {
  auto choose = [&](Codes codes, Scales scales, bool minima) {
    matrix.codes = codes;
    matrix.scales = scales;
    matrix.has_minima = minima;
    return codes == kFloat32 || codes == kFloat16 || matrix.cols % kGroup == 0;
  };
  if (is_float(source) && bits && matrix.cols % kGroup == 0)
    return bits == 4 ? choose(kUnsigned4, kHalfScales, true) : choose(kInt8, kHalfScales, false);
  switch (source) {
    case kF16: return choose(kFloat16, kHalfScales, false);
    case kF32:
    case kBF16: return choose(kFloat32, kHalfScales, false);
    case kQ4_0: return choose(kInt4, kHalfScales, false);
    case kQ4_1: return choose(kUnsigned4, kHalfScales, true);
    case kQ5_0:
    case kQ8_0: return choose(kInt8, kHalfScales, false);
    case kQ5_1: return choose(kInt8, kHalfScales, true);
    case kQ4_K: return choose(kUnsigned4, kFloatScales, true);
    case kQ5_K: return choose(kInt8, kFloatScales, true);
    case kQ6_K: return choose(kInt8Halves, kFloatScales, false);
    default: return false;
  }
}

bool is_packable(const Matrix& matrix, int panel) {
  // Sizes up to this do not overflow when multiplied.
  constexpr int64_t kMostValues = int64_t{1} << 48;
  if (panel <= 0 || matrix.rows <= 0 || matrix.cols <= 0 || matrix.rows % panel) return false;
  if (static_cast<int64_t>(matrix.rows) * matrix.cols > kMostValues) return false;
  if (matrix.scales != kHalfScales && matrix.scales != kFloatScales) return false;
  switch (matrix.codes) {
    case kFloat32:
    case kFloat16: return matrix.has_minima == 0 && matrix.scales == kHalfScales;
    case kInt8: break;
    case kInt4:
    case kInt8Halves:
      if (matrix.has_minima) return false;
      break;
    case kUnsigned4:
      if (!matrix.has_minima) return false;
      break;
    default: return false;
  }
  return (matrix.has_minima == 0 || matrix.has_minima == 1) && matrix.cols % kGroup == 0;
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
  if (matrix.codes == kFloat32 || matrix.codes == kFloat16) {
    for (int col = 0; col < matrix.cols; ++col) {
      const int64_t at = (index * matrix.cols + col) * panel + within;
      if (matrix.codes == kFloat16) to[col] = half_at(matrix.data + at * 2);
      else std::memcpy(to + col, matrix.data + at * 4, sizeof(float));
    }
    return;
  }
  const int groups = matrix.cols / kGroup, halves = matrix.codes == kInt8Halves ? 2 : 1;
  const int group_bytes = panel * kGroup / (is_four(matrix) ? 2 : 1);
  for (int group = 0; group < groups; ++group, to += kGroup) {
    const int64_t at = index * groups + group;
    const uint8_t* codes = matrix.data + at * group_bytes;
    const float minimum = matrix.has_minima ? number_at(matrix, matrix.minimum_data, at * panel + within) : 0.0f;
    for (int col = 0; col < kGroup; ++col) {
      const uint8_t byte = codes[code_at(matrix, panel, within, col)];
      int code = static_cast<int8_t>(byte);
      if (is_four(matrix)) code = col < kGroup / 2 ? byte & 15 : byte >> 4;
      if (matrix.codes == kInt4 && code > 7) code -= 16;
      const int half = halves == 2 ? col / 16 : 0;
      const float scale = number_at(matrix, matrix.scale_data, (at * halves + half) * panel + within);
      to[col] = scale * static_cast<float>(code) + minimum;
    }
  }
}

}  // namespace ostro
