// The kernels of an instruction set: one table of functions for each, selected when a plan is created.
#pragma once

#include <cstdint>

#include "format.h"
#include "half.h"

namespace ostro {

constexpr int kPage = 16;  // tokens of a page of keys and values
constexpr int kMostDim = 256;
constexpr long kScratchBytes = 192 << 10;

enum class After : int32_t {
  kStore = 0,
  kAdd = 1,        // to what is there
  kSilu = 2,       // of a product silu(even panel) * odd panel: gates and ups alternate
  kGelu = 3,       // the same with tanh's approximation of gelu
  kExactGelu = 4,  // products know neither this nor the next
  kRelu = 5,
};

enum class Cells : int32_t { kFloat = 0, kHalf = 1, kInt8 = 2 };

struct Attention {
  int dim;
  int window;  // 0 is none
  Cells cells;
  float scale;
  float cap;  // 0 is none
};

// The pages of one head in one layer. In a page, keys lie dimension by dimension, [dim][slot], so that scores need no sums
// across a vector; then values token by token, [slot][dim]; then, with eight-bit cells, a scale of each slot's key and
// one of each slot's value.
struct HeadPages {
  uint8_t* first;
  long stride;  // from a page to the next, in bytes
};

constexpr long head_page_bytes(int dim, Cells cells) {
  const long cell = cells == Cells::kFloat ? sizeof(float) : cells == Cells::kHalf ? sizeof(Half) : sizeof(int8_t);
  return 2 * kPage * (dim * cell + (cells == Cells::kInt8 ? static_cast<long>(sizeof(float)) : 0));
}

// A panel in a product's scratch has codes of a byte, and a scale and a minimum of four bytes a group.
constexpr long unpacked_bytes(int panel, int cols) { return static_cast<long>(panel) * cols / kGroup * (kGroup + 8); }
// Panels that rows pass by at a time, a multiple of four: as many as a core's second cache easily holds, unpacked.
constexpr int unpacked_panels(int panel, int cols) {
  const long fit = kScratchBytes / unpacked_bytes(panel, cols);
  return fit < 4 ? 4 : static_cast<int>(fit / 4) * 4;
}
constexpr long scratch_bytes(int panel, int cols) {
  const long least = 4 * unpacked_bytes(panel, cols);
  return least < kScratchBytes ? kScratchBytes : least;
}

struct Kernels {
  const char* name;
  int panel;  // rows of a packed matrix that lie together
  bool (*runs_here)();
  // Of a row of activations as `quantize` writes it.
  long (*row_bytes)(int cols);
  // Rows of activations to codes, and to what products need to know of each group. `to` begins on a boundary of 16 bytes.
  void (*quantize)(const float* x, long stride, int rows, int cols, uint8_t* to);
  // Panels begin to end of a product. `x` is what `quantize` wrote, or, for a matrix of floats, rows of floats, `cols`
  // of them with x_stride between. The scratch has scratch_bytes(panel, cols).
  void (*linear)(const Matrix& matrix, const void* x, long x_stride, int rows, int begin, int end, After after,
                 const float* bias, float* out, long stride, uint8_t* scratch);
  // Queries q[0 .. count) of one position, which share a head of keys; each `dim` long, beside each other.
  void (*attend)(const Attention& how, const HeadPages& head, const int32_t* pages, int position, int count,
                 const float* q, float* out);
  // Keeps a token's key and value, `dim` long each, in their pages.
  void (*keep)(const Attention& how, const HeadPages& head, const int32_t* pages, int position, const float* key,
               const float* value);
  void (*norm)(const float* x, int cols, const float* weight, float eps, bool adds, float* out);
  void (*layer_norm)(const float* x, int cols, const float* weight, const float* bias, float eps, float* out);
  void (*rotate)(float* x, int heads, int dim, int rotated, const float* cosines, const float* sines);
  void (*softcap)(float* x, int cols, float cap);
  void (*scale)(const float* x, int cols, float scale, float* out);
  // x = what an activation makes of it
  void (*apply)(float* x, int cols, After activation);
  float (*dot)(const float* a, const float* b, int count);
  // out += scale * x; whole panels
  void (*add_scaled)(const float* x, float scale, int count, float* out);
  // out = activated gates * ups; `count` numbers are written, whole panels, and x has a panel of each by turns
  void (*activate)(const float* x, int count, After after, float* out);
  // out[i] = exp((x[i] - top) / temperature)
  void (*weigh)(const float* x, int count, float top, float temperature, float* out);
};

// Those that this library was built for, the best first; the last runs everywhere.
const Kernels* const* kernels_begin();
int kernels_count();
// By name, or the best that runs here; null where there is none of that name or it does not run here.
const Kernels* find_kernels(const char* name);

}  // namespace ostro
