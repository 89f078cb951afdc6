#define OSTRO_ISA avx512
#include "isa_avx512.h"
#include "isa.inl"

namespace ostro {
namespace {

bool runs_here() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}

}  // namespace

extern const Kernels kAvx512Kernels;
constinit const Kernels kAvx512Kernels = OSTRO_TABLE("avx512", runs_here);

}  // namespace ostro
