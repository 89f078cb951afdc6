#define OSTRO_ISA plain16
#define OSTRO_PLAIN_PANEL 16
#include "isa_plain.h"
#include "isa.inl"
#include "linear.inl"
#include "twins.h"

namespace ostro {

const Kernels kPlain16Kernels = OSTRO_TABLE("plain16", [] { return true; });

}  // namespace ostro
