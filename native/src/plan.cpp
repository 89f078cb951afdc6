#include "plan.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "pack.h"
#include "recurrent.h"
#include "work.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace ostro {
namespace {

// Whether a matmul has the same prepared input as the previous one.
bool same_input(const Step& step, const Step* before) {
  return before && before->in == step.in && before->in_at == step.in_at && before->cols == step.cols &&
         before->out != step.in && before->norm == step.norm && before->eps == step.eps &&
         reads_codes(*before) == reads_codes(step);
}

bool adds(const Step& step) { return static_cast<After>(step.after) == After::kAdd; }

// Rows of so many floats that are multiplied with panels at a time: their size is a part of a core's L2 cache.
int float_block(int cols) {
  constexpr long kBytes = 192 << 10;
  return static_cast<int>(std::max<long>(kTile, kBytes / (cols * sizeof(float)) / kTile * kTile));
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Asks for huge pages, of which one entry of the CPU's address cache covers more.
void ask_for_huge_pages(void* memory, size_t size) {
#if defined(__linux__)
  constexpr uintptr_t kHuge = uintptr_t{2} << 20;
  const uintptr_t at = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t begin = (at + kHuge - 1) / kHuge * kHuge, end = (at + size) / kHuge * kHuge;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)memory, (void)size;
#endif
}

}  // namespace

// Zeroed memory that is not committed before it is written. Aligned, as a vector across two cache lines takes two loads.
template <typename T>
Plan::Memory<T> Plan::zeros(size_t count) {
  constexpr size_t kAlign = 64;
  if (count > (SIZE_MAX - kAlign) / sizeof(T)) throw std::bad_alloc();
  size_t room = count * sizeof(T) + kAlign;
  void* allocated = std::calloc(room, 1);
  if (!allocated) throw std::bad_alloc();
  ask_for_huge_pages(allocated, room);
  void* memory = allocated;
  std::align(kAlign, count * sizeof(T), memory, room);
  return Memory<T>(static_cast<T*>(memory), Freed<T>{allocated});
}

Plan::Plan(const Kernels& kernels, const Shape& shape, const std::vector<BufferShape>& buffers,
           std::vector<Rotation> rotations, std::vector<Step> steps)
    : kernels_(kernels),
      shape_(shape),
      rotations_(std::move(rotations)),
      steps_(std::move(steps)),
      own_(shape.threads),
      taken_(steps_.size()),
      piece_of_row_(shape.max_rows),
      pool_(shape.threads) {
  int rows = shape.max_rows;
  for (const BufferShape& each : buffers) {
    Memory<float> own;
    if (!each.memory) own = zeros<float>(static_cast<size_t>(each.rows) * each.cols);
    float* data = each.memory ? each.memory : own.get();
    buffers_.push_back({each, std::move(own), data});
  }
  int most_cols = 0, coded_cols = 0, normed_cols = 0, most_rank = 0;
  long token_floats = 0;
  bool has_texts = false;
  size_t slot_codes = 0;
  for (const Step& step : steps_) {
    for (int i = 0; i < step.num_terms; ++i) most_rank = std::max(most_rank, step.terms[i].rank);
    const Op op = static_cast<Op>(step.op);
    has_texts |= op == Op::kAttendText;
    if (op == Op::kDelta || op == Op::kSsm) token_floats = std::max(token_floats, recurred_floats(*step.recurrence));
    if (op == Op::kAdapt) most_cols = std::max(most_cols, step.cols);
    if (op == Op::kRoute || op == Op::kChoose) routing_.reserve(shape.max_rows, step.experts, step.chosen);
    if (op == Op::kExpand || op == Op::kExpert) {
      most_cols = std::max(most_cols, step.cols);
      const size_t slots = static_cast<size_t>(shape.max_rows) * step.chosen;
      if (reads_codes(step)) {
        coded_cols = std::max(coded_cols, step.cols);
        slot_codes = std::max(slot_codes, slots * kernels.row_bytes(step.cols));
      }
    }
    if (op != Op::kLinear) continue;
    rows = std::max(rows, buffers_[step.in].shape.rows);
    most_cols = std::max(most_cols, step.cols);
    if (reads_codes(step)) coded_cols = std::max(coded_cols, step.cols);
    if (step.norm && !reads_codes(step)) normed_cols = std::max(normed_cols, step.cols);
  }
  const size_t row_codes = coded_cols ? static_cast<size_t>(kernels.row_bytes(coded_cols)) : 0;
  codes_ = zeros<uint8_t>(std::max(rows * row_codes, slot_codes));
  if (has_texts) text_starts_.resize(static_cast<size_t>(shape.max_rows) + 1);
  stretches_.reserve(shape.max_rows);
  normed_.resize(static_cast<size_t>(rows) * normed_cols);
  for (Own& own : own_) {
    own.codes.resize(kFewRows * row_codes);
    own.normed.resize(static_cast<size_t>(kTile) * most_cols);
    own.inner.resize(static_cast<size_t>(kTile) * most_rank);
    own.scratch = zeros<uint8_t>(scratch_bytes(kernels.panel, most_cols));
    own.tokens = zeros<float>(token_floats);
    if (has_texts) own.text = zeros<float>(TextHead::floats(shape.head_dim, shape.max_rows, kernels.panel));
  }
  if (shape.num_pages) pages_ = zeros<uint8_t>(static_cast<size_t>(page_bytes()) * shape.num_pages);
  if (shape.num_lanes)
    drafts_ = zeros<float>(static_cast<size_t>(shape.num_lanes) * shape.most_drafts * shape.draft_floats);
  if (shape.num_states) states_ = zeros<float>(static_cast<size_t>(shape.state_floats) * shape.num_states);
}

