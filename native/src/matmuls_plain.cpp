#define OSTRO_ISA plain
#include "isa_plain.h"
#include "linear.inl"
