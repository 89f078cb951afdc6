#define OSTRO_ISA avx2
#include "isa_avx2.h"
#include "isa.inl"

#include <cpuid.h>

namespace ostro {
namespace {

bool converts_halves() {  // Not every compiler's __builtin_cpu_supports knows f16c.
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

bool runs_here() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && converts_halves(); }

}  // namespace

extern const Kernels kAvx2Kernels;
constinit const Kernels kAvx2Kernels = OSTRO_TABLE("avx2", runs_here);

}  // namespace ostro
