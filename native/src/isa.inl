// All kernels of one instruction set but those of linear.inl. Included once per set, with OSTRO_ISA as its name and its
// header included before.
#include "math.inl"
#include "float_linear.inl"
#include "attention.inl"
#include "text_attention.inl"
#include "row_ops.inl"
#include "recurrent.inl"

namespace OSTRO_ISA {

static void quantize(const float* x, int row, int rows, int cols, uint8_t* to) {
  in_tile(row, rows,
          [&](auto tile, int first) { quantize_in_tile<tile>(x, row - first, cols, to + first * row_bytes(cols)); });
}

// In linear.inl.
void multiply_codes(const Matrix& matrix, const uint8_t* x, int rows, int begin, int end, After after, const float* bias,
                    float* out, long stride, uint8_t* scratch);

static void linear(const Matrix& matrix, const void* x, long x_stride, int rows, int begin, int end, After after,
                   const float* bias, float* out, long stride, uint8_t* scratch) {
  const auto* floats = static_cast<const float*>(x);
  const auto* codes = static_cast<const uint8_t*>(x);
  if (matrix.codes == kFloat32)
    float_product<float>(matrix, floats, x_stride, rows, begin, end, after, bias, out, stride);
  else if (matrix.codes == kFloat16)
    float_product<Half>(matrix, floats, x_stride, rows, begin, end, after, bias, out, stride);
  else multiply_codes(matrix, codes, rows, begin, end, after, bias, out, stride, scratch);
}

}  // namespace OSTRO_ISA

// clang-format off: in the order of struct Kernels
#define OSTRO_TABLE(title, runs)                                                                        \
  {title, OSTRO_ISA::kPanel, OSTRO_ISA::kTileRows, runs, OSTRO_ISA::row_bytes, OSTRO_ISA::quantize,     \
   OSTRO_ISA::linear, OSTRO_ISA::attend, OSTRO_ISA::keep, OSTRO_ISA::pack_head, OSTRO_ISA::attend_text, \
   OSTRO_ISA::norm, OSTRO_ISA::layer_norm, OSTRO_ISA::rotate, OSTRO_ISA::softcap, OSTRO_ISA::scale,     \
   OSTRO_ISA::apply, OSTRO_ISA::float_dot, OSTRO_ISA::add_scaled, OSTRO_ISA::activate, OSTRO_ISA::weigh,     \
   OSTRO_ISA::multiply, OSTRO_ISA::filter, OSTRO_ISA::filter_one, OSTRO_ISA::unit, OSTRO_ISA::decay,       \
   OSTRO_ISA::delta_tile, OSTRO_ISA::ssm_tile}
// clang-format on
