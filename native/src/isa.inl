// All kernels of one instruction set. Included once per set, with OSTRO_ISA as its name and its header included before.
#include "math.inl"
#include "linear.inl"
#include "attention.inl"
#include "text_attention.inl"
#include "row_ops.inl"

// clang-format off: in the order of struct Kernels
#define OSTRO_TABLE(title, runs)                                                                        \
  {title, OSTRO_ISA::kPanel, OSTRO_ISA::kTileRows, runs, OSTRO_ISA::row_bytes, OSTRO_ISA::quantize,     \
   OSTRO_ISA::linear, OSTRO_ISA::attend, OSTRO_ISA::keep, OSTRO_ISA::pack_head, OSTRO_ISA::attend_text, \
   OSTRO_ISA::norm, OSTRO_ISA::layer_norm, OSTRO_ISA::rotate, OSTRO_ISA::softcap, OSTRO_ISA::scale,     \
   OSTRO_ISA::apply, OSTRO_ISA::float_dot, OSTRO_ISA::add_scaled, OSTRO_ISA::activate, OSTRO_ISA::weigh}
// clang-format on
