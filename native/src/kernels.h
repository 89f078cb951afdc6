// The kernels of an instruction set: one table of functions per set, selected when a plan is created.
#pragma once

#include <cstdint>

#include "format.h"
#include "half.h"

namespace ostro {

constexpr int kPage = 16;  // tokens per page of the KV cache
constexpr int kMostDim = 256;
constexpr int kMostTaps = 8;
constexpr int kQueries = 24;  // of several tokens that attention computes together, at most
constexpr long kScratchBytes = 192 << 10;

// Sums of a group's codes: of its first half (needed where codes of weights are unsigned), and of all.
struct CodeSums {
  int32_t half, all;
};

enum class After : int32_t {
  kStore = 0,
  kAdd = 1,          // to the existing value
  kSilu = 2,         // silu(even panel) * odd panel of a matmul: gates and ups alternate
  kGelu = 3,         // the same with the tanh approximation of gelu
  kExactGelu = 4,    // the same with gelu itself
  kRelu = 5,         // not available in matmuls
  kClampedSilu = 6,  // like kSilu, but clamped, and one is added to ups
  kSigmoid = 7,      // not available in matmuls
  kRelu2 = 8,        // the square of kRelu; not available in matmuls
};

// Whether half of a matmul's rows are gates.
constexpr bool has_gates(After after) {
  return after == After::kSilu || after == After::kGelu || after == After::kExactGelu || after == After::kClampedSilu;
}

enum class Cells : int32_t { kFloat = 0, kHalf = 1, kInt8 = 2 };

struct Attention {
  int dim;
  int window;  // 0 is none
  Cells cells;
  float scale;
  float cap;  // 0 is none
};

// The pages of one head in one layer. A page stores keys as [dim][slot], so that scores need no sums across a vector;
// then values as [slot][dim]; then, with int8 cells, a scale per slot for the key and one for the value.
struct HeadPages {
  uint8_t* first;
  long stride;  // bytes from one page to the next
};

constexpr long head_page_bytes(int dim, Cells cells) {
  const long cell = cells == Cells::kFloat ? sizeof(float) : cells == Cells::kHalf ? sizeof(Half) : sizeof(int8_t);
  return 2 * kPage * (dim * cell + (cells == Cells::kInt8 ? static_cast<long>(sizeof(float)) : 0));
}

// Attention within a text: a token sees those less than `window` away on either side; 0 is no limit.
struct TextAttention {
  int dim;
  int length;
  int window;
  float scale;
};

// Tokens whose scores are computed together, a multiple of every kernel's tile of floats.
constexpr int kTextRows = 12;
constexpr long text_width(int length, int panel) { return (static_cast<long>(length) + panel - 1) / panel * panel; }

// A head's keys and values in one text, packed into panels, and room for scores: [row of kTextRows][text_width].
struct TextHead {
  float* keys;
  float* values;
  float* scores;

