#define OSTRO_ISA plain
#include "isa_plain.h"
#include "isa.inl"

namespace ostro {

extern const Kernels kPlainKernels;
constinit const Kernels kPlainKernels = OSTRO_TABLE("plain", [] { return true; });

}  // namespace ostro
