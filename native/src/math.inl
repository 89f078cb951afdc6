// Functions of float vectors. Included once per instruction set.
#pragma once

#include "kernels.h"

namespace OSTRO_ISA {

// exp(x), to about one unit in the last place: 2^n * e^r with |r| <= ln 2 / 2. Adding 1.5 * 2^23 rounds n to an integer
// in the low bits of the sum.
inline Floats exponential(Floats x) {
  x = max(min(x, all(88.0f)), all(-87.0f));
  const Floats sum = madd(all(ostro::kFloatBase), x, 1.44269504f);
  const Floats n = sum - all(ostro::kFloatBase);
  Floats r = madd(x, n, -0.693359375f);
  r = madd(r, n, 2.12194440e-4f);
  const Floats square = r * r;
  const Floats first = madd(all(5.0000001201e-1f), r, 1.6666665459e-1f);
  const Floats second = madd(all(4.1665795894e-2f), r, 8.3334519073e-3f);
  const Floats third = madd(all(1.3981999507e-3f), r, 1.9875691500e-4f);
  const Floats p = madd(first, madd(second, third, square), square);
  return madd(r + all(1.0f), p, square) * power_of_two(sum);
}

inline Floats silu(Floats x) { return x / (all(1.0f) + exponential(all(0.0f) - x)); }

inline Floats gelu(Floats x) {
  const Floats inner = x * all(0.7978845608f) * madd(all(1.0f), x * x, 0.044715f);
  // (1 + tanh(y)) / 2 = 1 / (1 + e^-2y)
  return x / (all(1.0f) + exponential(inner * all(-2.0f)));
}

// x times the normal cumulative distribution function, whose tail beyond |x| is a polynomial in t times e^(-x^2 / 2)
// (Abramowitz and Stegun, 7.1.26): accurate to 2e-7.
inline Floats exact_gelu(Floats x) {
  const Floats size = abs(x);
  const Floats t = all(1.0f) / madd(all(1.0f), size, 0.3275911f * 0.70710678f);
  Floats sum = madd(all(-1.453152027f), t, 1.061405429f);
  sum = madd(all(1.421413741f), sum, t);
  sum = madd(all(-0.284496736f), sum, t);
  sum = madd(all(0.254829592f), sum, t);
  const Floats tail = sum * t * exponential(x * x * all(-0.5f)) * 0.5f;
  return max(x, zeros()) - size * tail;
}

// silu of the gate, which is steeper here, * (up + 1); the gate is at most 7, and the up's size too.
inline Floats clamped_silu(Floats gate, Floats up) {
  const Floats most = all(7.0f), low = min(gate, most);
  const Floats share = all(1.0f) + exponential(low * all(-1.702f));
  return low / share * (max(min(up, most), all(-7.0f)) + all(1.0f));
}

// Inner states of a gate and an up.
inline Floats gated(ostro::After after, Floats gate, Floats up) {
  if (after == ostro::After::kClampedSilu) return clamped_silu(gate, up);
  return (after == ostro::After::kSilu ? silu(gate) : gelu(gate)) * up;
}

// cap * tanh(x / cap)
inline Floats softcapped(Floats x, float cap) {
  const Floats e = exponential(x * (2.0f / cap));
  return (e - all(1.0f)) / (e + all(1.0f)) * cap;
}

}  // namespace OSTRO_ISA
