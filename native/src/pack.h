// Packs rows in file formats into the panels that kernels read, and unpacks them. Knows file formats; knows no kernels.
#pragma once

#include <cstdint>

#include "format.h"

namespace ostro {

// What a row is made of where it comes from: GGUF's numbers.
enum Source : int32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kBF16 = 30,
};

// Fills in how a matrix of such rows is packed: exactly as it is with bits = 0, floats to 8 or 4 bits where asked.
// False where it cannot be.
bool choose_format(int32_t source, int bits, Matrix& matrix);

// Whether a matrix is one that choose_format can have made, in panels so wide.
bool is_packable(const Matrix& matrix, int panel);

// Packs panels of `panel` rows; a null row is zeros. The matrix tells the format, `to` holds Layout(matrix).total() bytes.
void pack_matrix(int32_t source, const uint8_t* const* rows, const Matrix& matrix, int panel, int threads, uint8_t* to);

// One row of a packed matrix, widened.
void unpack_row(const Matrix& matrix, int panel, int row, float* to);

}  // namespace ostro
