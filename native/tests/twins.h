// The plain kernels at the widths of wider instruction sets, which must give the same bits; and those of AMX, emulated.
#pragma once

#include "kernels.h"

namespace ostro {

extern const Kernels kPlain8Kernels;
extern const Kernels kPlain16Kernels;
extern const Kernels kTiles16Kernels;

}  // namespace ostro
