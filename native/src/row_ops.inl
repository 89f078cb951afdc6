// Operations on one row at a time: norms, activations, rotation, soft caps. Included once per instruction set.
#pragma once

#include <cmath>
#include <limits>

namespace OSTRO_ISA {

// 1 / sqrt(mean + eps). If squares overflow, the row becomes NaN, which is noticed, rather than zeros, which would look
// plausible.
static float inverse_root(float mean, float eps) {
  return std::isfinite(mean) ? 1.0f / std::sqrt(mean + eps) : std::numeric_limits<float>::quiet_NaN();
}

// x * weight / sqrt(mean of squares + eps), stored or added.
static void norm(const float* x, int cols, const float* weight, float eps, bool adds, float* out) {
  Floats squares[4] = {zeros(), zeros(), zeros(), zeros()};
  int at = 0;
  for (; at + 4 * kPanel <= cols; at += 4 * kPanel)
    for (int i = 0; i < 4; ++i) {
      const Floats value = load(x + at + i * kPanel);
      squares[i] = madd(squares[i], value, value);
    }
  for (; at < cols; at += kPanel) squares[0] = madd(squares[0], load(x + at), load(x + at));
  const float sum = total((squares[0] + squares[1]) + (squares[2] + squares[3]));
  const float scale = inverse_root(sum / static_cast<float>(cols), eps);
  for (at = 0; at < cols; at += kPanel) {
    const Floats value = load(x + at) * scale * load(weight + at);
    store(out + at, adds ? load(out + at) + value : value);
  }
}

// (x - mean) * weight / sqrt(variance + eps) + bias
static void layer_norm(const float* x, int cols, const float* weight, const float* bias, float eps, float* out) {
  const float count = static_cast<float>(cols);
  Floats sums = zeros(), squares = zeros();
  for (int at = 0; at < cols; at += kPanel) sums = sums + load(x + at);
  const Floats mean = all(total(sums) / count);
  for (int at = 0; at < cols; at += kPanel) {
    const Floats centred = load(x + at) - mean;
    squares = madd(squares, centred, centred);
  }
  const float scale = inverse_root(total(squares) / count, eps);
  for (int at = 0; at < cols; at += kPanel)
    store(out + at, (load(x + at) - mean) * scale * load(weight + at) + load(bias + at));
}

static void scale(const float* x, int cols, float scale, float* out) {
  for (int at = 0; at < cols; at += kPanel) store(out + at, load(x + at) * scale);
}

static void apply(float* x, int cols, After activation) {
  auto each = [&](auto function) {
    for (int at = 0; at < cols; at += kPanel) store(x + at, function(load(x + at)));
  };
  switch (activation) {
    case After::kSilu: each([](Floats value) { return silu(value); }); break;
    case After::kGelu: each([](Floats value) { return gelu(value); }); break;
    case After::kExactGelu: {
      int at = 0;
      for (; at + 4 * kPanel <= cols; at += 4 * kPanel) {
        Floats four[4];
        for (int i = 0; i < 4; ++i) four[i] = load(x + at + i * kPanel);
        exact_gelu(four);
        for (int i = 0; i < 4; ++i) store(x + at + i * kPanel, four[i]);
      }
      for (; at < cols; at += kPanel) store(x + at, exact_gelu(load(x + at)));
      break;
    }
    case After::kRelu: each([](Floats value) { return max(value, zeros()); }); break;
    case After::kRelu2:
      each([](Floats value) {
        const Floats positive = max(value, zeros());
        return positive * positive;
      });
      break;
    case After::kSigmoid: each([](Floats value) { return sigmoid(value); }); break;
    case After::kStore:
    case After::kAdd:
    case After::kClampedSilu: break;
  }
}

// Rotates each head's rotated part: its first half against its second half.
static void rotate(float* x, int heads, int dim, int rotated, const float* cosines, const float* sines) {
  const int half = rotated / 2;
  for (int head = 0; head < heads; ++head, x += dim) {
    int i = 0;
    for (; i + kPanel <= half; i += kPanel) {
      const Floats a = load(x + i), b = load(x + half + i), c = load(cosines + i), s = load(sines + i);
      store(x + i, a * c - b * s);
      store(x + half + i, b * c + a * s);
    }
    for (; i < half; ++i) {  // For example, a half of forty is not a multiple of sixteen.
      const float a = x[i], b = x[half + i], c = cosines[i], s = sines[i];
      x[i] = a * c - b * s;
      x[half + i] = b * c + a * s;
    }
  }
}

static void softcap(float* x, int cols, float cap) {
  for (int at = 0; at < cols; at += kPanel) store(x + at, softcapped(load(x + at), cap));
}

// Named differently because matmuls of codes have a `dot` too.
static float float_dot(const float* a, const float* b, int count) {
  Floats sums[4] = {zeros(), zeros(), zeros(), zeros()};
  int at = 0;
  for (; at + 4 * kPanel <= count; at += 4 * kPanel)
    for (int i = 0; i < 4; ++i) sums[i] = madd(sums[i], load(a + at + i * kPanel), load(b + at + i * kPanel));
  for (; at + kPanel <= count; at += kPanel) sums[0] = madd(sums[0], load(a + at), load(b + at));
  float sum = total((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; at < count; ++at) sum = std::fma(a[at], b[at], sum);
  return sum;
}

static void add_scaled(const float* x, float scale, int count, float* out) {
  for (int at = 0; at < count; at += kPanel) store(out + at, madd(load(out + at), load(x + at), scale));
}

static void activate(const float* x, int count, ostro::After after, float* out) {
  for (int at = 0; at < count; at += kPanel)
    store(out + at, gated(after, load(x + 2 * at), load(x + 2 * at + kPanel)));
}

static void weigh(const float* x, int count, float top, float temperature, float* out) {
  const float factor = 1.0f / temperature;
  int at = 0;
  for (; at + kPanel <= count; at += kPanel) store(out + at, exponential((load(x + at) - all(top)) * factor));
  for (; at < count; ++at) out[at] = std::exp((x[at] - top) * factor);
}

}  // namespace OSTRO_ISA
