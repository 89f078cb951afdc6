// A model's step as a list of operations on preallocated buffers: built once, run for every batch.
//
// Buffers have one row per token. Every operation splits its work among the threads, by rows, by panels of a matrix or
// by heads; a thread that is done takes the next piece, and there is a barrier between operations.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "format.h"
#include "kernels.h"
#include "pool.h"
#include "routing.h"
#include "sample.h"

namespace ostro {

enum class Op : int32_t {
  kEmbed = 0,        // out = row of the matrix * scale
  kLinear = 1,       // out = matrix (normed) in, then `after`
  kNorm = 2,         // out = normed in, or out += it if `after` is kAdd; with a bias it is a layer norm
  kAttend = 3,       // stores keys and values of `in` in pages; out = attention of its queries
  kGather = 4,       // out = the requested rows
  kSoftcap = 5,      // out = cap * tanh(out / cap)
  kSample = 6,       // tokens from the logits in `in`
  kAdapt = 7,        // out += each row's adapter term for (normed) in
  kActivate = 8,     // out = activation(gates) * ups, panels of which alternate in `in`
  kScale = 9,        // out = in * scale, or out += it if `after` is kAdd
  kApply = 10,       // out = after(out), an activation
  kPosition = 11,    // out = the matrix's row for the token's position
  kRoute = 12,       // picks each token's experts by the logits in `in`, or their sigmoids if `after` says so: see routing.h
  kExpand = 13,      // slots of out = their experts' matrices (normed) in, a row per token, then `after`
  kExpert = 14,      // the same, but `in` has a row per slot
  kCombine = 15,     // out = the weighted sum of a token's slots in `in`, * scale, or out += it if `after` is kAdd
  kGate = 16,        // out *= sigmoid(first column of in)
  kAttendText = 17,  // out = attention of the queries of `in` to all tokens of their text, `window` on either side
  kType = 18,        // out = the matrix's row for the token's type
  kChoose = 19,      // takes each token's experts as given in `in`: their numbers, -1 for none, then their weights
  kMultiply = 20,    // out *= after(in), an activation; out may be normed before, or after: see Step::normalized
  kConvolve = 21,    // out = after(causal filters of in); advances the latest inputs in the state
  kDelta = 22,       // out = what a gated delta net reads; advances its matrices: see models.architecture.GatedDelta
  kSsm = 23,         // the same for Mamba2
};
constexpr int kOps = 24;

// Numbers of a token that advances a matrix, beside its vectors.
constexpr int kTokenNumbers = 3;

// A mixer's sizes, and where its part of a sequence's state is.
struct Recurrence {
  int32_t state_at;       // floats before it in a slot
  int32_t taps;           // of filters, whose latest taps - 1 inputs are kept
  int32_t heads, groups;  // with a matrix for each head; heads share what they read of a group
  int32_t tiled;          // head h reads group h % groups rather than h / (heads / groups)
  int32_t rows, cols;     // of a head's matrix
  int32_t draft_at;       // floats before its part of what is kept of a draft

