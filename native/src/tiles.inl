// Matmuls of many rows on a unit that multiplies matrices of bytes, sixteen rows by sixteen (AMX). Included once per
// instruction set with panels of that width, after a `Tiles` with the unit's operations.
//
// The unit only adds up integers, which is exact. The sums of a group are scaled and added as in linear.inl, so that a row
// has the same bits there and here.
#pragma once

#include <algorithm>
#include <iterator>

#include "panels.inl"

namespace OSTRO_ISA {

constexpr int kUnitRows = 16;
static_assert(kPanel == 16);
// Panels that a tile of activations is loaded for once; and sums of each that the unit computes while as many before them
// are scaled. Few: two threads of a core share the cache that they wait in.
constexpr int kUnitPanels = 2, kSumsAhead = 2;

// The unit takes signed bytes: eight-bit codes are stored as such, narrow ones unpacked first.
template <Form form>
Place unpack_signed(const Place& from, int groups, uint8_t* scratch) {
  if constexpr (form.is_narrow()) return unpack<form, 0>(from, groups, scratch);
  else return unpack_numbers<form>(from, groups, scratch);
}

// A panel's weights: signed bytes, and floats.
struct Weights {
  const uint8_t* codes;
  const float* scales;
  const float* minima;
};

// What the unit adds up for one scale.
struct alignas(64) UnitSums {
  int32_t at[kUnitRows][kPanel];
};

// Adds sums, scaled.
template <int parts, bool has_minima>
OSTRO_INLINE void add_unit_sums(Floats (&to)[kUnitRows], const UnitSums* sums, const Group<kUnitRows>* group,
                                const float* scales, const float* minima, int groups) {
  Floats out[kUnitRows];
  each_lane<kUnitRows>([&]<int row>() OSTRO_BODY { out[row] = to[row]; });
  for (; groups; --groups, ++group) {
    for (int part = 0; part < parts; ++part, ++sums, scales += kPanel) {
      const Floats scale = load(scales);
      each_lane<kUnitRows>([&]<int row>() OSTRO_BODY {
        out[row] = madd(out[row], Tiles::scaled(sums->at[row], group->scale[row]), scale);
      });
    }
    if constexpr (has_minima) {
      const Floats minimum = load(minima);
      minima += kPanel;
      each_lane<kUnitRows>([&]<int row>() OSTRO_BODY { out[row] = madd(out[row], minimum, group->total[row]); });
    }
  }
  each_lane<kUnitRows>([&]<int row>() OSTRO_BODY { to[row] = out[row]; });
}

// Sums of a tile of rows with some panels. Stored tiles take a while until they can be loaded: the unit is ahead by
// kSumsAhead sums of each panel. `parts` is how many scales a group has.
template <int parts, bool has_minima, int panels>
OSTRO_NOINLINE void unit_sums(const Group<kUnitRows>* rows, const Weights (&weights)[panels], int groups,
                              Floats (&to)[panels][kUnitRows]) {
  constexpr int ahead = kSumsAhead / parts, codes = 8 * kPanel * 4 / parts, columns = kGroup / parts;
  UnitSums sums[2][panels][kSumsAhead];
  auto multiply = [&](int first, int i, auto& block) OSTRO_BODY {
    const int group = first + i / parts, part = i % parts;
    if (group >= groups) return;
    Tiles::load<2>(rows[group].codes[0] + part * columns, kGroup);
    each_lane<panels>([&]<int panel>() OSTRO_BODY {
      Tiles::load<4 + panel>(weights[panel].codes + (group * parts + part) * codes, kPanel * 4);
    });
    each_lane<panels>([&]<int panel>() OSTRO_BODY {
      Tiles::zero<panel>();
      Tiles::dot<panel, 2, 4 + panel>();
    });
    each_lane<panels>([&]<int panel>() OSTRO_BODY { Tiles::store<panel>(block[panel][i].at, kPanel * 4); });
  };
  for (int i = 0; i < kSumsAhead; ++i) multiply(0, i, sums[0]);
  for (int first = 0, now = 0; first < groups; first += ahead, now ^= 1) {
    const int count = std::min(ahead, groups - first);
    for (int i = 0; i < std::max(kSumsAhead, panels); ++i) {
      if (i < kSumsAhead) multiply(first + ahead, i, sums[now ^ 1]);
      if (i < panels)
        add_unit_sums<parts, has_minima>(to[i], sums[now][i], rows + first, weights[i].scales + first * parts * kPanel,
                                         weights[i].minima + first * kPanel, count);
    }
  }
}

// Adds the outliers left out of the codes, each row's in column order.
template <int parts, int panels>
inline void add_unit_outliers(Floats (&sums)[panels][kUnitRows], const Outliers<kUnitRows>& outliers,
                              const Weights (&weights)[panels]) {
  alignas(16) static constexpr int8_t one_hot[4][16] = {{1}, {0, 1}, {0, 0, 1}, {0, 0, 0, 1}};
  for (int row = 0; row < kUnitRows; ++row)
    for (const Outlier* next = outliers.at[row]; next->column != kNoColumn; ++next)
      for (int panel = 0; panel < panels; ++panel) {
        const Weights& at = weights[panel];
        const int column = next->column;
        const Bytes codes = signed_codes(bytes(at.codes + static_cast<long>(column / 4) * kPanel * 4));
        const Floats code = as_floats(dot<0>(ints(kFloatBits - kInt8Bias), codes, run(one_hot[column % 4])));
        const Floats weight = (code - all(kFloatBase)) * load(at.scales + column * parts / kGroup * kPanel);
        sums[panel][row] = madd(sums[panel][row], weight, next->value);
      }
}

// A matmul of whole tiles of rows with panels [begin, end).
template <Form form>
void multiply_tiles(const Matrix& matrix, const uint8_t* x, int rows, int begin, int end, After after, const float* bias,
                    float* out, long stride, uint8_t* scratch) {
  constexpr int parts = form.per_group();
  const int groups = matrix.cols / kGroup, most = unpacked_panels(kPanel, matrix.cols);
  const Place all{matrix.data, matrix.scale_data, matrix.minimum_data};
  Tiles::configure(kUnitRows, kGroup / parts);
  for (int panel = begin, count; panel < end; panel += count) {
    count = std::min(most, end - panel);
    const Place from = unpack_signed<form>(all.after<form>(panel * groups), count * groups, scratch);
    for (int row = 0; row < rows; row += kUnitRows) {
      const auto* tile = reinterpret_cast<const Group<kUnitRows>*>(x + row * row_bytes(matrix.cols));
      const auto& outliers = *reinterpret_cast<const Outliers<kUnitRows>*>(tile + groups);
      each_panels<kUnitPanels>(0, count, [&]<int panels>(int first) {
        Weights weights[panels];
        Sums<panels, kUnitRows> sums;
        for (int i = 0; i < panels; ++i) {
          const long before = static_cast<long>(first + i) * groups * kPanel;
          weights[i] = {from.codes + before * kGroup, reinterpret_cast<const float*>(from.scales) + before * parts,
                        reinterpret_cast<const float*>(from.minima) + before};
          for (Floats& sum : sums.at[i]) sum = zeros();
        }
        unit_sums<parts, form.has_minima>(tile, weights, groups, sums.at);
        add_unit_outliers<parts>(sums.at, outliers, weights);
        finish(sums, code_factor<form>, after, bias, panel + first, out + row * stride, stride);
      });
    }
  }
  Tiles::release();
}

// With fewer rows, unpacking takes longer than the unit saves.
constexpr int kLeastRows = 32;
// Rows beyond whole tiles, and floats, are left to `others`.
constexpr int in_tiles(int rows) { return rows < kLeastRows ? 0 : rows / kUnitRows * kUnitRows; }

template <const Kernels& others>
void quantize_for_tiles(const float* x, int row, int rows, int cols, uint8_t* to) {
  const int whole = in_tiles(rows);
  if (row >= whole) return others.quantize(x, row - whole, rows - whole, cols, to + whole * row_bytes(cols));
  quantize_in_tile<kUnitRows>(x, row % kUnitRows, cols, to + row / kUnitRows * kUnitRows * row_bytes(cols));
}

template <const Kernels& others>
void linear_by_tiles(const Matrix& matrix, const void* x, long x_stride, int rows, int begin, int end, After after,
                     const float* bias, float* out, long stride, uint8_t* scratch) {
  const auto* codes = static_cast<const uint8_t*>(x);
  const int whole = matrix.form().is_float() ? 0 : in_tiles(rows);
  if (whole)
    each_lane<std::size(kForms)>([&]<int i>() {
      if constexpr (!kForms[i].is_float())
        if (matrix.form() == kForms[i])
          multiply_tiles<kForms[i]>(matrix, codes, whole, begin, end, after, bias, out, stride, scratch);
    });
  if (whole < rows)
    others.linear(matrix, codes + whole * row_bytes(matrix.cols), x_stride, rows - whole, begin, end, after, bias,
                  out + whole * stride, stride, scratch);
}

// With the unit where there are rows enough, and otherwise as another table has it.
template <const Kernels& others>
constexpr TiledMatmuls tiled_matmuls(const char* name, bool (*runs_here)()) {
  return {name, runs_here, quantize_for_tiles<others>, linear_by_tiles<others>};
}

}  // namespace OSTRO_ISA
