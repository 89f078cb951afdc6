// Matmuls of rows of floats with a packed matrix of floats or halves. Included once per instruction set.
//
// A row's result does not depend on the other rows: its columns are added in order, whichever tile computes it.
#pragma once

#include <algorithm>

#include "panels.inl"

namespace OSTRO_ISA {

using namespace ostro;

// The panels that a tile of floats takes at a time: with few rows more of them, so that there are sums enough to hide the
// latency of a multiply-add.
constexpr int kFloatPanels = 4;
constexpr int float_panels(int rows) { return rows <= kWideRows ? kFloatPanels : 2; }

// A tile of a matmul with floats or halves.
template <typename Cell>
struct FloatTile {
  const float* x;
  long x_stride;
  int cols;
  const Cell* panels[kFloatPanels];
  float* sums[kFloatPanels];  // each panel's, of the first row
  long sums_stride;
};

// Columns are added in order.
template <typename Cell, int panels, int rows>
OSTRO_NOINLINE void float_tile(const FloatTile<Cell>& tile) {
  constexpr int count = rows * panels;
  Floats out[count];
  each_lane<count>([&]<int i>() OSTRO_BODY { out[i] = zeros(); });
  const Cell* from[panels];
  for (int i = 0; i < panels; ++i) from[i] = tile.panels[i];
  const float* x = tile.x;
  const long stride = tile.x_stride;
  const int cols = tile.cols;
  int col = 0;
  for (; col + 4 <= cols; col += 4) {
    Lanes<4> four[rows];
    for (int row = 0; row < rows; ++row) four[row] = Lanes<4>(x + row * stride + col);
    each_lane<4>([&]<int at>() OSTRO_BODY {
      Floats weights[panels];
      for (int i = 0; i < panels; ++i) weights[i] = load(from[i] + static_cast<long>(col + at) * kPanel);
      each_lane<count>([&]<int i>() OSTRO_BODY {
        out[i] = four[i / panels].template add<at>(out[i], weights[i % panels]);
      });
    });
  }
  for (; col < cols; ++col) {
    Floats weights[panels];
    for (int i = 0; i < panels; ++i) weights[i] = load(from[i] + static_cast<long>(col) * kPanel);
    each_lane<count>([&]<int i>() OSTRO_BODY {
      out[i] = madd(out[i], weights[i % panels], x[i / panels * stride + col]);
    });
  }
  each_lane<count>([&]<int i>() OSTRO_BODY {
    store(tile.sums[i % panels] + i / panels * tile.sums_stride, out[i]);
  });
}

template <typename Cell, int most = kFloatRows>
inline void multiply_tile(const FloatTile<Cell>& tile, int rows) {
  if constexpr (most > 1)
    if (rows < most) return multiply_tile<Cell, most - 1>(tile, rows);
  float_tile<Cell, float_panels(most), most>(tile);
}

// Splits rows evenly into tiles, and calls body(first panel, panels, first row, rows) for each.
template <typename Body>
inline void each_float_tile(int begin, int end, int rows, const Body& body) {
  const int tiles = (rows + kFloatRows - 1) / kFloatRows;
  for (int panel = begin; panel < end; panel += kFloatPanels)
    for (int tile = 0; tile < tiles; ++tile) {
      const int first = rows * tile / tiles, count = rows * (tile + 1) / tiles - first, most = float_panels(count);
      for (int at = panel; at < std::min(panel + kFloatPanels, end); at += most)
        body(at, std::min(most, end - at), first, count);
    }
}

// Places of `count` panels of a tile; those beyond are the last one's once more.
template <typename Place, typename At>
inline void set_panels(Place (&places)[kFloatPanels], int count, At at) {
  for (int i = 0; i < kFloatPanels; ++i) places[i] = at(std::min(i, count - 1));
}

template <typename Cell>
inline void float_product(const Matrix& matrix, const float* x, long x_stride, int rows, int begin, int end,
                          After after, const float* bias, float* out, long stride) {
  alignas(64) float sums[kFloatRows][kFloatPanels * kPanel];
  FloatTile<Cell> tile{x, x_stride, matrix.cols, {}, {}, kFloatPanels * kPanel};
  each_float_tile(begin, end, rows, [&](int panel, int count, int row, int in_tile) {
    tile.x = x + row * x_stride;
    const auto* cells = reinterpret_cast<const Cell*>(matrix.data) + static_cast<long>(panel) * matrix.cols * kPanel;
    set_panels(tile.panels, count, [&](int i) { return cells + static_cast<long>(i) * matrix.cols * kPanel; });
    set_panels(tile.sums, count, [&](int i) { return sums[0] + i * kPanel; });
    multiply_tile(tile, in_tile);
    each_panels(0, count, [&]<int panels>(int first) {
      for (int i = 0; i < in_tile; ++i) {
        Sums<panels, 1> found;
        for (int at = 0; at < panels; ++at) found.at[at][0] = load(sums[i] + (first + at) * kPanel);
        finish(found, 1.0f, after, bias, panel + first, out + (row + i) * stride, stride);
      }
    });
  });
}

}  // namespace OSTRO_ISA
