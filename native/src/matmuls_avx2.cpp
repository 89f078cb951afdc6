#define OSTRO_ISA avx2
#include "isa_avx2.h"
#include "linear.inl"
