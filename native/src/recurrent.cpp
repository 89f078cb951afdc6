// The plan's operations of mixers that keep a state. Which thread takes which channels or heads changes no result.
#include "recurrent.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "work.h"

namespace ostro {
namespace {

// Tokens that are prepared together, and then advance a tile while it is in the cache.
constexpr int kTokens = 64;
// Numbers per token beside its vectors.
constexpr int kNumbers = 3;

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Calls body(begin, end) for a piece's tokens, kTokens at a time, and captured(slot) where a state is captured.
template <typename Body, typename Captured>
void each_stretch(const Piece& piece, Body body, Captured captured) {
  const Capture *next = piece.captures, *const last = next + piece.num_captures;
  for (int at = 0, end; at < piece.length; at = end) {
    end = std::min(piece.length, at + kTokens);
    if (next != last) end = std::min(end, next->after);
    body(at, end);
    for (; next != last && next->after == end; ++next) captured(next->slot);
  }
}

}  // namespace

long recurred_floats(const Recurrence& recurrence) {
  return static_cast<long>(kTokens) * (2 * recurrence.rows + kStateLanes + kNumbers);
}

void Plan::copy_state(int from, int to) {
  pool_.run([&](int thread) {
    const Share mine(shape_.state_floats, thread, pool_.size());
    std::memcpy(state(to) + mine.begin, state(from) + mine.begin, sizeof(float) * (mine.end - mine.begin));
  });
}

// Norms groups of columns apart, each as wide as the step's `cols`.
void Plan::multiply(const Step& step, int index) const {
  const float* gates = row(step.in, index) + step.in_at;
  float* x = row(step.out, index) + step.out_at;
  const auto norm_groups = [&] {
    for (int at = 0; step.norm && at < step.width; at += step.cols)
      kernels_.norm(x + at, step.cols, step.norm + at, step.eps, false, x + at);
  };
  if (!step.normalized) norm_groups();
  kernels_.multiply(gates, step.width, static_cast<After>(step.after), x);
  if (step.normalized) norm_groups();
}

// Split by sequences and by channels.
void Plan::convolve(const Step& step, const Batch& batch, std::atomic<int>& taken) {
  const int panels = step.cols / kernels_.panel, wanted = pool_.size() * kPieces;
  const int each = std::max(1, panels * batch.num_pieces / wanted), blocks = (panels + each - 1) / each;
  take(taken, batch.num_pieces * blocks, 1, [&](int unit, int) {
    const int at = unit % blocks * each;
    convolve(step, batch.pieces[unit / blocks], at * kernels_.panel, std::min(each, panels - at) * kernels_.panel);
  });
}

void Plan::convolve(const Step& step, const Piece& piece, int at, int count) {
  const int taps = step.recurrence->taps, kept = taps - 1;
  const long channels = step.cols;
  const auto inputs_in = [&](int slot) { return state(slot) + step.recurrence->state_at + at; };
  float* own = inputs_in(piece.state);
  if (piece.start == 0)
    for (int i = 0; i < kept; ++i) std::fill_n(own + i * channels, count, 0.0f);
  // The inputs at a position of the piece; those before it are in the state.
  const auto input = [&](int position) -> const float* {
    if (position < 0) return own + (kept + position) * channels;
    return row(step.in, piece.row + position) + step.in_at + at;
  };
  const float* inputs[kMostTaps];
  for (int i = 0; i < piece.length; ++i) {
    for (int tap = 0; tap < taps; ++tap) inputs[tap] = input(i + tap - kept);
    kernels_.filter(taps, inputs, step.weights + at, channels, step.bias ? step.bias + at : nullptr,
                    static_cast<After>(step.after), count, row(step.out, piece.row + i) + step.out_at + at);
  }
  const auto keep = [&](int after, float* to) {
    for (int i = 0; i < kept; ++i) std::memmove(to + i * channels, input(after - kept + i), sizeof(float) * count);
  };
  for (int i = 0; i < piece.num_captures; ++i) keep(piece.captures[i].after, inputs_in(piece.captures[i].slot));
  keep(piece.length, own);
}

// Split by sequences and by heads, or where these are few, by tiles of a head's matrix.
void Plan::recur(const Step& step, const Batch& batch, int thread, std::atomic<int>& taken) {
  const Recurrence& how = *step.recurrence;
  const int heads = how.heads, tiles = state_tiles(how.cols);
  const int parts = batch.num_pieces * heads < 2 * pool_.size() ? tiles : 1;
  take(taken, batch.num_pieces * heads * parts, 1, [&](int unit, int) {
    const Share share(tiles, unit % parts, parts);
    recur(step, batch.pieces[unit / parts / heads], unit / parts % heads, share, own_[thread].tokens.data());
  });
}

void Plan::recur(const Step& step, const Piece& piece, int head, Share tiles, float* room) {
  const Recurrence& how = *step.recurrence;
  const int rows = how.rows, group = how.group_of(head);
  const bool is_delta = static_cast<Op>(step.op) == Op::kDelta;
  const long tile_floats = static_cast<long>(rows) * kStateLanes, stride = buffers_[step.in].shape.cols;
  const auto tile_in = [&](int slot, int tile) {
    return state(slot) + step.recurrence->state_at + (static_cast<long>(head) * state_tiles(how.cols) + tile) * tile_floats;
  };
  if (piece.start == 0) std::fill_n(tile_in(piece.state, tiles.begin), (tiles.end - tiles.begin) * tile_floats, 0.0f);
  // In a row: for a delta net, queries and keys of the groups, then values of the heads; for Mamba2, inputs of the heads,
  // then b and c of the groups.
  const int grouped = how.groups * rows, own = head * how.cols;
  const int values_at = is_delta ? 2 * grouped + own : own;
  const int first_at = (is_delta ? 0 : how.heads * how.cols) + group * rows, second_at = first_at + grouped;
  float *const q = room, *const k = q + kTokens * rows, *const values = k + kTokens * rows;
  float *const kept = values + kTokens * kStateLanes, *const strength = kept + kTokens, *const likeness = strength + kTokens;
  const float decay = -std::exp(step.weights[head]), bias = step.weights[how.heads + head];
  const auto unit = [&](const float* x, float scale, float* to) {
    const float factor = scale / std::sqrt(kernels_.dot(x, x, rows) + step.eps);
    for (int i = 0; i < rows; ++i) to[i] = x[i] * factor;
  };
  const auto advance = [&](int begin, int end) {
    const int count = end - begin;
    const float* const x = row(step.in, piece.row + begin) + step.in_at;
    for (int i = 0; i < count; ++i) {
      const float* numbers = row(step.beside, piece.row + begin + i) + step.beside_at;
      if (is_delta) {
        unit(x + i * stride + first_at, step.scale, q + i * rows);
        unit(x + i * stride + second_at, 1.0f, k + i * rows);
        likeness[i] = kernels_.dot(q + i * rows, k + i * rows, rows);
        strength[i] = sigmoid(numbers[head]);
        kept[i] = std::exp(decay * softplus(numbers[how.heads + head] + bias));
      } else {
        strength[i] = softplus(numbers[head] + bias);
        kept[i] = std::exp(decay * strength[i]);
      }
    }
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      const int at = tile * kStateLanes, width = std::min(kStateLanes, how.cols - at);
      for (int i = 0; i < count; ++i) {
        float* to = values + i * kStateLanes;
        std::fill(std::copy_n(x + i * stride + values_at + at, width, to), to + kStateLanes, 0.0f);
      }
      float* matrix = tile_in(piece.state, tile);
      if (is_delta) kernels_.delta(rows, {count, q, k, values, kept, strength, likeness}, matrix);
      else
        kernels_.ssm(rows, {count, x + first_at, x + second_at, stride, values, kept, strength,
                            step.weights[2 * how.heads + head]},
                     matrix);
      for (int i = 0; i < count; ++i)
        std::copy_n(values + i * kStateLanes, width, row(step.out, piece.row + begin + i) + step.out_at + own + at);
    }
  };
  each_stretch(piece, advance, [&](int slot) {
    std::memcpy(tile_in(slot, tiles.begin), tile_in(piece.state, tiles.begin),
                sizeof(float) * (tiles.end - tiles.begin) * tile_floats);
  });
}

}  // namespace ostro
