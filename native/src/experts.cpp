// The plan's operations of a mixture of experts. Only the matrices of experts that have tokens are read.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "plan.h"
#include "work.h"

namespace ostro {
namespace {

// One expert's matrix, of several that were packed one below the other.
Matrix part_of(const Matrix& all, int expert, int experts) {
  const Layout layout(all);
  Matrix part = all;
  part.rows = all.rows / experts;
  part.data += layout.codes / experts * expert;
  part.scale_data += layout.scales / experts * expert;
  part.minimum_data += layout.minima / experts * expert;
  return part;
}

}  // namespace

void Plan::route(const Step& step, int rows, int thread) {
  const Share mine(rows, thread, pool_.size());
  for (int i = mine.begin; i < mine.end; ++i) {
    const float* from = row(step.in, i) + step.in_at;
    if (static_cast<Op>(step.op) == Op::kChoose) routing_.take(i, from, from + step.chosen, step.experts, step.chosen);
    else if (static_cast<After>(step.after) == After::kSigmoid)
      routing_.choose_by_sigmoids(i, from, step.weights, step.experts, step.chosen, step.normalized != 0, step.eps,
                                  step.scale);
    else routing_.choose(i, from, step.experts, step.chosen, step.normalized != 0);
  }
  pool_.meet();
  if (thread == 0) routing_.sort(rows, step.experts, step.chosen);
}

// The row that a slot's matmul reads: the token's for kExpand, the slot's own for kExpert.
const float* Plan::slot_row(const Step& step, int slot) const {
  const bool expands = static_cast<Op>(step.op) == Op::kExpand;
  return row(step.in, expands ? routing_.token(slot) : slot) + step.in_at;
}

// Copies slots' rows, normed if need be.
void Plan::gather_slots(const Step& step, int begin, int end, float* to) const {
  for (int slot = begin; slot < end; ++slot, to += step.cols) {
    const float* from = slot_row(step, slot);
    if (step.norm) kernels_.norm(from, step.cols, step.norm, step.eps, false, to);
    else std::memcpy(to, from, sizeof(float) * step.cols);
  }
}

// Quantizes all slots' rows, each expert's as a matmul of their own.
void Plan::quantize_slots(const Step& step, int thread) {
  const long row_bytes = kernels_.row_bytes(step.cols);
  const Share mine(routing_.end(routing_.num_active() - 1), thread, pool_.size());
  for (int active = 0; active < routing_.num_active(); ++active) {
    const int first = routing_.begin(active), end = routing_.end(active);
    for (int slot = std::max(first, mine.begin); slot < std::min(end, mine.end); ++slot)
      quantize(step, slot_row(step, slot), slot - first, end - first, own_[thread], codes_.get() + first * row_bytes);
  }
  pool_.meet();
}

// Threads take panels of one expert at a time.
void Plan::multiply_slots(const Step& step, int rows, int thread, std::atomic<int>& taken) {
  if (!routing_.holds(step.experts, step.chosen) || !routing_.num_active()) return;
  const bool codes = reads_codes(step);
  // All experts of a single token read the same row.
  const bool single = rows == 1 && static_cast<Op>(step.op) == Op::kExpand;
  Own& own = own_[thread];
  if (codes && single) {
    quantize(step, slot_row(step, 0), 0, 1, own, own.codes.data());
  } else if (codes) {
    quantize_slots(step, thread);
  }
  const long row_bytes = kernels_.row_bytes(step.cols), stride = buffers_[step.out].shape.cols;
  const int panels = step.matrix->rows / step.experts / kernels_.panel;
  const int size = std::min(piece_size(panels * routing_.num_active(), pool_.size(), kPanels), panels);
  const int pieces = (panels + size - 1) / size;
  take(taken, pieces * routing_.num_active(), 1, [&](int piece, int) {
    const int active = piece / pieces, expert = routing_.expert(active);
    const int begin = piece % pieces * size, end = std::min(panels, begin + size);
    const Matrix matrix = part_of(*step.matrix, expert, step.experts);
    const float* bias = step.bias ? step.bias + static_cast<long>(expert) * matrix.rows : nullptr;
    const After after = static_cast<After>(step.after);
    auto multiply = [&](const void* x, int first, int count) {
      kernels_.linear(matrix, x, step.cols, count, begin, end, step.ungated ? After::kStore : after, bias,
                      row(step.out, first) + step.out_at, stride, own.scratch.get());
      for (int slot = first; step.ungated && slot < first + count; ++slot)
        kernels_.apply(row(step.out, slot) + step.out_at + begin * kernels_.panel, (end - begin) * kernels_.panel, after);
    };
    const int first = routing_.begin(active), last = routing_.end(active);
    if (codes) {
      multiply(single ? own.codes.data() : codes_.get() + first * row_bytes, first, last - first);
      return;
    }
    for (int at = first; at < last; at += kTile) {
      const int stop = std::min(at + kTile, last);
      gather_slots(step, at, stop, own.normed.data());
      multiply(own.normed.data(), at, stop - at);
    }
  });
}

// Adds up each token's experts, always in the same order.
void Plan::combine(const Step& step, int index) const {
  if (!routing_.holds(step.experts, step.chosen)) return;
  float* to = row(step.out, index) + step.out_at;
  for (int rank = 0; rank < step.chosen; ++rank) {
    const int slot = routing_.slot(index, rank, step.chosen);
    const float weight = routing_.weight(index, rank, step.chosen) * step.scale;
    const bool first = rank == 0 && static_cast<After>(step.after) == After::kStore;
    if (slot < 0) {
      // As if a row of zeros were added, or of NaN.
      for (int col = 0; col < step.cols; ++col) to[col] = (first ? 0 : to[col]) + weight;
      continue;
    }
    const float* from = row(step.in, slot) + step.in_at;
    if (first) kernels_.scale(from, step.cols, weight, to);
    else kernels_.add_scaled(from, weight, step.cols, to);
  }
}

void Plan::gate(const Step& step, int index) const {
  const float logit = row(step.in, index)[step.in_at];
  float* x = row(step.out, index) + step.out_at;
  kernels_.scale(x, step.cols, 1.0f / (1.0f + std::exp(-logit)), x);
}

}  // namespace ostro
