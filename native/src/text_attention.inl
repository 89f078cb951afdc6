// Attention within whole texts: every token sees all others, or those that are near on either side. Included once per
// instruction set.
//
// Both products are matmuls of `float_linear.inl`, with keys and values packed into panels first. A token's result depends on
// its text alone.
#pragma once

#include <algorithm>
#include <cmath>

namespace OSTRO_ISA {

// Panels of keys are [dimension][key of P], the last one filled up with zeros; those of values [key][dimension of P].
static void pack_head(int dim, int length, const float* keys, const float* values, long stride, const TextHead& to) {
  float* panel = to.keys;
  for (int key = 0; key < length; key += kPanel, panel += dim * kPanel) {
    const int count = std::min(kPanel, length - key);
    if (count < kPanel) std::fill_n(panel, dim * kPanel, 0.0f);
    for (int i = 0; i < count; ++i)
      for (int d = 0; d < dim; ++d) panel[d * kPanel + i] = keys[(key + i) * stride + d];
  }
  for (int d = 0; d < dim; d += kPanel)
    for (int key = 0; key < length; ++key)
      store(to.values + static_cast<long>(d) * length + key * kPanel, load(values + key * stride + d));
}

// Turns scores [begin, end) into weights, e^((score - best) * scale), and those of whole panels around them into zeros.
// Returns the weights' sum.
inline float weigh_text(float* scores, int begin, int end, int panels_begin, int panels_end, float scale) {
  std::fill(scores + panels_begin, scores + begin, -INFINITY);
  std::fill(scores + end, scores + panels_end, -INFINITY);
  Floats most[2] = {all(-INFINITY), all(-INFINITY)};
  int at = panels_begin;
  for (; at + 2 * kPanel <= panels_end; at += 2 * kPanel)
    for (int i = 0; i < 2; ++i) most[i] = max(most[i], load(scores + at + i * kPanel));
  if (at < panels_end) most[0] = max(most[0], load(scores + at));
  const float factor = scale * 1.44269504f;
  const Floats top = all(-factor * largest(max(most[0], most[1])));
  // The best one's weight is 1, to which those of the scores outside, some 1e-38, add nothing.
  Floats sum = zeros();
  auto weigh = [&]<int count>() {
    Floats some[count];
    for (int i = 0; i < count; ++i) some[i] = madd(top, load(scores + at + i * kPanel), factor);
    raise_two(some);
    for (int i = 0; i < count; ++i) store(scores + at + i * kPanel, some[i]), sum = sum + some[i];
    at += count * kPanel;
  };
  for (at = panels_begin; at + 4 * kPanel <= panels_end;) weigh.template operator()<4>();
  while (at < panels_end) weigh.template operator()<1>();
  std::fill(scores + panels_begin, scores + begin, 0.0f);
  std::fill(scores + end, scores + panels_end, 0.0f);
  return total(sum);
}

static void attend_text(const TextAttention& how, const TextHead& head, int begin, int end, const float* q, long stride,
                        float* out, long out_stride) {
  const int dim = how.dim, length = how.length, reach = how.window ? how.window - 1 : length;
  const long width = text_width(length, kPanel);
  for (int at = begin; at < end; at += kTextRows) {
    const int rows = std::min(kTextRows, end - at);
    // What any of these rows sees.
    const int first = std::max(0, at - reach), last = std::min<long>(length, static_cast<long>(at) + rows + reach);
    const int panels_begin = first / kPanel, panels_end = (last + kPanel - 1) / kPanel;
    FloatTile<float> tile{nullptr, stride, dim, {}, {}, width};
    each_float_tile(panels_begin, panels_end, rows, [&](int panel, int count, int row, int in_tile) {
      tile.x = q + (at + row) * stride;
      set_panels(tile.panels, count, [&](int i) { return head.keys + static_cast<long>(panel + i) * dim * kPanel; });
      set_panels(tile.sums, count, [&](int i) { return head.scores + row * width + (panel + i) * kPanel; });
      multiply_tile(tile, in_tile);
    });
    float shares[kTextRows];
    for (int i = 0; i < rows; ++i) {
      const int from = std::max(0, at + i - reach), to = std::min<long>(length, static_cast<long>(at) + i + reach + 1);
      const float sum =
          weigh_text(head.scores + i * width, from, to, panels_begin * kPanel, panels_end * kPanel, how.scale);
      shares[i] = 1.0f / sum;
    }
    tile.x_stride = width, tile.cols = last - first, tile.sums_stride = out_stride;
    each_float_tile(0, dim / kPanel, rows, [&](int panel, int count, int row, int in_tile) {
      tile.x = head.scores + row * width + first;
      float* to = out + (at + row) * out_stride + panel * kPanel;
      set_panels(tile.panels, count,
                 [&](int i) { return head.values + (static_cast<long>(panel + i) * length + first) * kPanel; });
      set_panels(tile.sums, count, [&](int i) { return to + i * kPanel; });
      multiply_tile(tile, in_tile);
      for (int i = 0; i < in_tile; ++i)
        for (float* each = to + i * out_stride; each < to + i * out_stride + count * kPanel; each += kPanel)
          store(each, load(each) * shares[row + i]);
    });
  }
}

}  // namespace OSTRO_ISA
