// Matmul and GEMV of a packed matrix with rows of activations. Included once per instruction set.
//
// A row's result does not depend on the other rows: whichever tile computes it does the same arithmetic in the same
// order. Integer sums within a group are exact; groups are scaled and added in turn, by fused multiply-adds.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>
#include <utility>

#include "format.h"
#include "kernels.h"
#include "broadcast.inl"

namespace OSTRO_ISA {

using namespace ostro;

inline void fetch(const void* from) {
#if !defined(_MSC_VER)
  __builtin_prefetch(from);
#endif
}

// Integer sums start at the bit pattern of 1.5 * 2^23, so that reinterpreted as a float they are 1.5 * 2^23 + sum. No
// sum of a group (32 * 127 * 128) leaves the range in which that is exact. When it is multiplied by a scale, the same
// fused multiply-add subtracts the 1.5 * 2^23; with scales of 22 bits, that is exact as well.
constexpr int32_t kFloatBits = 0x4B400000;
constexpr uint32_t kScaleBits = ~3u;

// From this many rows on, four-bit panels are unpacked first, once for all rows.
constexpr int kManyRows = 24;
// Size of the block of rows that panels are multiplied with at a time.
constexpr long kBlockBytes = 32 << 10;
constexpr int kLeastBlock = 16;

// One group of a tile of rows, as written by `quantize`.
template <int rows>
struct Group {
  Broadcast base[rows];  // -kFloatBase times the scale
  int8_t codes[rows][kGroup];
  float scale[rows];
  float total[rows];  // of the group's activations after rounding, including its outlier
  int32_t sum[rows];  // of their codes
};

// An outlier would set a scale that rounds the rest of its group away. It stays a float, and its code is zero.
struct Outlier {
  int32_t column;
  int32_t row;  // within the tile
  float value;
};

// Rounding noise grows with the square of a group's largest activation. An outlier is one whose removal reduces the
// noise of its whole row by more than 1 / kMostOutliers; so a row has fewer of them than that.
constexpr int kMostOutliers = 10;

// A tile's outliers, stored after its groups: by column, because rows often have outliers in the same columns.
template <int rows>
struct Outliers {
  int32_t count;
  Outlier at[rows * kMostOutliers];