  int group_of(int head) const { return tiled ? head % groups : head / (heads / groups); }
  int64_t floats() const { return static_cast<int64_t>(heads) * state_floats(rows, cols); }
  // What a head keeps of a draft: two vectors of its group, its own, and three numbers.
  int64_t draft_floats() const { return 2 * rows + cols + kTokenNumbers; }
};

// One adapter's contribution to a matmul: B A x, with A as [rank][columns read] and B as [rank][columns written].
struct Term {
  int32_t rank;  // 0 adds nothing
  int32_t reserved;
  const float* a;
  const float* b;
};

// Each field means the same to every operation that uses it.
struct Step {
  int32_t op;
  int32_t in, out;        // buffers
  int32_t in_at, out_at;  // first columns in them
  int32_t cols;           // columns read
  int32_t after;
  int32_t layer;
  int32_t rotation;
  int32_t window;  // 0 is none
  float scale;     // of embeddings, of scores, of added terms
  float cap;       // 0 is none
  float eps;
  int32_t norm_size, bias_size;  // their lengths
  int32_t width;                 // columns written by kAdapt and kActivate
  const float* norm;             // null for none; for kAttend, per query and key head
  const float* bias;             // null for none; for kAttend, a sink per query head
  const Matrix* matrix;
  const Term* terms;  // for kAdapt, one per adapter
  int32_t num_terms;
  int32_t experts;     // in the matrix, one below the other, and in the router's logits
  int32_t chosen;      // experts per token
  int32_t normalized;  // for kRoute, whether a token's weights add up to one; for kMultiply, whether products are normed
  int32_t ungated;     // for kExpand, whether `after` is an activation without gates
  int32_t padding;
  const Recurrence* recurrence;
  // A mixer's own: of filters, [taps][cols]; else two or three numbers per head. For kRoute, what is added to experts'
  // sigmoids for the choice; may be null.
  const float* weights;
  int32_t weights_size;
  int32_t beside, beside_at;  // a second buffer that is read: per head's numbers; and the first column in it
  int32_t reserved;
};

// Whether a matmul reads quantized activations.
inline bool reads_codes(const Step& step) { return step.matrix->codes != kFloat32 && step.matrix->codes != kFloat16; }

struct Shape {
  int32_t heads, kv_heads, head_dim, num_layers;
  int32_t num_pages, cells;  // cells is a Cells
  int32_t max_rows;          // tokens per step
  int32_t threads;
  int32_t num_states, state_floats;  // slots for sequences' states, and the size of each
  // Lanes in which sequences keep what their drafts would do to their states, drafts in each, and the size of a draft.
  int32_t num_lanes, most_drafts, draft_floats, reserved;
};

struct BufferShape {
  int32_t rows, cols;
  float* memory = nullptr;  // of the caller's, which must stay; null if the plan is to have its own
};

// Cosines and sines, [position][rotated / 2].
struct Rotation {
  const float* cosines;
  const float* sines;
  int32_t rotated;
  int32_t positions;
};

// A copy of a sequence's state after so many of a step's tokens.
struct Capture {
  int32_t after, slot;
};

// One sequence's tokens in a step.
struct Piece {
  int32_t row;    // of its first token
  int32_t start;  // that token's position; at 0, the state is zeros
  int32_t length;
  int32_t num_pages;
  const int32_t* pages;
  int32_t state;  // the slot of its state, which the step advances
  int32_t num_captures;
  const Capture* captures;  // in order
  // The last so many tokens do not advance the state but are kept in the lane; before anything else, the first `applied`
  // of those that were kept there advance it.
  int32_t drafts, applied, lane, reserved;
};

struct Batch {
  int32_t num_rows, num_pieces, num_asked, num_draws;
  const int32_t* tokens;
  const Piece* pieces;
  const int32_t* asked;  // rows whose logits are requested
  Draw* draws;
  const int32_t* adapters;  // per row, -1 for none; null if no row has one
  const int32_t* types;     // per row; null if all are zero
};

// Does not validate its arguments: see check.h.
class Plan {
 public:
  Plan(const Kernels& kernels, const Shape& shape, const std::vector<BufferShape>& buffers,
       std::vector<Rotation> rotations, std::vector<Step> steps);

  // See Pool.
  void set_polling(bool polling) { pool_.set_polling(polling); }
  // Runs steps [begin, end) of the list. Buffers keep their contents from earlier runs.
  void run(const Batch& batch, int begin, int end);
  void copy_page(int from, int to);
  void copy_state(int from, int to);
  float* state(int slot) { return states_.get() + static_cast<long>(slot) * shape_.state_floats; }
  // The keys and values of a page's tokens, in all layers.
  uint8_t* page(int number) { return pages_.get() + number * page_bytes(); }
  long page_bytes() const;
  float* buffer(int index) { return buffers_[index].data; }
  // Seconds per operation since the last call. Measured on one thread, from barrier to barrier.
  std::array<double, kOps> take_profile();

 private:
  // Aligned memory lies within what was allocated.
  template <typename T>
  struct Freed {
    void* allocated;
    void operator()(T*) const { std::free(allocated); }
  };
  template <typename T>
  using Memory = std::unique_ptr<T[], Freed<T>>;
  template <typename T>
  static Memory<T> zeros(size_t count);