  TextHead(float* memory, int dim, int length, int panel)
      : keys(memory),
        values(keys + text_width(length, panel) * dim),
        scores(values + static_cast<long>(length) * dim) {}
  static constexpr long floats(int dim, int length, int panel) {
    return text_width(length, panel) * (2 * dim + kTextRows);
  }
};

// In a matmul's scratch, a panel has one-byte codes, and a four-byte scale and minimum per group.
constexpr long unpacked_bytes(int panel, int cols) { return static_cast<long>(panel) * cols / kGroup * (kGroup + 8); }
// Panels processed together, a multiple of four: as many unpacked ones as fit comfortably into a core's L2 cache.
constexpr int unpacked_panels(int panel, int cols) {
  const long fit = kScratchBytes / unpacked_bytes(panel, cols);
  return fit < 4 ? 4 : static_cast<int>(fit / 4) * 4;
}
constexpr long scratch_bytes(int panel, int cols) {
  const long least = 4 * unpacked_bytes(panel, cols);
  return least < kScratchBytes ? kScratchBytes : least;
}

// A recurrence's matrices lie in tiles of so many columns, [rows][kStateLanes], the last one padded with zeros: no sum
// crosses a vector, whatever its width.
constexpr int kStateLanes = 32;
constexpr int state_tiles(int cols) { return (cols + kStateLanes - 1) / kStateLanes; }
constexpr long state_floats(int rows, int cols) { return static_cast<long>(rows) * state_tiles(cols) * kStateLanes; }

// What tokens of one sequence bring to a tile of a gated delta net's matrix.
struct DeltaTokens {
  int count;
  const float *q, *k;  // [count][rows]
  float* v;            // [count][kStateLanes]; becomes what the tokens read
  const float *kept, *strength;
  const float* likeness;        // of q to k
  const float* next = nullptr;  // the tile that follows, if any, which is prefetched
};

// The same for Mamba2.
struct SsmTokens {
  int count;
  const float *b, *c;  // [count][rows]
  float* u;            // [count][kStateLanes]; becomes what the tokens read
  const float *kept, *step;
  float skip;
  const float* next = nullptr;  // the tile that follows, if any, which is prefetched
};

struct Kernels {
  const char* name;
  int panel;  // rows per panel of a packed matrix
  int tile;   // rows of activations that are multiplied together, at most
  bool (*runs_here)();
  // Size of a row of activations as written by `quantize`.
  long (*row_bytes)(int cols);
  // Quantizes `row` of the `rows` of activations that a matmul reads from `to`, which must be aligned to 16 bytes. Rows
  // may be quantized in any order and by several threads, but those of a tile share cache lines.
  void (*quantize)(const float* x, int row, int rows, int cols, uint8_t* to);
  // Panels [begin, end) of a matmul. `x` is the output of `quantize` or, for a matrix of floats, rows of `cols` floats
  // with x_stride between them; all rows that were quantized together. The scratch has scratch_bytes(panel, cols).
  void (*linear)(const Matrix& matrix, const void* x, long x_stride, int rows, int begin, int end, After after,
                 const float* bias, float* out, long stride, uint8_t* scratch);
  // Attention of `tokens` adjacent tokens from this position on, all in one page. Each has `count` queries that share the
  // KV head, `dim` long and adjacent to each other; from token to token there are `stride` and `out_stride`. Of several
  // tokens, there are at most kQueries. Each also attends to a key with the score in `sinks`, one of `count`, whose value
  // is zero; null for none.
  void (*attend)(const Attention& how, const HeadPages& head, const int32_t* pages, int position, int tokens, int count,
                 const float* sinks, const float* q, long stride, float* out, long out_stride);
  // Stores a token's key and value, of length `dim` each, in their pages.
  void (*keep)(const Attention& how, const HeadPages& head, const int32_t* pages, int position, const float* key,
               const float* value);
  // Packs one head's keys and values of a text, with `stride` between tokens.
  void (*pack_head)(int dim, int length, const float* keys, const float* values, long stride, const TextHead& to);
  // Attention of a packed head's tokens [begin, end), whose queries and results are `stride` and `out_stride` apart.
  void (*attend_text)(const TextAttention& how, const TextHead& head, int begin, int end, const float* q, long stride,
                      float* out, long out_stride);
  void (*norm)(const float* x, int cols, const float* weight, float eps, bool adds, float* out);
  void (*layer_norm)(const float* x, int cols, const float* weight, const float* bias, float eps, float* out);
  void (*rotate)(float* x, int heads, int dim, int rotated, const float* cosines, const float* sines);
  void (*softcap)(float* x, int cols, float cap);
  void (*scale)(const float* x, int cols, float scale, float* out);
  // x = activation(x)
  void (*apply)(float* x, int cols, After activation);
  float (*dot)(const float* a, const float* b, int count);
  // out += scale * x; whole panels
  void (*add_scaled)(const float* x, float scale, int count, float* out);
  // out = gated(gates, ups); writes `count` numbers, whole panels; x alternates panels of gates and ups
  void (*activate)(const float* x, int count, After after, float* out);
  // out[i] = exp((x[i] - top) / temperature)
  void (*weigh)(const float* x, int count, float top, float temperature, float* out);
  // x *= activation(gates); whole panels
  void (*multiply)(const float* gates, int count, After activation, float* x);
  // out = activation(bias + sum of weights * inputs), with a row of each for every tap, those of the weights `stride`
  // apart; the bias may be null; whole panels
  void (*filter)(int taps, const float* const* inputs, const float* weights, long stride, const float* bias,
                 After activation, int count, float* out);
  // The same for one token with input x. The inputs before it are `kept`, as far apart as the weights, oldest first; x
  // becomes the latest of them, and the oldest is dropped.
  void (*filter_one)(int taps, float* kept, const float* x, const float* weights, long stride, const float* bias,
                     After activation, int count, float* out);
  // out = scale * x / sqrt(sum of squares + eps)
  void (*unit)(const float* x, int count, float scale, float eps, float* out);
  // steps = softplus(steps + bias) and kept = exp(decay * steps); whole panels
  void (*decay)(int count, float bias, float decay, float* steps, float* kept);
  // Advance a tile, [rows][kStateLanes], token by token.
  void (*delta)(int rows, const DeltaTokens& tokens, float* tile);
  void (*ssm)(int rows, const SsmTokens& tokens, float* tile);
};

// Matmuls of many rows on a unit of their own, for another table of kernels; see tiles.inl.
struct TiledMatmuls {
  const char* name;
  bool (*runs_here)();
  decltype(Kernels::quantize) quantize;
  decltype(Kernels::linear) linear;
};
Kernels with_tiles(Kernels others, const TiledMatmuls& tiles);

// The kernels in this library, best first. Unless it was compiled for one CPU, the last one runs everywhere.
const Kernels* const* kernels_begin();
int kernels_count();
// By name, or the best supported here; null if there is none of that name or it is not supported here.
const Kernels* find_kernels(const char* name);

}  // namespace ostro
