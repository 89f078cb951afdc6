#define OSTRO_ISA neon
#include "isa_neon.h"
#include "linear.inl"
