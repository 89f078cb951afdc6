#include "kernels.h"

#include <cstring>

namespace ostro {

extern const Kernels kPlainKernels;
#if defined(OSTRO_ARM)
extern const Kernels kNeonKernels;
#elif defined(OSTRO_X86)
#if defined(OSTRO_AMX)
extern const TiledMatmuls kAmxMatmuls;
#endif
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx2Kernels;
#endif

namespace {

#if defined(OSTRO_AMX)
// Made here, in code for any CPU: what is compiled for one instruction set must not run when the library is loaded.
const Kernels kAmxKernels = with_tiles(kAvx512Kernels, kAmxMatmuls);
#endif

const Kernels* const kAll[] = {
#if defined(OSTRO_ARM)
    &kNeonKernels,
#elif defined(OSTRO_X86)
#if defined(OSTRO_AMX)
    &kAmxKernels,
#endif
    &kAvx512Kernels,
    &kAvx2Kernels,
#endif
    &kPlainKernels,
};

}  // namespace

Kernels with_tiles(Kernels others, const TiledMatmuls& tiles) {
  others.name = tiles.name;
  others.runs_here = tiles.runs_here;
  others.quantize = tiles.quantize;
  others.linear = tiles.linear;
  return others;
}

const Kernels* const* kernels_begin() { return kAll; }
int kernels_count() { return sizeof kAll / sizeof *kAll; }

const Kernels* find_kernels(const char* name) {
  for (const Kernels* kernels : kAll)
    if ((!name || !std::strcmp(name, kernels->name)) && kernels->runs_here()) return kernels;
  return nullptr;
}

}  // namespace ostro
