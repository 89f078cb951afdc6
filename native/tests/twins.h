// The plain kernels at the widths of wider instruction sets, which must give the same bits.
#pragma once

#include "kernels.h"

namespace ostro {

extern const Kernels kPlain8Kernels;
extern const Kernels kPlain16Kernels;

}  // namespace ostro
