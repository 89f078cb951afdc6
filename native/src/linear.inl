// Matmuls of quantized rows with a packed matrix of codes. Included once per instruction set, in a file of their own: they
// take longest to compile.
//
// A row's result does not depend on the other rows: whichever tile computes it does the same arithmetic in the same
// order. Integer sums within a group are exact; groups are scaled and added in turn, by fused multiply-adds.
#pragma once

#include <algorithm>
#include <iterator>

#include "panels.inl"

namespace OSTRO_ISA {

using namespace ostro;

// From this many rows on, panels of narrow codes are unpacked first, once for all rows; earlier those that take longer.
template <Form form>
constexpr int many_rows = form.high_bits() || form.codes == kFloat4 ? std::min(4 * kTileRows, 24) : 24;
// Size of the block of rows that panels are multiplied with at a time.
constexpr long kBlockBytes = 32 << 10;
constexpr int kLeastBlock = 16;

template <Form form, int half, int panels, int rows>
OSTRO_INLINE void half_sums(Ints (&sums)[panels][rows], const Group<rows>& group, const uint8_t* codes,
                            long panel_bytes) {
  Run x[rows];
  for (int row = 0; row < rows; ++row) x[row] = run(group.codes[row] + 16 * half);
  each_lane<4>([&]<int at>() OSTRO_BODY {
    for (int panel = 0; panel < panels; ++panel) {
      const Bytes w = step_codes<form, half, at>(codes + panel * panel_bytes);
      for (int row = 0; row < rows; ++row) sums[panel][row] = dot<at>(sums[panel][row], w, x[row]);
    }
  });
}

// Adds integer sums, scaled by those numbers.
template <Form form, int panels, int rows>
OSTRO_INLINE void add_sums(Floats (&out)[panels][rows], const Ints (&sums)[panels][rows], const Group<rows>& group,
                           const uint8_t* scales, const Floats (&halves)[panels], long panel_bytes) {
  const Lanes<rows> row_scales(group.scale);
  each_lane<panels>([&]<int panel>() OSTRO_BODY {
    const Floats scale = load_numbers<form>(scales + panel * panel_bytes, halves[panel]);
    each_lane<rows>([&]<int row>() OSTRO_BODY {
      const Floats base = load_broadcast<panel>(group.base[row]);
      const Floats sum = row_scales.template add<row>(base, as_floats(sums[panel][row]));
      out[panel][row] = madd(out[panel][row], sum, scale);
    });
  });
}

// If dot products need unsigned codes, sums start negative to compensate. `part` is that of the group that they are of:
// -1 for all of it, or a half.
template <Form form, int part, int panels, int rows>
OSTRO_INLINE void start(Ints (&sums)[panels][rows], const Group<rows>& group) {
  constexpr int bias = code_bias<form>;
  each_lane<panels * rows>([&]<int i>() OSTRO_BODY {
    constexpr int row = i % rows;
    auto& sum = sums[i / rows][row];
    if constexpr (bias) {
      const int codes = part == 0 ? group.half[row] : part == 1 ? group.sum[row] - group.half[row] : group.sum[row];
      sum = ints(kFloatBits - bias * codes);
    } else {
      sum = fresh_ints<kFloatBits, i>(&group);
    }
  });
}

OSTRO_INLINE void fetch_bytes(const void* from, long size) {
  for (long line = 0; line < size; line += 64) fetch(static_cast<const uint8_t*>(from) + line);
}

// With few rows, there is little work per byte, and memory is the bottleneck: prefetch groups kAhead bytes ahead, beyond
// the end of these panels those of the next. `left` is how many groups are left of each panel's.
template <Form form, int panels>
OSTRO_INLINE void fetch_ahead(const Place& at, long left, int groups) {
  constexpr int ahead = kAhead / code_bytes<form>, numbers = number_step<form> * form.per_group();
  const int first = left > ahead ? ahead : ahead + (panels - 1) * groups;
  for (int panel = 0; panel < panels; ++panel) {
    const Place group = at.after<form>(first + panel * groups);
    fetch_bytes(group.codes, code_bytes<form>);
    fetch_bytes(group.scales, numbers);
    if constexpr (form.has_minima) fetch_bytes(group.minima, numbers);
  }
}

// A group's part of a tile. `scales` and `minima` are the halves of its block.
template <Form form, int panels, int rows>
OSTRO_INLINE void add_group(Floats (&out)[panels][rows], const Group<rows>& group, const Place& at, int groups,
                            const Floats (&scales)[panels], const Floats (&minima)[panels]) {
  const long panel_codes = static_cast<long>(groups) * code_bytes<form>;
  const long panel_numbers = static_cast<long>(groups) * number_bytes<form>;
  if constexpr (form.per_group() == 1) {
    Ints sums[panels][rows];
    start<form, -1>(sums, group);
    half_sums<form, 0>(sums, group, at.codes, panel_codes);
    half_sums<form, 1>(sums, group, at.codes, panel_codes);
    add_sums<form>(out, sums, group, at.scales, scales, panel_numbers);
  } else {
    each_lane<2>([&]<int half>() OSTRO_BODY {
      Ints sums[panels][rows];
      start<form, half>(sums, group);
      half_sums<form, half>(sums, group, at.codes, panel_codes);
      add_sums<form>(out, sums, group, at.scales + half * number_step<form>, scales, panel_numbers);
    });
  }
  if constexpr (form.has_minima) {
    const Lanes<rows> totals(group.total);
    for (int panel = 0; panel < panels; ++panel) {
      const Floats minimum = load_numbers<form>(at.minima + panel * panel_numbers, minima[panel]);
      each_lane<rows>([&]<int row>() OSTRO_BODY {
        out[panel][row] = totals.template add<row>(out[panel][row], minimum);
      });
    }
  }
}

// `is_first` says whether these panels are read for the first time, from memory.
template <Form form, int panels, int rows>
OSTRO_INLINE void integer_tile(const uint8_t* x, Place at, int groups, bool is_first, Floats (*to)[rows]) {
  const auto* group = reinterpret_cast<const Group<rows>*>(x);
  const long panel_numbers = static_cast<long>(groups) * number_bytes<form>;
  Floats out[panels][rows];
  for (auto& panel : out)
    for (auto& value : panel) value = zeros();
  for (const auto* end = group + groups; group != end;) {
    Floats scales[panels], minima[panels];
    for (int panel = 0; panel < panels; ++panel) {
      scales[panel] = load_halves<form>(at.scales + panel * panel_numbers);
      if constexpr (form.has_minima) minima[panel] = load_halves<form>(at.minima + panel * panel_numbers);
    }
    at.scales += halves_step<form>;
    at.minima += halves_step<form>;
    for (int i = 0; i < block_groups<form>; ++i, ++group) {
      if constexpr (form.codes >= 0)
        if (rows == 1 || is_first) fetch_ahead<form, panels>(at, end - group, groups);
      add_group<form>(out, *group, at, groups, scales, minima);
      at.codes += code_bytes<form>;
      at.scales += number_step<form> * form.per_group();
      at.minima += number_step<form>;
    }
  }
  keep_sums(out, to);
}

// One column of some panels' weights, without minima. Rarely needed: not inlined into every tile.
template <Form form, int panels>
OSTRO_NOINLINE void column_weights(Place at, int groups, int column, Floats (&weights)[panels]) {
  alignas(16) static constexpr int8_t one_hot[4][16] = {{1}, {0, 1}, {0, 0, 1}, {0, 0, 0, 1}};
  const int group = column / kGroup, step = column % kGroup / 4;
  const int index = form.per_group() == 2 ? column / (kGroup / 2) : group;
  at.codes += static_cast<long>(group) * code_bytes<form>;
  const Run one = run(one_hot[column % 4]);
  each_lane<8>([&]<int each>() {
    if (each != step) return;
    for (Floats& weight : weights) {
      const Bytes codes = step_codes<form, each / 4, each % 4>(at.codes);
      const Ints sum = dot<0>(ints(kFloatBits - code_bias<form>), codes, one);
      weight = (as_floats(sum) - all(kFloatBase)) * numbers_at<form>(at.scales, index);
      at = at.after<form>(groups);
    }
  });
}

// Adds the outliers left out of the codes. Each row adds its own in column order, whatever tile it is in; columns are
// looked up once, because rows often have outliers in the same ones.
template <Form form, int panels, int rows>
OSTRO_INLINE void add_outliers(Sums<panels, rows>& sums, const Outliers<rows>& outliers, const Place& at, int groups) {
  const Outlier* next[rows];
  for (int row = 0; row < rows; ++row) next[row] = outliers.at[row];
  for (;;) {
    int column = kNoColumn;
    for (const Outlier* each : next) column = std::min(column, each->column);
    if (column == kNoColumn) return;
    Floats weights[panels];
    column_weights<form>(at, groups, column, weights);
    for (int row = 0; row < rows; ++row) {
      if (next[row]->column != column) continue;
      const float value = next[row]++->value;
      for (int panel = 0; panel < panels; ++panel) {
        Floats& sum = sums.at[panel][row];
        sum = madd(sum, weights[panel], value);
      }
    }
  }
}

// Rows of activations, and what becomes of their products with a matrix.
struct Product {
  const uint8_t* x;
  int rows, groups;
  float factor;
  After after;
  const float* bias;
  float* out;
  long stride;

