// Adjacent numbers, each broadcast in turn to be multiplied by a vector. Included once per instruction set.
//
// If multiply instructions can take a vector's lane as operand, four are loaded at once; otherwise each is broadcast
// from memory.
#pragma once

#include "format.h"

// Compilers consider a tile's loop too large to inline, so inlining is forced.
#if defined(_MSC_VER)
#define OSTRO_NOINLINE __declspec(noinline)
#define OSTRO_INLINE __forceinline
#define OSTRO_BODY
#else
#define OSTRO_NOINLINE __attribute__((noinline))
#define OSTRO_INLINE __attribute__((always_inline)) inline
#define OSTRO_BODY __attribute__((always_inline))
#endif

namespace OSTRO_ISA {

// Always inlined: GCC takes a function that only prefetches for one without effects, and deletes calls of it.
OSTRO_INLINE void fetch(const void* from) {
#if !defined(_MSC_VER)
  __builtin_prefetch(from);
#endif
}

// body.operator()<0>() to <count - 1>()
template <int count, int at = 0, typename Body>
OSTRO_INLINE void each_lane(Body&& body) {
  if constexpr (at < count) {
    body.template operator()<at>();
    each_lane<count, at + 1>(body);
  }
}

#if !defined(OSTRO_HAS_FACTOR)
// A number by which several vectors are multiplied.
using Factor = float;
inline Factor factor(float value) { return value; }
#endif

template <int count>
struct Lanes {
  const float* from;

  Lanes() = default;
  explicit Lanes(const float* from) : from(from) {}
  template <int at>
  Floats add(Floats sum, Floats a) const {
    return madd(sum, a, from[at]);
  }
};

#if !defined(OSTRO_HAS_LANES)
// A number to be broadcast to a whole vector, in memory.
using Broadcast = float;
constexpr Broadcast broadcast(float value) { return value; }
inline Floats load_constant(const Broadcast& from) { return all(from); }
template <int copy>
inline Floats load_broadcast(const Broadcast& from) {
  return all(from);
}
template <int32_t value, int copy>
inline Ints fresh_ints(const void*) {
  return ints(value);
}
#endif

#if defined(OSTRO_HAS_LANES)
template <int count>
  requires(count % 4 == 0)
struct Lanes<count> {
  Four fours[count / 4];

  Lanes() = default;
  explicit Lanes(const float* from) {
    for (int i = 0; i < count / 4; ++i) fours[i] = load_four(from + 4 * i);
  }
  template <int at>
  Floats add(Floats sum, Floats a) const {
    return madd_lane<at % 4>(sum, a, fours[at / 4]);
  }
};
#endif

}  // namespace OSTRO_ISA