void Plan::run(const Batch& batch, int begin, int end) {
  for (Taken& each : taken_) each.count.store(0, std::memory_order_relaxed);
  for (int piece = 0; piece < batch.num_pieces; ++piece)
    std::fill_n(piece_of_row_.begin() + batch.pieces[piece].row, batch.pieces[piece].length, piece);
  if (!text_starts_.empty()) count_text_blocks(batch);
  count_stretches(batch);
  pool_.run([&](int thread) { work(batch, begin, end, thread); });
}

void Plan::copy_page(int from, int to) { std::memcpy(page(to), page(from), page_bytes()); }

std::array<double, kOps> Plan::take_profile() { return std::exchange(seconds_, {}); }

void Plan::work(const Batch& batch, int begin, int end, int thread) {
  // If a run begins after the gather, its steps work on the requested rows.
  bool gathered = false;
  for (int i = 0; i < begin; ++i) gathered |= static_cast<Op>(steps_[i].op) == Op::kGather;
  const Step* before = nullptr;
  Input input{};
  double started = now();
  for (int i = begin; i < end; ++i) {
    const Step& step = steps_[i];
    const int rows = gathered ? batch.num_asked : batch.num_rows;
    if (static_cast<Op>(step.op) == Op::kLinear) {
      if (!same_input(step, before)) input = prepare(step, rows, thread);
      const Step* activation = activation_after(i, end);
      linear(step, input, rows, activation, own_[thread], taken_[i].count);
      before = &step;
      if (activation) ++i;
    } else {
      execute(step, batch, rows, thread, taken_[i].count);
      before = nullptr;
    }
    pool_.meet();
    gathered |= static_cast<Op>(step.op) == Op::kGather;
    if (thread == 0) {
      const double ended = now();
      seconds_[step.op] += ended - std::exchange(started, ended);
    }
  }
}

