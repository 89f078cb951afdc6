// Some numbers that lie beside each other, each to be multiplied by a vector. Included once for each instruction set.
//
// Where products can take a number out of a vector's lane, four are loaded at once; elsewhere each is spread from memory.
#pragma once

#include "format.h"

namespace OSTRO_ISA {

// body.operator()<0>() to <count - 1>()
template <int count, int at = 0, typename Body>
inline void each_lane(Body&& body) {
  if constexpr (at < count) {
    body.template operator()<at>();
    each_lane<count, at + 1>(body);
  }
}

template <int count>
struct Lanes {
  const float* from;

  Lanes() = default;
  explicit Lanes(const float* from) : from(from) {}
  template <int at>
  Floats times(Floats a) const { return a * from[at]; }
  template <int at>
  Floats add(Floats sum, Floats a) const { return madd(sum, a, from[at]); }
};

#if defined(OSTRO_HAS_LANES)
template <>
struct Lanes<4> {
  Four four;

  Lanes() = default;
  explicit Lanes(const float* from) : four(load_four(from)) {}
  template <int at>
  Floats times(Floats a) const { return times_lane<at>(a, four); }
  template <int at>
  Floats add(Floats sum, Floats a) const { return madd_lane<at>(sum, a, four); }
};
#endif

}  // namespace OSTRO_ISA
