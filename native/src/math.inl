// Functions of float vectors. Included once per instruction set.
#pragma once

#include "broadcast.inl"
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

inline Floats sigmoid(Floats x) { return all(1.0f) / (all(1.0f) + exponential(all(0.0f) - x)); }
inline Floats silu(Floats x) { return x / (all(1.0f) + exponential(all(0.0f) - x)); }

// log(1 + e^x) = max(x, 0) + log(1 + y), where y = e^-|x|, and log(1 + y) is 2 artanh(y / (2 + y)): its series up to
// the 13th power is accurate to 2e-8 where y = 1, and more so below.
inline Floats softplus(Floats x) {
  const Floats y = exponential(all(0.0f) - abs(x));
  const Floats z = y / (y + all(2.0f)), square = z * z;
  Floats sum = all(1.0f / 13);
  for (int divisor = 11; divisor > 0; divisor -= 2) sum = madd(all(1.0f / static_cast<float>(divisor)), sum, square);
  return madd(max(x, zeros()), z * 2.0f, sum);
}

inline Floats gelu(Floats x) {
  const Floats inner = x * all(0.7978845608f) * madd(all(1.0f), x * x, 0.044715f);
  // (1 + tanh(y)) / 2 = 1 / (1 + e^-2y)
  return x / (all(1.0f) + exponential(inner * all(-2.0f)));
}

// The following work on several vectors at a time, in turns: each step waits for the one before it, and a core does not
// look far enough ahead to find the next vector's.

// sums = coefficients times powers of x, those of the lowest first
template <int terms, int count>
OSTRO_INLINE void polynomial(const Broadcast (&coefficients)[terms], const Floats (&x)[count], Floats (&sums)[count]) {
  for (Floats& sum : sums) sum = load_constant(coefficients[terms - 1]);
  each_lane<terms - 1>([&]<int i>() OSTRO_BODY {
    for (int at = 0; at < count; ++at) sums[at] = madd(load_constant(coefficients[terms - 2 - i]), sums[at], x[at]);
  });
}

constexpr Broadcast kPowersOfTwo[] = {
    broadcast(1.000000119f),    broadcast(6.931469440e-1f), broadcast(2.402212024e-1f),
    broadcast(5.550713092e-2f), broadcast(9.675540961e-3f), broadcast(1.327647129e-3f),
};

// x = 2^x for x up to 127, to 2e-7 of it; below -126, that of -126
template <int count>
OSTRO_INLINE void raise_two(Floats (&x)[count]) {
  Floats whole[count], rest[count];
  for (int i = 0; i < count; ++i) x[i] = max(x[i], all(-126.0f));
  for (int i = 0; i < count; ++i) whole[i] = x[i] + all(ostro::kFloatBase);
  for (int i = 0; i < count; ++i) rest[i] = whole[i] - all(ostro::kFloatBase);
  for (int i = 0; i < count; ++i) rest[i] = x[i] - rest[i];
  polynomial(kPowersOfTwo, rest, x);
  for (int i = 0; i < count; ++i) x[i] = x[i] * power_of_two(whole[i]);
}

constexpr Broadcast kTail[] = {broadcast(-9.999998212e-1f), broadcast(-1.151111603f),   broadcast(-4.591640234e-1f),
                               broadcast(-5.261822790e-2f), broadcast(7.231192198e-3f), broadcast(-2.615564445e-4f),
                               broadcast(-1.355784188e-4f), broadcast(2.886571747e-5f), broadcast(-1.965220008e-6f)};

// x times the normal cumulative distribution function, whose tail beyond |x| is 2 to the power of a polynomial: fitted
// such that the result is accurate to 3e-7 up to |x| = 6, beyond which the tail is less than 1e-9.
template <int count>
OSTRO_INLINE void exact_gelu(Floats (&x)[count]) {
  Floats size[count], tail[count];
  for (int i = 0; i < count; ++i) size[i] = min(abs(x[i]), all(6.0f));
  polynomial(kTail, size, tail);
  raise_two(tail);
  for (int i = 0; i < count; ++i) x[i] = max(x[i], zeros()) - size[i] * tail[i];
}

inline Floats exact_gelu(Floats x) {
  Floats one[] = {x};
  exact_gelu(one);
  return one[0];
}

// silu of the gate, which is steeper here, * (up + 1); the gate is at most 7, and the up's size too.
inline Floats clamped_silu(Floats gate, Floats up) {
  const Floats most = all(7.0f), low = min(gate, most);
  const Floats share = all(1.0f) + exponential(low * all(-1.702f));
  return low / share * (max(min(up, most), all(-7.0f)) + all(1.0f));
}

// Inner states of a gate and an up. Not inlined, since each size of tile would have a copy.
OSTRO_NOINLINE static Floats gated(ostro::After after, Floats gate, Floats up) {
  switch (after) {
    case ostro::After::kClampedSilu: return clamped_silu(gate, up);
    case ostro::After::kExactGelu: return exact_gelu(gate) * up;
    case ostro::After::kGelu: return gelu(gate) * up;
    default: return silu(gate) * up;
  }
}

// cap * tanh(x / cap)
inline Floats softcapped(Floats x, float cap) {
  const Floats e = exponential(x * (2.0f / cap));
  return (e - all(1.0f)) / (e + all(1.0f)) * cap;
}

}  // namespace OSTRO_ISA
