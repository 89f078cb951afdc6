// Rows of activations, quantized for matmuls. Included once per instruction set.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <type_traits>
#include <utility>

#include "broadcast.inl"
#include "format.h"
#include "kernels.h"

namespace OSTRO_ISA {

using namespace ostro;

// Integer sums start at the bit pattern of 1.5 * 2^23, so that reinterpreted as a float they are 1.5 * 2^23 + sum. No
// sum of a group (32 * 127 * 128) leaves the range in which that is exact. When it is multiplied by a scale, the same
// fused multiply-add subtracts the 1.5 * 2^23; with scales of 22 bits, that is exact as well.
constexpr int32_t kFloatBits = 0x4B400000;
constexpr uint32_t kScaleBits = ~3u;

// One group of a tile of rows, as written by `quantize`.
template <int rows>
struct Group {
  Broadcast base[rows];  // -kFloatBase times the scale
  int8_t codes[rows][kGroup];
  float scale[rows];
  float total[rows];   // of the group's activations after rounding, including its outlier
  int32_t sum[rows];   // of their codes
  int16_t half[rows];  // of the first half's codes
};

// An outlier would set a scale that rounds the rest of its group away. It stays a float, and its code is zero.
struct Outlier {
  int32_t column;
  float value;
};

// Rounding noise grows with the square of a group's largest activation. An outlier is one whose removal reduces the
// noise of its whole row by more than 1 / kMostOutliers; so a row has no more of them than that.
constexpr int kMostOutliers = 10;

// A tile's outliers, stored after its groups: each row's by column, and one at kNoColumn after the last.
template <int rows>
struct Outliers {
  Outlier at[rows][kMostOutliers + 1];
};
constexpr int32_t kNoColumn = std::numeric_limits<int32_t>::max();

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

// Quantizes them such that 127 stands for `peak`. Returns the sums of the codes.
inline CodeSums quantize_group(const float* from, float peak, int8_t* codes) {
  const float inverse = peak > 0.0f ? 127.0f / peak : 0.0f;
  for (int i = 0; i < kGroup; i += kPanel) store_rounded(codes + i, load(from + i) * all(inverse));
  const int32_t half = std::accumulate(codes, codes + kGroup / 2, 0);
  return {half, std::accumulate(codes + kGroup / 2, codes + kGroup, half)};
}
#endif

#if !defined(OSTRO_HAS_PEAKS)
// Those of this many groups at a time.
constexpr int kPeaks = 1;
inline void group_peaks(const float* from, float* peaks) { *peaks = group_peak(from); }
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
inline void quantize_in_tile(const float* x, int row, int cols, uint8_t* tile) {
  auto* const groups = reinterpret_cast<Group<rows>*>(tile);
  const int count = cols / kGroup;
  Outlier* outliers = reinterpret_cast<Outliers<rows>*>(groups + count)->at[row];
  float noise = 0.0f;
  auto keep_peak = [&](int i, float peak) {
    groups[i].scale[row] = peak;
    noise += peak * peak;
  };
  int first = 0;
  for (; first + kPeaks <= count; first += kPeaks) {
    float peaks[kPeaks];
    group_peaks(x + static_cast<long>(first) * kGroup, peaks);
    for (int i = 0; i < kPeaks; ++i) keep_peak(first + i, peaks[i]);
  }
  for (; first < count; ++first) keep_peak(first, group_peak(x + static_cast<long>(first) * kGroup));
  auto* group = groups;
  for (int at = 0; at < cols; at += kGroup, ++group) {
    float peak = group->scale[row];
    const int outlier = take_outlier(x + at, noise, peak);
    CodeSums sums = quantize_group(x + at, peak, group->codes[row]);
    float apart = 0.0f;
    if (outlier >= 0) {
      apart = x[at + outlier];
      *outliers++ = {at + outlier, apart};
      const int32_t code = std::exchange(group->codes[row][outlier], int8_t{0});
      sums.all -= code;
      if (outlier < kGroup / 2) sums.half -= code;
    }
    float scale = std::bit_cast<float>(std::bit_cast<uint32_t>(peak * (1.0f / 127.0f)) & kScaleBits);
    // With a base that is infinite, it would depend on the kernel what becomes of a sum.
    if (!std::isfinite(kFloatBase * scale)) scale = std::numeric_limits<float>::quiet_NaN();
    group->base[row] = broadcast(-kFloatBase * scale);
    group->scale[row] = scale;
    group->sum[row] = sums.all;
    group->half[row] = static_cast<int16_t>(sums.half);
    group->total[row] = scale * static_cast<float>(sums.all) + apart;
  }
  *outliers = {kNoColumn, 0.0f};
}

// Calls body(rows of the tile, first row) for tiles of kTileRows, then repeatedly for half as many, down to one.
template <int size = kTileRows, typename Body>
inline void each_tile(int rows, Body body, int row = 0) {
  for (; row + size <= rows; row += size) body(std::integral_constant<int, size>{}, row);
  if constexpr (size > 1)
    if (row < rows) each_tile<size / 2>(rows, body, row);
}

// Calls body(rows of the tile, its first row) for the one of these tiles that a row is in.
template <int size = kTileRows, typename Body>
inline void in_tile(int row, int rows, Body body, int begin = 0) {
  const int end = begin + (rows - begin) / size * size;
  if (row < end) body(std::integral_constant<int, size>{}, row - (row - begin) % size);
  else if constexpr (size > 1) in_tile<size / 2>(row, rows, body, end);
}

}  // namespace OSTRO_ISA
