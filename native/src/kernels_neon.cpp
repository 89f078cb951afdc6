#define OSTRO_ISA neon
#include "isa_neon.h"
#include "isa.inl"

#if defined(__linux__)
#include <sys/auxv.h>
#endif

namespace ostro {
namespace {

bool runs_here() {
#if defined(__linux__)
  constexpr unsigned long kDotProducts = 1UL << 20;
  return getauxval(AT_HWCAP) & kDotProducts;
#else
  return true;  // Every Mac with an ARM processor has dot products.
#endif
}

}  // namespace

extern const Kernels kNeonKernels;
constinit const Kernels kNeonKernels = OSTRO_TABLE("neon", runs_here);

}  // namespace ostro