  struct Buffer {
    BufferShape shape;
    Memory<float> own;  // null if it is the caller's
    float* data;
  };
  // A thread's own memory.
  struct Own {
    std::vector<uint8_t> codes;    // of rows so few that each thread quantizes them itself
    std::vector<float> normed;     // a tile of rows, or those few
    std::vector<float> inner;      // a tile of rows times an adapter's A
    Memory<uint8_t> scratch;       // for matmuls
    Memory<float> text;            // a TextHead
    DrawScratch draws;
    Memory<float> tokens;          // of recurrences
  };
  // Number of pieces of an operation's work taken so far.
  struct alignas(64) Taken {
    std::atomic<int> count{0};
  };

  // Adjacent tokens of one sequence, in one page.
  struct Stretch {
    int row, tokens;
  };

  // A matmul's input: codes or floats, shared or this thread's own.
  struct Input {
    const void* x;
    long stride;
  };

  void work(const Batch& batch, int begin, int end, int thread);
  void execute(const Step& step, const Batch& batch, int rows, int thread, std::atomic<int>& taken);
  Input prepare(const Step& step, int rows, int thread);
  void quantize(const Step& step, const float* from, int index, int rows, Own& own, uint8_t* codes) const;
  const Step* activation_after(int index, int end) const;
  void linear(const Step& step, const Input& input, int rows, const Step* activation, Own& own,
              std::atomic<int>& taken);
  void keep(const Step& step, const Batch& batch, int thread);
  void count_stretches(const Batch& batch);
  void attend(const Step& step, const Batch& batch, std::atomic<int>& taken);
  void count_text_blocks(const Batch& batch);
  void attend_texts(const Step& step, const Batch& batch, int thread, std::atomic<int>& taken);
  void type(const Step& step, const Batch& batch, int index) const;
  void adapt(const Step& step, const Batch& batch, int rows, int thread);
  void add_term(const Step& step, const Term& term, int begin, int end, Share columns, Own& own);
  void apply(const Step& step, int rows, int thread);
  void embed(const Step& step, const Batch& batch, int row);
  int position(const Batch& batch, int row) const;
  void route(const Step& step, int rows, int thread);
  const float* slot_row(const Step& step, int slot) const;
  void gather_slots(const Step& step, int begin, int end, float* to) const;
  void quantize_slots(const Step& step, int thread);
  void multiply_slots(const Step& step, int rows, int thread, std::atomic<int>& taken);
  void combine(const Step& step, int index) const;
  void gate(const Step& step, int index) const;
  void multiply(const Step& step, int index) const;
  void convolve(const Step& step, const Batch& batch, std::atomic<int>& taken);
  void convolve(const Step& step, const Piece& piece, int at, int count);
  void recur(const Step& step, const Batch& batch, int thread, std::atomic<int>& taken);
  void recur(const Step& step, const Piece& piece, int head, Share tiles, float* room);
  float* draft(const Recurrence& how, const Piece& piece, int index) {
    return drafts_.get() + (static_cast<long>(piece.lane) * shape_.most_drafts + index) * shape_.draft_floats + how.draft_at;
  }
  float* row(int buffer, int index) const {
    return buffers_[buffer].data + static_cast<long>(index) * buffers_[buffer].shape.cols;
  }
  HeadPages pages_of(int layer, int head) const;
  Attention how(const Step& step) const;

  const Kernels& kernels_;
  const Shape shape_;
  const std::vector<Rotation> rotations_;
  const std::vector<Step> steps_;
  std::vector<Buffer> buffers_;
  Memory<uint8_t> pages_;
  Memory<float> states_;
  Memory<float> drafts_;
  Memory<uint8_t> codes_;
  std::vector<float> normed_;
  std::vector<Own> own_;
  std::vector<Taken> taken_;
  std::vector<int32_t> piece_of_row_;
  std::vector<Stretch> stretches_;
  std::vector<int32_t> text_starts_;  // for each text, the number of its first block; empty without kAttendText
  Routing routing_;
  std::array<double, kOps> seconds_{};
  Pool pool_;
};

}  // namespace ostro
