// Packs rows in file formats into the panels that kernels read, and unpacks them. Knows file formats; knows no kernels.
#pragma once

#include <cstdint>

#include "format.h"

namespace ostro {

// A row's format in its source file: GGUF's numbers.
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
  kMXFP4 = 39,
};

// Chooses the packed format for such rows: lossless with bits = 0, otherwise floats are quantized to 8 or 4 bits.
// Returns false if they cannot be packed.
bool choose_format(int32_t source, int bits, Matrix& matrix);

// Whether choose_format could have chosen this, with panels of this width.
bool is_packable(const Matrix& matrix, int panel);

// Packs panels of `panel` rows; a null row is zeros. `matrix` has the format, `to` has Layout(matrix).total() bytes.
void pack_matrix(int32_t source, const uint8_t* const* rows, const Matrix& matrix, int panel, int threads, uint8_t* to);

// Dequantizes one row of a packed matrix.
void unpack_row(const Matrix& matrix, int panel, int row, float* to);

}  // namespace ostro
