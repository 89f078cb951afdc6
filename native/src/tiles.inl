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
// Tiles of sums that are computed before they are scaled: stored ones take a while until they can be loaded.
constexpr int kSumsAhead = 8;

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

// Sums of kUnitRows rows. `parts` is how many scales a group has.
template <int parts, bool has_minima>
OSTRO_NOINLINE void unit_sums(const Group<kUnitRows>* group, Weights at, int groups, Floats (&to)[1][kUnitRows]) {
  constexpr int kGroupsAhead = kSumsAhead / parts, kCodes = 8 * kPanel * 4 / parts, kColumns = kGroup / parts;
  alignas(64) int32_t sums[kSumsAhead][kUnitRows][kPanel];
  Floats out[kUnitRows];
  each_lane<kUnitRows>([&]<int row>() OSTRO_BODY { out[row] = zeros(); });
  for (const auto* const end = group + groups; group != end;) {
    const int ahead = std::min(kGroupsAhead, static_cast<int>(end - group));
    auto multiply = [&]<int tile>(int part) OSTRO_BODY {
      Tiles::zero<tile>();
      Tiles::load<2 + tile>(group[part / parts].codes[0] + part % parts * kColumns, kGroup);
      Tiles::load<4 + tile>(at.codes + part * kCodes, kPanel * 4);
      Tiles::dot<tile, 2 + tile, 4 + tile>();
      Tiles::store<tile>(sums[part], kPanel * 4);
    };
    int part = 0;
    for (; part + 2 <= ahead * parts; part += 2) {
      multiply.template operator()<0>(part);
      multiply.template operator()<1>(part + 1);
    }
    if (part < ahead * parts) multiply.template operator()<0>(part);
    at.codes += ahead * parts * kCodes;
    for (int i = 0; i < ahead; ++i, ++group) {
      const Lanes<kUnitRows> scales(group->scale), totals(group->total);
      for (part = 0; part < parts; ++part, at.scales += kPanel) {
        const Floats scale = load(at.scales);
        each_lane<kUnitRows>([&]<int row>() OSTRO_BODY {
          const Floats sum = Tiles::biased<kFloatBits>(sums[i * parts + part][row]);
          const Floats base = load_broadcast<0>(group->base[row]);
          out[row] = madd(out[row], scales.template add<row>(base, sum), scale);
        });
      }
      if constexpr (has_minima) {
        const Floats minimum = load(at.minima);
        at.minima += kPanel;
        each_lane<kUnitRows>([&]<int row>() OSTRO_BODY { out[row] = totals.template add<row>(out[row], minimum); });
      }
    }
  }
  each_lane<kUnitRows>([&]<int row>() OSTRO_BODY { to[0][row] = out[row]; });
}

// Adds the outliers left out of the codes, each row's in column order.
template <int parts>
inline void add_unit_outliers(Floats (&sums)[1][kUnitRows], const Outliers<kUnitRows>& outliers, const Weights& at) {
  alignas(16) static constexpr int8_t one_hot[4][16] = {{1}, {0, 1}, {0, 0, 1}, {0, 0, 0, 1}};
  for (int row = 0; row < kUnitRows; ++row)
    for (const Outlier* next = outliers.at[row]; next->column != kNoColumn; ++next) {
      const int column = next->column;
      const Bytes codes = signed_codes(bytes(at.codes + static_cast<long>(column / 4) * kPanel * 4));
      const Floats code = as_floats(dot<0>(ints(kFloatBits - kInt8Bias), codes, run(one_hot[column % 4])));
      const Floats weight = (code - all(kFloatBase)) * load(at.scales + column * parts / kGroup * kPanel);
      sums[0][row] = madd(sums[0][row], weight, next->value);
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
      for (int i = 0; i < count; ++i) {
        const long before = static_cast<long>(i) * groups * kPanel;
        const Weights weights{from.codes + before * kGroup, reinterpret_cast<const float*>(from.scales) + before * parts,
                              reinterpret_cast<const float*>(from.minima) + before};
        Sums<1, kUnitRows> sums;
        unit_sums<parts, form.has_minima>(tile, weights, groups, sums.at);
        add_unit_outliers<parts>(sums.at, outliers, weights);
        finish(sums, code_factor<form>, after, bias, panel + i, out + row * stride, stride);
      }
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