void Plan::execute(const Step& step, const Batch& batch, int rows, int thread, std::atomic<int>& taken) {
  auto each_row = [&](auto body) {
    const Share mine(rows, thread, pool_.size());
    for (int i = mine.begin; i < mine.end; ++i) body(i);
  };
  switch (static_cast<Op>(step.op)) {
    case Op::kEmbed: each_row([&](int i) { embed(step, batch, i); }); break;
    case Op::kNorm:
      each_row([&](int i) {
        const float* from = row(step.in, i) + step.in_at;
        float* to = row(step.out, i) + step.out_at;
        if (step.bias) kernels_.layer_norm(from, step.cols, step.norm, step.bias, step.eps, to);
        else kernels_.norm(from, step.cols, step.norm, step.eps, adds(step), to);
      });
      break;
    case Op::kScale:
      each_row([&](int i) {
        const float* from = row(step.in, i) + step.in_at;
        float* to = row(step.out, i) + step.out_at;
        if (adds(step)) kernels_.add_scaled(from, step.scale, step.cols, to);
        else kernels_.scale(from, step.cols, step.scale, to);
      });
      break;
    case Op::kApply: apply(step, rows, thread); break;
    case Op::kPosition:
      each_row([&](int i) { unpack_row(*step.matrix, kernels_.panel, position(batch, i), row(step.out, i)); });
      break;
    case Op::kAttend:
      keep(step, batch, thread);
      pool_.meet();
      attend(step, batch, taken);
      break;
    case Op::kGather: {
      const Share mine(batch.num_asked, thread, pool_.size());
      for (int i = mine.begin; i < mine.end; ++i)
        std::memcpy(row(step.out, i), row(step.in, batch.asked[i]), sizeof(float) * step.cols);
      break;
    }
    case Op::kSoftcap: each_row([&](int i) { kernels_.softcap(row(step.out, i), step.cols, step.cap); }); break;
    case Op::kSample:
      take(taken, batch.num_draws, 1, [&](int i, int) {
        Draw& draw = batch.draws[i];
        draw_token(kernels_, row(step.in, draw.row), step.cols, draw, own_[thread].draws);
      });
      break;
    case Op::kAdapt: adapt(step, batch, rows, thread); break;
    case Op::kActivate:
      each_row([&](int i) {
        kernels_.activate(row(step.in, i) + step.in_at, step.width, static_cast<After>(step.after),
                          row(step.out, i) + step.out_at);
      });
      break;
    case Op::kAttendText: attend_texts(step, batch, thread, taken); break;
    case Op::kType: each_row([&](int i) { type(step, batch, i); }); break;
    case Op::kRoute:
    case Op::kChoose: route(step, rows, thread); break;
    case Op::kExpand:
    case Op::kExpert: multiply_slots(step, rows, thread, taken); break;
    case Op::kCombine: each_row([&](int i) { combine(step, i); }); break;
    case Op::kGate: each_row([&](int i) { gate(step, i); }); break;
    case Op::kMultiply: each_row([&](int i) { multiply(step, i); }); break;
    case Op::kConvolve: convolve(step, batch, taken); break;
    case Op::kDelta:
    case Op::kSsm: recur(step, batch, thread, taken); break;
    case Op::kLinear: break;
  }
}

void Plan::embed(const Step& step, const Batch& batch, int index) {
  float* to = row(step.out, index);
  unpack_row(*step.matrix, kernels_.panel, batch.tokens[index], to);
  if (step.scale != 1.0f)
    for (int col = 0; col < step.cols; ++col) to[col] *= step.scale;
}

// Split by columns, so that even a single row has work for all threads.
void Plan::apply(const Step& step, int rows, int thread) {
  const Share mine(step.cols / kernels_.panel, thread, pool_.size());
  for (int i = 0; i < rows; ++i)
    kernels_.apply(row(step.out, i) + mine.begin * kernels_.panel, (mine.end - mine.begin) * kernels_.panel,
                   static_cast<After>(step.after));
}

int Plan::position(const Batch& batch, int index) const {
  const Piece& piece = batch.pieces[piece_of_row_[index]];
  return piece.start + index - piece.row;
}

// Converts rows of a matmul's input to the kernel's format.
Plan::Input Plan::prepare(const Step& step, int rows, int thread) {
  Own& own = own_[thread];
  const bool few = rows <= kFewRows;
  const int unit = reads_codes(step) ? kernels_.tile : 1;
  const Share mine = few ? Share(rows, 0, 1) : Share(rows, thread, pool_.size(), unit);
  if (reads_codes(step)) {
    uint8_t* codes = few ? own.codes.data() : codes_.get();
    for (int i = mine.begin; i < mine.end; ++i) quantize(step, row(step.in, i) + step.in_at, i, rows, own, codes);
    if (!few) pool_.meet();
    return {codes, 0};
  }
  if (!step.norm) return {row(step.in, 0) + step.in_at, buffers_[step.in].shape.cols};
  float* normed = few ? own.normed.data() : normed_.data();
  for (int i = mine.begin; i < mine.end; ++i)
    kernels_.norm(row(step.in, i) + step.in_at, step.cols, step.norm, step.eps, false,
                  normed + static_cast<long>(i) * step.cols);
  if (!few) pool_.meet();
  return {normed, step.cols};
}