  long row_bytes() const { return OSTRO_ISA::row_bytes(groups * kGroup); }

  // Some panels with all rows. A block of rows stays in the L1 cache, if they are short, while panels stream past.
  template <Form form>
  void columns(const Place& at, int panel, int count) const {
    const int block = std::max(static_cast<int>(kBlockBytes / row_bytes()), kLeastBlock) / kTileRows * kTileRows;
    for (int first = 0; first < rows; first += block) {
      each_panels(0, count, [&]<int panels>(int i) {
        each_tile(
            std::min(first + block, rows),
            [&](auto tile, int row) { compute<form, panels, tile>(at.after<form>(i * groups), panel + i, row); },
            first);
      });
    }
  }

  // A tile: not inlined, so that the compiler has all registers for it.
  template <Form form, int panels, int count>
  OSTRO_NOINLINE void compute(const Place& at, int panel, int row) const {
    const uint8_t* tile = x + row * row_bytes();
    Sums<panels, count> sums;
    // With one row, two panels hide the latency of dot products, but one is read sequentially: machines differ.
    constexpr int together = std::min(panels, count == 1 ? kOneRowPanels : kTileSums / count);
    for (int i = 0; i < panels; i += together)
      integer_tile<form, together, count>(tile, at.after<form>(i * groups), groups, row == 0, sums.at + i);
    const auto& outliers = *reinterpret_cast<const Outliers<count>*>(tile + groups * sizeof(Group<count>));
    add_outliers<form>(sums, outliers, at, groups);
    finish(sums, factor, after, bias, panel, out + row * stride, stride);
  }
};

// A matmul, panel by panel, and within these tile by tile.
template <Form form>
void multiply(const Matrix& matrix, const Product& product, int begin, int end, uint8_t* scratch) {
  const int most = unpacked_panels(kPanel, matrix.cols);
  const Place all{matrix.data, matrix.scale_data, matrix.minimum_data};
  for (int panel = begin, count; panel < end; panel += count) {
    count = std::min(most, end - panel);
    const Place from = all.after<form>(panel * product.groups);
    if constexpr (form.is_narrow())
      if (product.rows >= many_rows<form>) {
        constexpr Form spread = unpacked(form);
        const Place place = unpack<form, code_bias<spread>>(from, count * product.groups, scratch);
        product.columns<spread>(place, panel, count);
        continue;
      }
    product.columns<form>(from, panel, count);
  }
}

void multiply_codes(const Matrix& matrix, const uint8_t* x, int rows, int begin, int end, After after, const float* bias,
                    float* out, long stride, uint8_t* scratch) {
  each_lane<std::size(kForms)>([&]<int i>() {
    constexpr Form form = kForms[i];
    if constexpr (!form.is_float())
      if (matrix.form() == form) {
        const Product product{x, rows, matrix.cols / kGroup, code_factor<form>, after, bias, out, stride};
        multiply<form>(matrix, product, begin, end, scratch);
      }
  });
}

}  // namespace OSTRO_ISA
