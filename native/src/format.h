// The memory layout of a packed matrix: plain data, shared by packing and by every kernel.
//
// A matrix has `rows` outputs and `cols` inputs. P rows form a panel, where P is the vector width of this machine's
// kernels; 32 columns form a group, which has one scale, and possibly one minimum, per row.
//
//     codes    [panel][group][step][row of P][4]    a step is four columns: the operand of one dot-product instruction
//     scales   [panel][group][row of P]             for kInt8Halves [panel][group][half][row of P]
//     minima   [panel][group][row of P]
//
// Eight-bit codes are signed and take eight steps per group. Four-bit codes take four: byte i of step t holds column i
// of step t in its low half and of step t + 4 in its high half. Floats have no groups: [panel][column][row of P].
#pragma once

#include <cstddef>
#include <cstdint>

namespace ostro {

constexpr int kGroup = 32;

enum Codes : int32_t {
  kFloat32 = 0,
  kFloat16 = 1,
  kInt8 = 2,
  kInt4 = 3,        // -8 to 7
  kUnsigned4 = 4,   // 0 to 15, always with minima
  kInt8Halves = 5,  // a scale per sixteen columns
};

enum Scales : int32_t { kHalfScales = 0, kFloatScales = 1 };

struct Matrix {
  int32_t rows;  // a multiple of P
  int32_t cols;  // a multiple of kGroup, except for floats
  int32_t codes;
  int32_t scales;
  int32_t has_minima;
  int32_t reserved;
  const uint8_t* data;
  const uint8_t* scale_data;
  const uint8_t* minimum_data;
};

// Byte offsets of a packed matrix's parts, each aligned.
struct Layout {
  int64_t codes;
  int64_t scales;
  int64_t minima;

  static constexpr int64_t kAlign = 64;

  explicit Layout(const Matrix& matrix) {
    const int64_t values = static_cast<int64_t>(matrix.rows) * matrix.cols;
    const int64_t groups = values / kGroup * (matrix.scales == kHalfScales ? 2 : 4);
    switch (matrix.codes) {
      case kFloat32: codes = values * 4, scales = 0; break;
      case kFloat16: codes = values * 2, scales = 0; break;
      case kInt8Halves: codes = values, scales = groups * 2; break;
      case kInt8: codes = values, scales = groups; break;
      default: codes = values / 2, scales = groups; break;
    }
    minima = matrix.has_minima ? groups : 0;
  }

  static int64_t aligned(int64_t size) { return (size + kAlign - 1) / kAlign * kAlign; }
  int64_t scales_at() const { return aligned(codes); }
  int64_t minima_at() const { return scales_at() + aligned(scales); }
  int64_t total() const { return minima_at() + aligned(minima); }
};

}  // namespace ostro