// Quantizes a row of a matmul's input, normed if need be.
void Plan::quantize(const Step& step, const float* from, int index, int rows, Own& own, uint8_t* codes) const {
  if (step.norm) {
    kernels_.norm(from, step.cols, step.norm, step.eps, false, own.normed.data());
    from = own.normed.data();
  }
  kernels_.quantize(from, index, rows, step.cols, codes);
}

// The activation of a matmul's whole output, if it is the next step: it is applied piece by piece, while a piece is in
// the cache.
const Step* Plan::activation_after(int index, int end) const {
  if (index + 1 >= end) return nullptr;
  const Step &step = steps_[index], &next = steps_[index + 1];
  const bool follows = static_cast<Op>(next.op) == Op::kApply && next.out == step.out && step.out_at == 0 &&
                       next.cols == step.matrix->rows && static_cast<After>(step.after) == After::kStore;
  return follows ? &next : nullptr;
}

void Plan::linear(const Step& step, const Input& input, int rows, const Step* activation, Own& own,
                  std::atomic<int>& taken) {
  const int panels = step.matrix->rows / kernels_.panel;
  // Rows of floats are taken in blocks that stay in the cache from panel to panel. Codes have blocks of their own.
  const bool coded = reads_codes(step);
  const int block = coded ? rows : float_block(step.cols);
  const long row_bytes = coded ? kernels_.row_bytes(step.cols) : input.stride * static_cast<long>(sizeof(float));
  take(taken, panels, piece_size(panels, pool_.size(), kPanels), [&](int begin, int end) {
    for (int at = 0; at < rows; at += block) {
      const int count = std::min(block, rows - at);
      kernels_.linear(*step.matrix, static_cast<const uint8_t*>(input.x) + at * row_bytes, input.stride, count, begin,
                      end, static_cast<After>(step.after), step.bias, row(step.out, at) + step.out_at,
                      buffers_[step.out].shape.cols, own.scratch.get());
      if (!activation) continue;
      for (int i = at; i < at + count; ++i)
        kernels_.apply(row(step.out, i) + begin * kernels_.panel, (end - begin) * kernels_.panel,
                       static_cast<After>(activation->after));
    }
  });
}

// Rows of one adapter are processed together, one tile at a time. With few rows, threads share the columns instead.
void Plan::adapt(const Step& step, const Batch& batch, int rows, int thread) {
  if (!batch.adapters) return;
  const bool few = rows <= kFewRows;
  const int panel = kernels_.panel;
  Share columns = few ? Share(step.width / panel, thread, pool_.size()) : Share(step.width / panel, 0, 1);
  columns.begin *= panel, columns.end *= panel;
  const Share mine = few ? Share(rows, 0, 1) : Share(rows, thread, pool_.size());
  for (int begin = mine.begin, end; begin < mine.end; begin = end) {
    const int adapter = batch.adapters[begin];
    for (end = begin + 1; end < mine.end && end < begin + kTile && batch.adapters[end] == adapter;) ++end;
    if (adapter >= 0 && step.terms[adapter].rank > 0)
      add_term(step, step.terms[adapter], begin, end, columns, own_[thread]);
  }
}

void Plan::add_term(const Step& step, const Term& term, int begin, int end, Share columns, Own& own) {
  const float* x = row(step.in, begin) + step.in_at;
  long stride = buffers_[step.in].shape.cols;
  if (step.norm) {
    for (int i = 0; i < end - begin; ++i)
      kernels_.norm(x + i * stride, step.cols, step.norm, step.eps, false,
                    own.normed.data() + static_cast<long>(i) * step.cols);
    x = own.normed.data(), stride = step.cols;
  }
  // Ranks outside, rows inside: each row of A, and then of B, is read once per tile.
  float* inner = own.inner.data();
  for (int r = 0; r < term.rank; ++r)
    for (int i = 0; i < end - begin; ++i)
      inner[r * kTile + i] = kernels_.dot(term.a + static_cast<long>(r) * step.cols, x + i * stride, step.cols);
  for (int r = 0; r < term.rank; ++r)
    for (int i = begin; i < end; ++i)
      kernels_.add_scaled(term.b + static_cast<long>(r) * step.width + columns.begin, inner[r * kTile + i - begin],
                          columns.end - columns.begin, row(step.out, i) + step.out_at + columns.begin);
}

