// Floats of four bits: a sign, two bits of exponent and one of mantissa.
#pragma once

#include <cstdint>

namespace ostro {

// Twice the number that each code means: a whole one.
constexpr int8_t kDoubledFloats[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Dot products take them with this added, so that none is negative.
constexpr int kFloatBias = 12;
constexpr int8_t kBiasedFloats[] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

}  // namespace ostro
