#define OSTRO_ISA avx512
#include "isa_avx512.h"
#include "linear.inl"
