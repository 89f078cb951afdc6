// Float bit patterns: half-precision conversion without compiler support.
#pragma once

#include <cstdint>
#include <cstring>

namespace ostro {

// 1.5 * 2^23: adding a number of up to 22 bits to it rounds that to an integer in the sum's low bits.
constexpr float kFloatBase = 12582912.0f;

struct Half {
  uint16_t bits;
};

inline float to_float(Half half) {
  const uint32_t sign = static_cast<uint32_t>(half.bits & 0x8000) << 16;
  const uint32_t rest = half.bits & 0x7FFF;
  uint32_t bits;
  float value;
  if (rest >= 0x7C00) {
    bits = sign | 0x7F800000 | (rest & 0x3FF) << 13;
  } else if (rest >= 0x0400) {
    bits = sign | ((rest << 13) + 0x38000000);
  } else {
    value = static_cast<float>(rest) * 0x1p-24f;
    std::memcpy(&bits, &value, sizeof bits);
    bits |= sign;
  }
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Rounds to nearest, ties to even.
inline Half to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  bits &= 0x7FFFFFFF;
  if (bits > 0x7F800000) return {static_cast<uint16_t>(sign | 0x7E00)};
  if (bits >= 0x477FF000) return {static_cast<uint16_t>(sign | 0x7C00)};
  if (bits < 0x38800000) {
    float small;
    std::memcpy(&small, &bits, sizeof small);
    small += 0.5f;  // there the last bit is worth 2^-24, the smallest step of a half
    std::memcpy(&bits, &small, sizeof bits);
    return {static_cast<uint16_t>(sign | (bits - 0x3F000000))};
  }
  bits += 0x0FFF + (bits >> 13 & 1);
  return {static_cast<uint16_t>(sign | (bits - 0x38000000) >> 13)};
}

}  // namespace ostro