  void insert(const Outlier& outlier) {
    int i = count++;
    for (; i > 0 && at[i - 1].column > outlier.column; --i) at[i] = at[i - 1];
    at[i] = outlier;
  }
};

constexpr long kGroupBytes = sizeof(Group<1>);
constexpr long kOutlierBytes = (sizeof(Outliers<1>) + 15) / 16 * 16;
constexpr long row_bytes(int cols) { return cols / kGroup * kGroupBytes + kOutlierBytes; }
static_assert(sizeof(Group<kTileRows>) <= kTileRows * kGroupBytes);

#if !defined(OSTRO_HAS_QUANTIZE)
// The largest absolute value of kGroup activations.
inline float group_peak(const float* from) {
  Floats most = zeros();
  for (int i = 0; i < kGroup; i += kPanel) most = max(most, abs(load(from + i)));
  return largest(most);
}

// Quantizes them such that 127 stands for `peak`. Returns the sum of the codes.
inline int32_t quantize_group(const float* from, float peak, int8_t* codes) {
  const float inverse = peak > 0.0f ? 127.0f / peak : 0.0f;
  for (int i = 0; i < kGroup; i += kPanel) store_rounded(codes + i, load(from + i) * all(inverse));
  int32_t sum = 0;
  for (int i = 0; i < kGroup; ++i) sum += codes[i];
  return sum;
}
#endif

// Removes a group's largest activation if it is an outlier in a row with this much noise; `peak` becomes the largest of
// the others. Returns its index, or -1.
inline int take_outlier(const float* from, float noise, float& peak) {
  constexpr float parts = kMostOutliers;
  if (!(peak * peak * parts > noise)) return -1;
  int index = 0;
  while (index < kGroup && std::fabs(from[index]) != peak) ++index;
  if (index == kGroup) return -1;
  float others[kGroup];
  std::copy_n(from, kGroup, others);
  others[index] = 0.0f;
  const float next = group_peak(others);
  if (!((peak * peak - next * next) * parts > noise)) return -1;
  peak = next;
  return index;
}

template <int rows>
inline void quantize_row(const float* x, int row, int cols, Group<rows>* groups, Outliers<rows>& outliers) {
  float noise = 0.0f;
  auto* group = groups;
  for (int at = 0; at < cols; at += kGroup, ++group) {
    const float peak = group_peak(x + at);
    group->scale[row] = peak;
    noise += peak * peak;
  }
  group = groups;
  for (int at = 0; at < cols; at += kGroup, ++group) {
    float peak = group->scale[row];
    const int outlier = take_outlier(x + at, noise, peak);
    int32_t sum = quantize_group(x + at, peak, group->codes[row]);
    float apart = 0.0f;
    if (outlier >= 0) {
      apart = x[at + outlier];
      outliers.insert({at + outlier, row, apart});
      sum -= std::exchange(group->codes[row][outlier], int8_t{0});
    }
    const float scale = std::bit_cast<float>(std::bit_cast<uint32_t>(peak * (1.0f / 127.0f)) & kScaleBits);
    group->base[row] = broadcast(-kFloatBase * scale);
    group->scale[row] = scale;
    group->sum[row] = sum;
    group->total[row] = scale * static_cast<float>(sum) + apart;
  }
}

template <int rows>
inline void quantize_tile(const float* x, long stride, int cols, uint8_t* to) {
  auto* groups = reinterpret_cast<Group<rows>*>(to);
  auto& outliers = *reinterpret_cast<Outliers<rows>*>(groups + cols / kGroup);
  outliers.count = 0;
  for (int row = 0; row < rows; ++row) quantize_row(x + row * stride, row, cols, groups, outliers);
}

// Calls body(rows of the tile, first row) for tiles of kTileRows, then repeatedly for 1 / kTileShrink as many, down to
// one.
template <int size = kTileRows, typename Body>
inline void each_tile(int rows, Body body, int row = 0) {
  for (; row + size <= rows; row += size) body(std::integral_constant<int, size>{}, row);
  if constexpr (size > 1)
    if (row < rows) each_tile<std::max(size / kTileShrink, 1)>(rows, body, row);
}

// Calls body.operator()<panels>(first panel) for kTilePanels panels at a time, then repeatedly for half as many.
template <int size = kTilePanels, typename Body>
inline void each_panels(int begin, int end, const Body& body) {
  for (; begin + size <= end; begin += size) body.template operator()<size>(begin);
  if constexpr (size > 1)
    if (begin < end) each_panels<size / 2>(begin, end, body);
}

static void quantize(const float* x, long stride, int rows, int cols, uint8_t* to) {
  each_tile(rows, [&](auto tile, int row) {
    quantize_tile<tile>(x + row * stride, stride, cols, to + row * row_bytes(cols));
  });
}

template <int panels, int rows>
struct Sums {
  Floats at[panels][rows];
};

// During summation, sums are in a local array that nothing points to, so they stay in registers.
template <int panels, int rows>
OSTRO_INLINE void keep_sums(const Floats (&sums)[panels][rows], Floats (*to)[rows]) {
  for (int panel = 0; panel < panels; ++panel)
    for (int row = 0; row < rows; ++row) to[panel][row] = sums[panel][row];
}

// Post-processes and stores a tile's sums.
template <int panels, int rows>
inline void finish(const Sums<panels, rows>& sums, float factor, After after, const float* bias, int panel, float* out,
                   long stride) {
  for (int row = 0; row < rows; ++row) {
    Floats value[panels];
    for (int i = 0; i < panels; ++i) {
      value[i] = sums.at[i][row] * factor;
      if (bias) value[i] = value[i] + load(bias + (panel + i) * kPanel);
    }
    float* to = out + row * stride;
    if (has_gates(after)) {
      for (int i = 0; i + 1 < panels; i += 2)
        store(to + (panel + i) / 2 * kPanel, gated(after, value[i], value[i + 1]));
      continue;
    }
    for (int i = 0; i < panels; ++i) {
      float* at = to + (panel + i) * kPanel;
      store(at, after == After::kAdd ? load(at) + value[i] : value[i]);
    }
  }
}

// Location of a group in consecutive panels of equal length.
template <typename Scale>
struct Place {
  const uint8_t* codes;
  const Scale* scales;
  const Scale* minima;

