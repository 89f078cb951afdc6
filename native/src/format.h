// The memory layout of a packed matrix: plain data, shared by packing and by every kernel.
//
// A matrix has `rows` outputs and `cols` inputs. P rows form a panel, where P is the vector width of this machine's
// kernels; 32 columns form a group, which has one scale, and possibly one minimum, per row.
//
//     codes    [panel][group][step][row of P][4]    a step is four columns: the operand of one dot-product instruction
//     scales   [panel][group][row of P]             for kInt6Halves [panel][group][half][row of P]
//     minima   [panel][group][row of P]
//
// Eight-bit codes are signed and take eight steps per group. Narrower ones take four: byte i of step t holds the lowest
// four bits of column i of step t in its low half, and of step t + 4 in its high half. After them come the fifth bits,
// [row of P][4], of which bit t of byte i belongs to step t; or the fifth and sixth bits, [half][row of P][4], of which
// bits 2t and 2t + 1 belong to step t of that half. Floats have no groups: [panel][column][row of P].
//
// With kBlockScales, eight groups form a block, whose numbers are products of a half and a byte, as in K types:
// [panel][block], each a half per row of P, then [group] (and [half]) a signed byte per row of P.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ostro {

constexpr int kGroup = 32;
constexpr int kBlock = 8;  // groups

enum Codes : int32_t {
  // A byte each, as dot products take them: not in packed matrices. The last has a scale per sixteen columns.
  kSpread = -1,
  kSpreadBiased = -2,
  kSpreadHalves = -3,
  kFloat32 = 0,
  kFloat16 = 1,
  kInt8 = 2,
  kInt4 = 3,        // -8 to 7
  kUnsigned4 = 4,   // 0 to 15, always with minima
  kInt6Halves = 5,  // -32 to 31, stored with 32 added; a scale per sixteen columns
  kInt5 = 6,        // -16 to 15, stored with 16 added
  kUnsigned5 = 7,   // 0 to 31, always with minima
  kFloat4 = 8,      // floats of four bits (e2m1), times two
};

enum Scales : int32_t {
  kHalfScales = 0,
  kFloatScales = 1,  // not in packed matrices
  kBlockScales = 2,
  kPowerScales = 3,  // the exponents of floats, a byte each: 2 to the power of that less 127, or zero
};

// How weights are stored.
struct Form {
  int32_t codes;
  int32_t scales;
  bool has_minima;

  bool operator==(const Form&) const = default;
  constexpr bool is_float() const { return codes == kFloat32 || codes == kFloat16; }
  // Whether codes take less than a byte.
  constexpr bool is_narrow() const { return codes >= kInt4; }
  // Bits of a narrow code beyond the lowest four.
  constexpr int high_bits() const { return codes == kInt6Halves ? 2 : codes == kInt5 || codes == kUnsigned5 ? 1 : 0; }
  // Columns that cannot be divided further.
  constexpr int unit() const { return is_float() ? 1 : scales == kBlockScales ? kGroup * kBlock : kGroup; }
  constexpr int per_group() const { return codes == kInt6Halves || codes == kSpreadHalves ? 2 : 1; }
  // Bytes of a row's codes in this many groups.
  constexpr int64_t code_bytes(int64_t groups) const {
    return groups * kGroup * (is_narrow() ? 4 + high_bits() : 8) / 8;
  }
  // Bytes of a row's scales, or of its minima, in this many groups.
  constexpr int64_t number_bytes(int64_t groups) const {
    const int64_t numbers = groups * per_group();
    if (scales == kBlockScales) return numbers + groups / kBlock * 2;
    return numbers * (scales == kPowerScales ? 1 : scales == kHalfScales ? 2 : 4);
  }
};

// All that matrices are packed in: each has kernels of its own.
constexpr Form kForms[] = {
    {kFloat32, kHalfScales, false},     {kFloat16, kHalfScales, false},  {kInt8, kHalfScales, false},
    {kInt4, kHalfScales, false},        {kUnsigned4, kHalfScales, true}, {kUnsigned4, kBlockScales, true},
    {kInt6Halves, kBlockScales, false}, {kInt5, kHalfScales, false},     {kUnsigned5, kHalfScales, true},
    {kUnsigned5, kBlockScales, true},   {kFloat4, kPowerScales, false},
};

struct Matrix {
  int32_t rows;  // a multiple of P
  int32_t cols;  // a multiple of the form's unit
  int32_t codes;
  int32_t scales;
  int32_t has_minima;
  int32_t reserved;
  const uint8_t* data;
  const uint8_t* scale_data;
  const uint8_t* minimum_data;

  Form form() const { return {codes, scales, has_minima != 0}; }
};

// Byte offsets of a packed matrix's parts, each aligned.
struct Layout {
  int64_t codes;
  int64_t scales;
  int64_t minima;

  static constexpr int64_t kAlign = 64;

  explicit Layout(const Matrix& matrix) {
    const Form form = matrix.form();
    const int64_t rows = matrix.rows, groups = matrix.cols / kGroup;
    codes = form.is_float() ? rows * matrix.cols * (matrix.codes == kFloat32 ? 4 : 2) : rows * form.code_bytes(groups);
    scales = form.is_float() ? 0 : rows * form.number_bytes(groups);
    minima = form.has_minima ? scales : 0;
  }

  static int64_t aligned(int64_t size) { return (size + kAlign - 1) / kAlign * kAlign; }
  int64_t scales_at() const { return aligned(codes); }
  int64_t minima_at() const { return scales_at() + aligned(scales); }
  int64_t total() const { return minima_at() + aligned(minima); }
};

}  // namespace ostro
