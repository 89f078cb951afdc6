// The plan's operations of encoders: attention within whole texts, which are computed in one step and leave nothing in
// pages, and token types.
#include <algorithm>

#include "pack.h"
#include "plan.h"
#include "work.h"

namespace ostro {
namespace {

// Queries of a head that a thread takes at a time, a multiple of kTextRows: many, as it packs keys and values first.
constexpr int kTextBlock = 120;

int text_blocks(const Piece& text) { return (text.length + kTextBlock - 1) / kTextBlock; }

}  // namespace

// Numbers the work of attention: text by text, head by head, block by block of queries.
void Plan::count_text_blocks(const Batch& batch) {
  int count = 0;
  for (int i = 0; i < batch.num_pieces; ++i) {
    text_starts_[i] = count;
    count += text_blocks(batch.pieces[i]) * shape_.heads;
  }
  text_starts_[batch.num_pieces] = count;
}

void Plan::attend_texts(const Step& step, const Batch& batch, int thread, std::atomic<int>& taken) {
  const int dim = shape_.head_dim, heads = shape_.heads;
  if (step.rotation >= 0) {
    const Rotation& rotation = rotations_[step.rotation];
    const Share mine(batch.num_rows, thread, pool_.size());
    for (int i = mine.begin; i < mine.end; ++i) {
      const long at = static_cast<long>(position(batch, i)) * (rotation.rotated / 2);
      kernels_.rotate(row(step.in, i) + step.in_at, 2 * heads, dim, rotation.rotated, rotation.cosines + at,
                      rotation.sines + at);
    }
    pool_.meet();
  }
  const long stride = buffers_[step.in].shape.cols, out_stride = buffers_[step.out].shape.cols;
  const auto starts = text_starts_.begin();
  const int count = starts[batch.num_pieces];
  take(taken, count, std::max(1, count / (pool_.size() * 16)), [&](int begin, int end) {
    int packed = -1;
    for (int unit = begin; unit < end; ++unit) {
      const int text = static_cast<int>(std::upper_bound(starts, starts + batch.num_pieces, unit) - starts) - 1;
      const Piece& piece = batch.pieces[text];
      const int blocks = text_blocks(piece), within = unit - starts[text], at = within % blocks * kTextBlock;
      const int head = within / blocks;
      const TextHead room(own_[thread].text.get(), dim, piece.length, kernels_.panel);
      const float* q = row(step.in, piece.row) + step.in_at + head * dim;
      if (packed != unit - within % blocks) {
        packed = unit - within % blocks;
        kernels_.pack_head(dim, piece.length, q + heads * dim, q + 2 * heads * dim, stride, room);
      }
      const TextAttention attention{dim, piece.length, step.window, step.scale};
      kernels_.attend_text(attention, room, at, std::min(piece.length, at + kTextBlock), q, stride,
                           row(step.out, piece.row) + step.out_at + head * dim, out_stride);
    }
  });
}

void Plan::type(const Step& step, const Batch& batch, int index) const {
  unpack_row(*step.matrix, kernels_.panel, batch.types ? batch.types[index] : 0, row(step.out, index));
}

}  // namespace ostro