  template <int code_bytes, int scales_each>
  Place after(int groups) const {
    return {codes + static_cast<long>(groups) * code_bytes, scales + groups * scales_each, minima + groups * kPanel};
  }
};

// Marks codes written by `spread_codes`, ready for dot products.
constexpr int kSpread = -1;

template <int kind>
constexpr int code_bytes = (kind == kInt4 || kind == kUnsigned4 ? 4 : 8) * kPanel * 4;

// A step's codes in the form that dot products take.
template <int kind>
inline Bytes step_codes(const uint8_t* codes, int half, int step) {
  if constexpr (kind == kInt4 || kind == kUnsigned4) {
    const Bytes both = bytes(codes + step * kPanel * 4);
    if constexpr (kind == kInt4) return half ? high_signed(both) : low_signed(both);
    else return half ? high_unsigned(both) : low_unsigned(both);
  } else {
    const Bytes eight = bytes(codes + (4 * half + step) * kPanel * 4);
    return kind == kSpread ? eight : signed_codes(eight);
  }
}

template <int kind, int half, int panels, int rows>
OSTRO_INLINE void half_sums(Ints (&sums)[panels][rows], const Group<rows>& group, const uint8_t* codes,
                            long panel_bytes) {
  Run x[rows];
  for (int row = 0; row < rows; ++row) x[row] = run(group.codes[row] + 16 * half);
  each_lane<4>([&]<int at>() OSTRO_BODY {
    for (int panel = 0; panel < panels; ++panel) {
      const Bytes w = step_codes<kind>(codes + panel * panel_bytes, half, at);
      for (int row = 0; row < rows; ++row) sums[panel][row] = dot<at>(sums[panel][row], w, x[row]);
    }
  });
}

// Adds a group's scaled integer sums.
template <int panels, int rows, typename Scale>
OSTRO_INLINE void add_sums(Floats (&out)[panels][rows], const Ints (&sums)[panels][rows], const Group<rows>& group,
                           const Scale* scales, long panel_scales) {
  const Lanes<rows> row_scales(group.scale);
  each_lane<panels>([&]<int panel>() OSTRO_BODY {
    const Floats scale = load(scales + panel * panel_scales);
    each_lane<rows>([&]<int row>() OSTRO_BODY {
      const Floats base = load_broadcast<panel>(group.base[row]);
      const Floats sum = row_scales.template add<row>(base, as_floats(sums[panel][row]));
      out[panel][row] = madd(out[panel][row], sum, scale);
    });
  });
}

// What dot products of unsigned codes add per unit of an activation's code.
template <int kind>
constexpr int code_bias = kind == kUnsigned4 ? 0
                          : kind == kInt4    ? kInt4Bias
                                             : kInt8Bias;

// If dot products need unsigned codes, sums start negative to compensate.
template <int kind, int panels, int rows>
OSTRO_INLINE void start(Ints (&sums)[panels][rows], const Group<rows>& group) {
  constexpr int bias = code_bias<kind>;
  each_lane<panels * rows>([&]<int i>() OSTRO_BODY {
    auto& sum = sums[i / rows][i % rows];
    if constexpr (bias) sum = ints(kFloatBits - bias * group.sum[i % rows]);
    else sum = fresh_ints<kFloatBits, i>(&group);
  });
}

// With one row, there is little work per byte, and memory is the bottleneck: prefetch this many bytes ahead.
constexpr int kAhead = 1024;

template <int stored, typename Scale>
OSTRO_INLINE void fetch_ahead(const Place<Scale>& at, bool minima) {
  for (int line = 0; line < code_bytes<stored>; line += 64) fetch(at.codes + kAhead + line);
  fetch(reinterpret_cast<const uint8_t*>(at.scales) + kAhead / 4);
  if (minima) fetch(reinterpret_cast<const uint8_t*>(at.minima) + kAhead / 4);
}

// `stored` is the codes' form there: packed, or spread.
template <int kind, int stored, bool minima, int panels, int rows, typename Scale>
OSTRO_INLINE void integer_tile(const uint8_t* x, Place<Scale> at, int groups, Floats (*to)[rows]) {
  const auto* group = reinterpret_cast<const Group<rows>*>(x);
  const long panel_codes = groups * code_bytes<stored>, panel_scales = groups * kPanel;
  Floats out[panels][rows];
  for (auto& panel : out)
    for (auto& value : panel) value = zeros();
  for (const auto* end = group + groups; group != end; ++group) {
    if constexpr (rows == 1 && stored != kSpread) fetch_ahead<stored>(at, minima);
    Ints sums[panels][rows];
    start<kind>(sums, *group);
    half_sums<stored, 0>(sums, *group, at.codes, panel_codes);
    half_sums<stored, 1>(sums, *group, at.codes, panel_codes);
    add_sums(out, sums, *group, at.scales, panel_scales);
    at.codes += code_bytes<stored>;
    at.scales += kPanel;
    if constexpr (minima) {
      const Lanes<rows> totals(group->total);
      for (int panel = 0; panel < panels; ++panel) {
        const Floats minimum = load(at.minima + panel * panel_scales);
        each_lane<rows>([&]<int row>() OSTRO_BODY {
          out[panel][row] = totals.template add<row>(out[panel][row], minimum);
        });
      }
      at.minima += kPanel;
    }
  }
  keep_sums(out, to);
}

// For codes with a scale per half group.
template <int panels, int rows, typename Scale>
OSTRO_INLINE void halves_tile(const uint8_t* x, Place<Scale> at, int groups, Floats (*to)[rows]) {
  const auto* group = reinterpret_cast<const Group<rows>*>(x);
  const long panel_codes = groups * code_bytes<kInt8>, panel_scales = 2 * groups * kPanel;
  Floats out[panels][rows];
  for (auto& panel : out)
    for (auto& value : panel) value = zeros();
  for (const auto* end = group + groups; group != end; ++group) {
    auto each = [&]<int half>() OSTRO_BODY {
      Ints sums[panels][rows];
      for (int row = 0; row < rows; ++row) {
        int sum = 0;
        if constexpr (kInt8Bias != 0)
          for (int i = 0; i < 16; ++i) sum += group->codes[row][16 * half + i];
        for (int panel = 0; panel < panels; ++panel) sums[panel][row] = ints(kFloatBits - kInt8Bias * sum);
      }
      half_sums<kInt8, half>(sums, *group, at.codes, panel_codes);
      add_sums(out, sums, *group, at.scales + half * kPanel, panel_scales);
    };
    each.template operator()<0>();
    each.template operator()<1>();
    at.codes += code_bytes<kInt8>;
    at.scales += 2 * kPanel;
  }
  keep_sums(out, to);
}

// One column of a panel's weights, without minima.
template <int kind, int stored, typename Scale>
OSTRO_INLINE Floats column_weights(const Place<Scale>& at, int column) {
  alignas(16) static constexpr int8_t one_hot[4][16] = {{1}, {0, 1}, {0, 0, 1}, {0, 0, 0, 1}};
  constexpr int scales = kind == kInt8Halves ? 2 * kPanel : kPanel;
  const Place<Scale> group = at.template after<code_bytes<stored>, scales>(column / kGroup);
  const int step = column % kGroup / 4;
  const Bytes codes = step_codes<stored>(group.codes, step / 4, step % 4);
  const Ints sum = dot<0>(ints(kFloatBits - code_bias<kind>), codes, run(one_hot[column % 4]));
  return (as_floats(sum) - all(kFloatBase)) * load(group.scales + (kind == kInt8Halves ? step / 4 * kPanel : 0));
}

// Adds the outliers left out of the codes. Each row adds its own in column order, whatever tile it is in.
template <int kind, int stored, int panels, int rows, typename Scale>
OSTRO_INLINE void add_outliers(Sums<panels, rows>& sums, const Outliers<rows>& outliers, const Place<Scale>& at,
                               int groups) {
  constexpr int scales = kind == kInt8Halves ? 2 * kPanel : kPanel;
  for (int i = 0; i < outliers.count;) {
    const int column = outliers.at[i].column;
    Floats weights[panels];
    for (int panel = 0; panel < panels; ++panel)
      weights[panel] =
          column_weights<kind, stored>(at.template after<code_bytes<stored>, scales>(panel * groups), column);
    for (; i < outliers.count && outliers.at[i].column == column; ++i)
      for (int panel = 0; panel < panels; ++panel) {
        Floats& sum = sums.at[panel][outliers.at[i].row];
        sum = madd(sum, weights[panel], outliers.at[i].value);
      }
  }
}

// Unpacks codes to bytes, ready for dot products.
template <int kind>
inline void spread_codes(const uint8_t* from, int groups, uint8_t* to) {
  for (int group = 0; group < groups; ++group, from += code_bytes<kind>)
    for (int half = 0; half < 2; ++half)
      for (int step = 0; step < 4; ++step, to += kPanel * 4) store(to, step_codes<kind>(from, half, step));
}

template <typename Scale>
inline void widen(const Scale* from, int count, float* to) {
  for (int i = 0; i < count; i += kPanel) store(to + i, load(from + i));
}

// A matmul, panel by panel, and within these tile by tile.
template <int kind, bool minima, typename Scale>
struct Integers {
  const Matrix& matrix;
  const uint8_t* x;
  int rows;
  After after;
  const float* bias;
  float* out;
  long stride;
  uint8_t* scratch;

