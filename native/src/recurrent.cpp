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

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Tokens that advance a state.
int known(const Piece& piece) { return piece.length - piece.drafts; }

// Calls body(begin, end) for these tokens, kTokens at a time, and captured(slot) where a state is captured.
template <typename Body, typename Captured>
void each_stretch(const Piece& piece, Body body, Captured captured) {
  const Capture *next = piece.captures, *const last = next + piece.num_captures;
  for (int at = 0, end; at < known(piece); at = end) {
    end = std::min(known(piece), at + kTokens);
    if (next != last) end = std::min(end, next->after);
    body(at, end);
    for (; next != last && next->after == end; ++next) captured(next->slot);
  }
}

}  // namespace

long recurred_floats(const Recurrence& recurrence) {
  return static_cast<long>(kTokens) * (2 * recurrence.rows + kStateLanes + kTokenNumbers) +
         static_cast<long>(recurrence.rows) * kStateLanes;
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
  const Recurrence& how = *step.recurrence;
  const int taps = how.taps, kept = taps - 1;
  const long channels = step.cols;
  const auto inputs_in = [&](int slot) { return state(slot) + how.state_at + at; };
  float* own = inputs_in(piece.state);
  if (piece.start == 0)
    for (int i = 0; i < kept; ++i) std::fill_n(own + i * channels, count, 0.0f);
  // Keeps the last inputs up to a position. Those before the first position are in the state.
  const auto keep = [&](int end, float* to, const auto& input) {
    for (int i = 0; i < kept; ++i) {
      const int position = end - kept + i;
      const float* from = position < 0 ? own + (kept + position) * channels : input(position);
      std::memmove(to + i * channels, from, sizeof(float) * count);
    }
  };
  if (piece.applied) keep(piece.applied, own, [&](int position) { return draft(how, piece, position) + at; });
  const auto input = [&](int position) -> const float* {
    return row(step.in, piece.row + position) + step.in_at + at;
  };
  const float* inputs[kMostTaps];
  for (int i = 0; i < piece.length; ++i) {
    for (int tap = 0; tap < taps; ++tap) {
      const int position = i + tap - kept;
      inputs[tap] = position < 0 ? own + (kept + position) * channels : input(position);
    }
    kernels_.filter(taps, inputs, step.weights + at, channels, step.bias ? step.bias + at : nullptr,
                    static_cast<After>(step.after), count, row(step.out, piece.row + i) + step.out_at + at);
  }
  for (int i = 0; i < piece.num_captures; ++i) keep(piece.captures[i].after, inputs_in(piece.captures[i].slot), input);
  for (int i = 0; i < piece.drafts; ++i)
    std::copy_n(input(known(piece) + i), count, draft(how, piece, i) + at);
  keep(known(piece), own, input);
}

// Split by sequences and by heads, or where these are few, by tiles of a head's matrix.
void Plan::recur(const Step& step, const Batch& batch, int thread, std::atomic<int>& taken) {
  const Recurrence& how = *step.recurrence;
  const int heads = how.heads, tiles = state_tiles(how.cols);
  // What a head keeps of drafts is one thread's.
  const bool drafts = std::any_of(batch.pieces, batch.pieces + batch.num_pieces,
                                  [](const Piece& piece) { return piece.drafts || piece.applied; });
  const int parts = !drafts && batch.num_pieces * heads < 2 * pool_.size() ? tiles : 1;
  take(taken, batch.num_pieces * heads * parts, 1, [&](int unit, int) {
    const Share share(tiles, unit % parts, parts);
    recur(step, batch.pieces[unit / parts / heads], unit / parts % heads, share, own_[thread].tokens.data());
  });
}

