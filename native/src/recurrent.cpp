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
  const long rows = recurrence.rows, values = static_cast<long>(state_tiles(recurrence.cols)) * kStateLanes;
  // One number more than is kept of a draft: a gate.
  return kTokens * (2 * rows + values + kTokenNumbers + 1) + rows * kStateLanes;
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
  // While decoding, one pass over a sequence's inputs.
  if (piece.length == 1 && !piece.num_captures && !piece.drafts && !piece.applied) {
    kernels_.filter_one(taps, own, row(step.in, piece.row) + step.in_at + at, step.weights + at, channels,
                        step.bias ? step.bias + at : nullptr, static_cast<After>(step.after), count,
                        row(step.out, piece.row) + step.out_at + at);
    return;
  }
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
    recur(step, batch.pieces[unit / parts / heads], unit / parts % heads, share, own_[thread].tokens.get());
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
  float *const kept = values + static_cast<long>(kTokens) * state_tiles(how.cols) * kStateLanes;
  float *const strength = kept + kTokens, *const likeness = strength + kTokens, *const steps = likeness + kTokens;
  float* const spare = steps + kTokens;
  const float decay = -std::exp(step.weights[head]), bias = step.weights[how.heads + head];
  const auto input = [&](int token) { return row(step.in, piece.row + token) + step.in_at; };
  // A token's values for a tile: [tile][token][kStateLanes], because rows of a buffer often compete for the same lines
  // of the cache, and are read and written once.
  const auto value = [&](int tile, int i) { return values + (static_cast<long>(tile) * kTokens + i) * kStateLanes; };
  const auto width = [&](int tile) { return std::min(kStateLanes, how.cols - tile * kStateLanes); };
  const auto take_values = [&](const float* from, int i) {
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      float* const to = value(tile, i);
      std::fill(std::copy_n(from + tile * kStateLanes, width(tile), to), to + kStateLanes, 0.0f);
    }
  };
  // Prepares the first tokens of the room: all that they bring to the matrix.
  const auto prepare = [&](int begin, int count) {
    for (int i = 0; i < count; ++i) {
      const float *x = input(begin + i), *numbers = row(step.beside, piece.row + begin + i) + step.beside_at;
      float *one = first + i * rows, *two = second + i * rows;
      take_values(x + values_at, i);
      if (is_delta) {
        kernels_.unit(x + first_at, rows, step.scale, step.eps, one);
        kernels_.unit(x + second_at, rows, 1.0f, step.eps, two);
        likeness[i] = kernels_.dot(one, two, rows);
        strength[i] = numbers[head];
        steps[i] = numbers[how.heads + head];
      } else {
        std::copy_n(x + first_at, rows, one);
        std::copy_n(x + second_at, rows, two);
        likeness[i] = 0;
        strength[i] = numbers[head];
      }
    }
    const int padded = (count + kernels_.panel - 1) / kernels_.panel * kernels_.panel;
    kernels_.decay(padded, bias, decay, is_delta ? steps : strength, kept);
    if (is_delta) kernels_.apply(strength, padded, After::kSigmoid);
  };
  // Advances a tile by prepared tokens, whose values become what they read.
  const auto advance = [&](int count, int tile, float* matrix, const float* next) {
    float* const v = value(tile, 0);
    if (is_delta) kernels_.delta(rows, {count, first, second, v, kept, strength, likeness, next}, matrix);
    else
      kernels_.ssm(rows, {count, first, second, v, kept, strength, step.weights[2 * how.heads + head], next}, matrix);
  };
  const auto advance_all = [&](int count) {
    for (int tile = tiles.begin; tile < tiles.end; ++tile) {
      const float* next = tile + 1 < tiles.end ? tile_in(piece.state, tile + 1) : nullptr;
      advance(count, tile, tile_in(piece.state, tile), next);
    }
  };
  // Stores what tokens read.
  const auto put = [&](int begin, int count) {
    for (int i = 0; i < count; ++i) {
      float* out = row(step.out, piece.row + begin + i) + step.out_at + own;
      for (int tile = tiles.begin; tile < tiles.end; ++tile)
        std::copy_n(value(tile, i), width(tile), out + tile * kStateLanes);
    }
  };
  // Of a draft, as many floats as Recurrence::draft_floats.
  const auto kept_draft = [&](int index) { return draft(how, piece, index) + head * how.draft_floats(); };
  if (piece.applied) {
    for (int i = 0; i < piece.applied; ++i) {
      const float* from = kept_draft(i);
      std::copy_n(from, rows, first + i * rows);
      std::copy_n(from + rows, rows, second + i * rows);
      take_values(from + 2 * rows, i);
      const float* numbers = from + 2 * rows + how.cols;
      kept[i] = numbers[0], strength[i] = numbers[1], likeness[i] = numbers[2];
    }
    advance_all(piece.applied);
  }
  const auto stretch = [&](int begin, int end) {
    prepare(begin, end - begin);
    advance_all(end - begin);
    put(begin, end - begin);
  };
  each_stretch(piece, stretch, [&](int slot) {
    std::memcpy(tile_in(slot, tiles.begin), tile_in(piece.state, tiles.begin),
                sizeof(float) * (tiles.end - tiles.begin) * tile_floats);
  });
  if (!piece.drafts) return;
  const int begin = known(piece);
  prepare(begin, piece.drafts);
  for (int i = 0; i < piece.drafts; ++i) {
    float* to = std::copy_n(first + i * rows, rows, kept_draft(i));
    to = std::copy_n(second + i * rows, rows, to);
    to = std::copy_n(input(begin + i) + values_at, how.cols, to);
    to[0] = kept[i], to[1] = strength[i], to[2] = likeness[i];
  }
  for (int tile = tiles.begin; tile < tiles.end; ++tile) {
    std::copy_n(tile_in(piece.state, tile), tile_floats, spare);
    advance(piece.drafts, tile, spare, nullptr);
  }
  put(begin, piece.drafts);
}

}  // namespace ostro