  static constexpr bool kIsFour = kind == kInt4 || kind == kUnsigned4;
  static constexpr int kScales = (kind == kInt8Halves ? 2 : 1) * kPanel;
  static constexpr float kFactor = kind == kInt4 ? 1.0f / kInt4Factor : 1.0f;

  void operator()(int begin, int end) const {
    const int most = unpacked_panels(kPanel, matrix.cols);
    for (int panel = begin, count; panel < end; panel += count) {
      count = std::min(most, end - panel);
      if constexpr (kIsFour)
        if (rows >= kManyRows) {
          columns<kSpread>(unpack(panel, count), panel, count);
          continue;
        }
      columns<kind>(place(panel), panel, count);
    }
  }

  // Some panels with all rows. A block of rows stays in the L1 cache, if they are short, while panels stream past.
  template <int stored, typename Number>
  void columns(const Place<Number>& at, int panel, int count) const {
    const int groups = matrix.cols / kGroup;
    const int block =
        std::max(static_cast<int>(kBlockBytes / row_bytes(matrix.cols)), kLeastBlock) / kTileRows * kTileRows;
    for (int first = 0; first < rows; first += block) {
      each_panels(0, count, [&]<int panels>(int i) {
        each_tile(
            std::min(first + block, rows),
            [&](auto tile, int row) {
              compute<stored, panels, tile>(at.template after<code_bytes<stored>, kScales>(i * groups), panel + i, row);
            },
            first);
      });
    }
  }