void Plan::recur(const Step& step, const Piece& piece, int head, Share tiles, float* room) {
  const Recurrence& how = *step.recurrence;
  const int rows = how.rows, group = how.group_of(head);
  const bool is_delta = static_cast<Op>(step.op) == Op::kDelta;
  const long tile_floats = static_cast<long>(rows) * kStateLanes;
  const auto tile_in = [&](int slot, int tile) {
    return state(slot) + how.state_at + (static_cast<long>(head) * state_tiles(how.cols) + tile) * tile_floats;
  };
  if (piece.start == 0) std::fill_n(tile_in(piece.state, tiles.begin), (tiles.end - tiles.begin) * tile_floats, 0.0f);
  // In a row: for a delta net, queries and keys of the groups, then values of the heads; for Mamba2, inputs of the heads,
  // then b and c of the groups.
  const int grouped = how.groups * rows, own = head * how.cols;
  const int values_at = is_delta ? 2 * grouped + own : own;
  const int first_at = (is_delta ? 0 : how.heads * how.cols) + group * rows, second_at = first_at + grouped;
  float *const first = room, *const second = first + kTokens * rows, *const values = second + kTokens * rows;
  float *const kept = values + kTokens * kStateLanes, *const strength = kept + kTokens;
  float *const likeness = strength + kTokens, *const spare = likeness + kTokens;
  const float decay = -std::exp(step.weights[head]), bias = step.weights[how.heads + head];
  const auto input = [&](int token) { return row(step.in, piece.row + token) + step.in_at; };
  const auto unit = [&](const float* x, float scale, float* to) {
    const float factor = scale / std::sqrt(kernels_.dot(x, x, rows) + step.eps);
    for (int i = 0; i < rows; ++i) to[i] = x[i] * factor;
  };
  // Makes what a token brings to the matrix, all but its values.
  const auto prepare = [&](int token, int at) {
    const float *x = input(token), *numbers = row(step.beside, piece.row + token) + step.beside_at;
    float *one = first + at * rows, *two = second + at * rows;
    if (is_delta) {
      unit(x + first_at, step.scale, one);
      unit(x + second_at, 1.0f, two);
      likeness[at] = kernels_.dot(one, two, rows);
      strength[at] = sigmoid(numbers[head]);
      kept[at] = std::exp(decay * softplus(numbers[how.heads + head] + bias));
    } else {
      std::copy_n(x + first_at, rows, one);
      std::copy_n(x + second_at, rows, two);
      likeness[at] = 0;
      strength[at] = softplus(numbers[head] + bias);
      kept[at] = std::exp(decay * strength[at]);
    }
  };
  // Advances a tile by prepared tokens. `from` gives each one's values, and `to` where what it reads belongs.
  const auto advance = [&](int count, int tile, float* matrix, const auto& from, const auto& to) {
    const int at = tile * kStateLanes, width = std::min(kStateLanes, how.cols - at);
    for (int i = 0; i < count; ++i) {
      float* value = values + i * kStateLanes;
      std::fill(std::copy_n(from(i) + at, width, value), value + kStateLanes, 0.0f);
    }
    if (is_delta) kernels_.delta(rows, {count, first, second, values, kept, strength, likeness}, matrix);
    else
      kernels_.ssm(rows, {count, first, second, values, kept, strength, step.weights[2 * how.heads + head]}, matrix);
    for (int i = 0; i < count; ++i)
      if (float* out = to(i)) std::copy_n(values + i * kStateLanes, width, out + at);
  };
  const auto output = [&](int token) { return row(step.out, piece.row + token) + step.out_at + own; };
  // Of a draft, as many floats as Recurrence::draft_floats.
  const auto kept_draft = [&](int index) { return draft(how, piece, index) + head * how.draft_floats(); };
  if (piece.applied) {
    for (int i = 0; i < piece.applied; ++i) {
      const float* from = kept_draft(i);
      std::copy_n(from, rows, first + i * rows);
      std::copy_n(from + rows, rows, second + i * rows);
      const float* numbers = from + 2 * rows + how.cols;
      kept[i] = numbers[0], strength[i] = numbers[1], likeness[i] = numbers[2];
    }
    for (int tile = tiles.begin; tile < tiles.end; ++tile)
      advance(piece.applied, tile, tile_in(piece.state, tile), [&](int i) { return kept_draft(i) + 2 * rows; },
              [](int) -> float* { return nullptr; });
  }
  const auto stretch = [&](int begin, int end) {
    for (int token = begin; token < end; ++token) prepare(token, token - begin);
    for (int tile = tiles.begin; tile < tiles.end; ++tile)
      advance(end - begin, tile, tile_in(piece.state, tile), [&](int i) { return input(begin + i) + values_at; },
              [&](int i) { return output(begin + i); });
  };
  each_stretch(piece, stretch, [&](int slot) {
    std::memcpy(tile_in(slot, tiles.begin), tile_in(piece.state, tiles.begin),
                sizeof(float) * (tiles.end - tiles.begin) * tile_floats);
  });
  if (!piece.drafts) return;
  const int begin = known(piece);
  for (int i = 0; i < piece.drafts; ++i) {
    prepare(begin + i, i);
    float* to = std::copy_n(first + i * rows, rows, kept_draft(i));
    to = std::copy_n(second + i * rows, rows, to);
    to = std::copy_n(input(begin + i) + values_at, how.cols, to);
    to[0] = kept[i], to[1] = strength[i], to[2] = likeness[i];
  }
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    std::copy_n(tile_in(piece.state, tile), tile_floats, spare);
    advance(piece.drafts, tile, spare, [&](int i) { return input(begin + i) + values_at; },
            [&](int i) { return output(begin + i); });
  }
}

}  // namespace ostro
