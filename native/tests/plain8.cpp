#define OSTRO_ISA plain8
#define OSTRO_PLAIN_PANEL 8
#include "isa_plain.h"
#include "isa.inl"
#include "linear.inl"
#include "twins.h"

namespace ostro {

const Kernels kPlain8Kernels = OSTRO_TABLE("plain8", [] { return true; });

}  // namespace ostro