  Place<Scale> place(int panel) const {
    const long at = static_cast<long>(panel) * (matrix.cols / kGroup);
    return {matrix.data + at * code_bytes<kind>, reinterpret_cast<const Scale*>(matrix.scale_data) + at * kScales,
            reinterpret_cast<const Scale*>(matrix.minimum_data) + at * kPanel};
  }

  // Unpacks panels into the scratch: codes, scales, minima.
  Place<float> unpack(int panel, int count) const {
    const int groups = count * (matrix.cols / kGroup);
    const Place<Scale> from = place(panel);
    auto* scales = reinterpret_cast<float*>(scratch + static_cast<long>(groups) * code_bytes<kSpread>);
    float* lowest = scales + groups * kScales;
    widen(from.scales, groups * kScales, scales);
    if constexpr (minima) widen(from.minima, groups * kPanel, lowest);
    spread_codes<kind>(from.codes, groups, scratch);
    return {scratch, scales, lowest};
  }

  // A tile: not inlined, so that the compiler has all registers for it.
  template <int stored, int panels, int count, typename Number>
  OSTRO_NOINLINE void compute(const Place<Number>& at, int panel, int row) const {
    const int groups = matrix.cols / kGroup;
    const uint8_t* tile = x + row * row_bytes(matrix.cols);
    Sums<panels, count> sums;
    // With one row, panel by panel: sequential memory is the fastest.
    constexpr int together = count == 1 ? 1 : std::min(panels, kTileSums / count);
    for (int i = 0; i < panels; i += together) {
      const Place<Number> here = at.template after<code_bytes<stored>, kScales>(i * groups);
      if constexpr (kind == kInt8Halves) halves_tile<together, count>(tile, here, groups, sums.at + i);
      else integer_tile<kind, stored, minima, together, count>(tile, here, groups, sums.at + i);
    }
    const auto& outliers = *reinterpret_cast<const Outliers<count>*>(tile + groups * sizeof(Group<count>));
    add_outliers<kind, stored>(sums, outliers, at, groups);
    finish(sums, kFactor, after, bias, panel, out + row * stride, stride);
  }
};

// For floats or halves: columns are added in order.
template <typename Cell, int panels, int rows>
OSTRO_INLINE Sums<panels, rows> float_tile(const float* x, long x_stride, const Cell* const (&panel)[panels],
                                           int cols) {
  Floats out[panels][rows];
  for (auto& each : out)
    for (auto& value : each) value = zeros();
  int col = 0;
  for (; col + 4 <= cols; col += 4) {
    Lanes<4> four[rows];
    for (int row = 0; row < rows; ++row) four[row] = Lanes<4>(x + row * x_stride + col);
    each_lane<4>([&]<int at>() OSTRO_BODY {
      for (int i = 0; i < panels; ++i) {
        const Floats w = load(panel[i] + static_cast<long>(col + at) * kPanel);
        for (int row = 0; row < rows; ++row) out[i][row] = four[row].template add<at>(out[i][row], w);
      }
    });
  }
  for (; col < cols; ++col)
    for (int i = 0; i < panels; ++i) {
      const Floats w = load(panel[i] + static_cast<long>(col) * kPanel);
      for (int row = 0; row < rows; ++row) out[i][row] = madd(out[i][row], w, x[row * x_stride + col]);
    }
  Sums<panels, rows> sums;
  keep_sums(out, sums.at);
  return sums;
}

template <typename Cell>
inline void float_product(const Matrix& matrix, const float* x, long x_stride, int rows, int begin, int end,
                          After after, const float* bias, float* out, long stride) {
  each_panels(begin, end, [&]<int panels>(int panel) {
    const Cell* from[panels];
    for (int i = 0; i < panels; ++i)
      from[i] = reinterpret_cast<const Cell*>(matrix.data) + static_cast<long>(panel + i) * matrix.cols * kPanel;
    const Cell* const(&cells)[panels] = from;
    each_tile<std::min(kTileRows, 4)>(rows, [&](auto tile, int row) {
      finish(float_tile<Cell, panels, tile>(x + row * x_stride, x_stride, cells, matrix.cols), 1.0f, after, bias, panel,
             out + row * stride, stride);
    });
  });
}

static void linear(const Matrix& matrix, const void* x, long x_stride, int rows, int begin, int end, After after,
                   const float* bias, float* out, long stride, uint8_t* scratch) {
  if (matrix.codes == kFloat32 || matrix.codes == kFloat16) {
    const auto* floats = static_cast<const float*>(x);
    if (matrix.codes == kFloat32) {
      float_product<float>(matrix, floats, x_stride, rows, begin, end, after, bias, out, stride);
    } else {
      float_product<Half>(matrix, floats, x_stride, rows, begin, end, after, bias, out, stride);
    }
    return;
  }
  const auto* codes = static_cast<const uint8_t*>(x);
  auto product = [&]<int kind, bool minima, typename Scale>() {
    Integers<kind, minima, Scale>{matrix, codes, rows, after, bias, out, stride, scratch}(begin, end);
  };
  auto with = [&]<typename Scale>() {
    switch (matrix.codes) {
      case kInt8:
        if (matrix.has_minima) product.template operator()<kInt8, true, Scale>();
        else product.template operator()<kInt8, false, Scale>();
        break;
      case kInt8Halves: product.template operator()<kInt8Halves, false, Scale>(); break;
      case kInt4: product.template operator()<kInt4, false, Scale>(); break;
      default: product.template operator()<kUnsigned4, true, Scale>(); break;
    }
  };
  if (matrix.scales == kHalfScales) with.template operator()<Half>();
  else with.template operator()<float>();
}

}  // namespace OSTRO_ISA
