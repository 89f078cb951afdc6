#include "kernels.h"

#include <cstring>

namespace ostro {

extern const Kernels kPlainKernels;
extern const Kernels kNeonKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const TiledMatmuls kAmxMatmuls;

namespace {

#if defined(OSTRO_WITH_AMX)
// Made here, in code for any CPU: what is compiled for one instruction set must not run when the library is loaded.
const Kernels kAmxKernels = with_tiles(kAvx512Kernels, kAmxMatmuls);
#endif

const Kernels* const kAll[] = {
#if defined(OSTRO_WITH_AMX)
    &kAmxKernels,
#endif
#if defined(OSTRO_WITH_AVX512)
    &kAvx512Kernels,
#endif
#if defined(OSTRO_WITH_AVX2)
    &kAvx2Kernels,
#endif
#if defined(OSTRO_WITH_NEON)
    &kNeonKernels,
#endif
#if defined(OSTRO_WITH_PLAIN)
    &kPlainKernels,
#endif
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
