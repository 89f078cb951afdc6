// Functions of vectors of floats. Included once for each instruction set.
#pragma once

namespace OSTRO_ISA {

// e to the power of x, to about one unit in the last place: 2^n * e^r with |r| <= ln 2 / 2.
inline Floats exponential(Floats x) {
  x = max(min(x, all(88.0f)), all(-87.0f));
  const Floats n = round(x * all(1.44269504f));
  Floats r = madd(x, n, -0.693359375f);
  r = madd(r, n, 2.12194440e-4f);
  Floats p = all(1.9875691500e-4f);
  p = madd(all(1.3981999507e-3f), p, r);
  p = madd(all(8.3334519073e-3f), p, r);
  p = madd(all(4.1665795894e-2f), p, r);
  p = madd(all(1.6666665459e-1f), p, r);
  p = madd(all(5.0000001201e-1f), p, r);
  p = madd(r + all(1.0f), p, r * r);
  return p * power_of_two(n);
}

inline Floats silu(Floats x) { return x / (all(1.0f) + exponential(all(0.0f) - x)); }

inline Floats gelu(Floats x) {
  const Floats inner = x * all(0.7978845608f) * madd(all(1.0f), x * x, 0.044715f);
  // (1 + tanh(y)) / 2 = 1 / (1 + e^-2y)
  return x / (all(1.0f) + exponential(inner * all(-2.0f)));
}

// cap * tanh(x / cap)
inline Floats softcapped(Floats x, float cap) {
  const Floats e = exponential(x * (2.0f / cap));
  return (e - all(1.0f)) / (e + all(1.0f)) * cap;
}

}  // namespace OSTRO_ISA