// Norms and rotates heads in place, and stores keys and values in their pages.
void Plan::keep(const Step& step, const Batch& batch, int thread) {
  const int dim = shape_.head_dim, heads = shape_.heads + shape_.kv_heads;
  const Attention attention = how(step);
  const Share mine(batch.num_rows, thread, pool_.size());
  for (int i = mine.begin; i < mine.end; ++i) {
    const Piece& piece = batch.pieces[piece_of_row_[i]];
    const int position = piece.start + i - piece.row;
    float* x = row(step.in, i) + step.in_at;
    if (step.norm)
      for (int head = 0; head < heads; ++head)
        kernels_.norm(x + head * dim, dim, step.norm + head * dim, step.eps, false, x + head * dim);
    if (step.rotation >= 0) {
      const Rotation& rotation = rotations_[step.rotation];
      const long at = static_cast<long>(position) * (rotation.rotated / 2);
      kernels_.rotate(x, heads, dim, rotation.rotated, rotation.cosines + at, rotation.sines + at);
    }
    for (int head = 0; head < shape_.kv_heads; ++head) {
      const float* key = x + (shape_.heads + head) * dim;
      kernels_.keep(attention, pages_of(step.layer, head), piece.pages, position, key, key + shape_.kv_heads * dim);
    }
  }
}

// Divides a step's tokens into stretches that attend together: as many as kernels take, unless that would leave threads
// without work.
void Plan::count_stretches(const Batch& batch) {
  const int each = shape_.heads / shape_.kv_heads, units = batch.num_rows * shape_.kv_heads;
  const int most = std::clamp(units / (pool_.size() * kPieces), 1, std::max(1, kQueries / each));
  stretches_.clear();
  for (int i = 0; i < batch.num_pieces; ++i) {
    const Piece& piece = batch.pieces[i];
    for (int at = 0, count; at < piece.length; at += count) {
      const int left_of_page = kPage - (piece.start + at) % kPage;
      count = std::min({most, left_of_page, piece.length - at});
      stretches_.push_back({piece.row + at, count});
    }
  }
}

void Plan::attend(const Step& step, const Batch& batch, std::atomic<int>& taken) {
  const Attention attention = how(step);
  const int each = shape_.heads / shape_.kv_heads, dim = shape_.head_dim;
  // Heads that share keys are taken together, unless that would leave threads without work.
  const int stretches = static_cast<int>(stretches_.size());
  const bool apart = stretches * shape_.kv_heads < pool_.size();
  const int units = apart ? shape_.heads : shape_.kv_heads, queries = apart ? 1 : each;
  const int count = stretches * units;
  const long stride = buffers_[step.in].shape.cols, out_stride = buffers_[step.out].shape.cols;
  take(taken, count, std::max(1, count / (pool_.size() * 16)), [&](int begin, int end) {
    for (int unit = begin; unit < end; ++unit) {
      const auto [i, tokens] = stretches_[unit / units];
      const int head = unit % units * queries;
      const Piece& piece = batch.pieces[piece_of_row_[i]];
      kernels_.attend(attention, pages_of(step.layer, head / each), piece.pages, piece.start + i - piece.row, tokens,
                      queries, step.bias ? step.bias + head : nullptr, row(step.in, i) + step.in_at + head * dim,
                      stride, row(step.out, i) + step.out_at + head * dim, out_stride);
    }
  });
}

// A page holds all layers and heads of its tokens.
HeadPages Plan::pages_of(int layer, int head) const {
  const long before = static_cast<long>(layer) * shape_.kv_heads + head;
  return {pages_.get() + before * head_page_bytes(shape_.head_dim, static_cast<Cells>(shape_.cells)), page_bytes()};
}

long Plan::page_bytes() const {
  return head_page_bytes(shape_.head_dim, static_cast<Cells>(shape_.cells)) * shape_.num_layers * shape_.kv_heads;
}

Attention Plan::how(const Step& step) const {
  return {shape_.head_dim, step.window, static_cast<Cells>(shape_.cells), step.scale, step.cap};
}

}  // namespace ostro
