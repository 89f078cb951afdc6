// Mixers that keep a state: causal filters, and the recurrences of gated delta nets and Mamba2. Each token takes one step
// of the recurrence, in prompts too, and the order of every sum depends on nothing else: so a prompt can be cut anywhere.
// Included once per instruction set.
#pragma once

namespace OSTRO_ISA {

constexpr int kVectors = kStateLanes / kPanel;
// Sums go by turns into so many vectors, where a few would wait for each other.
constexpr int kTurns = kVectors < 4 ? 2 : 1;

// out = activation(bias + the sum of weights * inputs), with a row of inputs for each tap, oldest first.
static void filter(int taps, const float* const* inputs, const float* weights, long stride, const float* bias,
                   ostro::After after, int count, float* out) {
  for (int at = 0; at < count; at += kPanel) {
    Floats sum = load(inputs[0] + at) * load(weights + at);
    for (int tap = 1; tap < taps; ++tap) sum = madd(sum, load(inputs[tap] + at), load(weights + tap * stride + at));
    if (bias) sum = sum + load(bias + at);
    store(out + at, after == ostro::After::kSilu ? silu(sum) : sum);
  }
}

// The same for one token, whose latest inputs move on while they are at hand.
static void filter_one(int taps, float* kept, const float* x, const float* weights, long stride, const float* bias,
                       ostro::After after, int count, float* out) {
  for (int at = 0; at < count; at += kPanel) {
    Floats sum = load(taps > 1 ? kept + at : x + at) * load(weights + at);
    for (int tap = 1; tap < taps; ++tap) {
      float* const older = kept + (tap - 1) * stride + at;
      const Floats input = load(tap + 1 < taps ? older + stride : x + at);
      sum = madd(sum, input, load(weights + tap * stride + at));
      store(older, input);
    }
    if (bias) sum = sum + load(bias + at);
    store(out + at, after == ostro::After::kSilu ? silu(sum) : sum);
  }
}

// x *= activation(gates)
static void multiply(const float* gates, int count, ostro::After after, float* x) {
  for (int at = 0; at < count; at += kPanel) {
    Floats gate = load(gates + at);
    if (after == ostro::After::kSilu) gate = silu(gate);
    else if (after == ostro::After::kSigmoid) gate = sigmoid(gate);
    store(x + at, load(x + at) * gate);
  }
}

// out = scale * x / sqrt(sum of squares + eps)
static void unit(const float* x, int count, float scale, float eps, float* out) {
  const float factor = scale / std::sqrt(float_dot(x, x, count) + eps);
  int at = 0;
  for (; at + kPanel <= count; at += kPanel) store(out + at, load(x + at) * factor);
  for (; at < count; ++at) out[at] = x[at] * factor;
}

// steps = softplus(steps + bias), kept = exp(decay * steps)
static void decay(int count, float bias, float decay, float* steps, float* kept) {
  for (int at = 0; at < count; at += kPanel) {
    const Floats step = softplus(load(steps + at) + all(bias));
    store(steps + at, step);
    store(kept + at, exponential(step * decay));
  }
}

// Prefetches a row of the tile that follows.
OSTRO_INLINE void fetch_row(const float* tile, int row) {
  for (int i = 0; i < kStateLanes; i += 16) fetch(tile + static_cast<long>(row) * kStateLanes + i);
}

// What a token reads of a tile, by turns: Sᵀk and Sᵀq.
struct DeltaReads {
  Floats a[kTurns][kVectors], b[kTurns][kVectors];
};

// Rows of a tile, one after the other. If `updates`, each is first advanced by a token with key k and what d brings; if
// `reads`, the next token, with key k_next and query q_next, reads it then. The next tile is prefetched, if given.
template <bool updates, bool reads>
OSTRO_INLINE void delta_rows(int rows, float* state, const float* k, float kept, const Floats (&d)[kVectors],
                             const float* k_next, const float* q_next, const float* next_tile, DeltaReads& sums) {
  if constexpr (reads)
    for (int turn = 0; turn < kTurns; ++turn)
      for (int i = 0; i < kVectors; ++i) sums.a[turn][i] = sums.b[turn][i] = zeros();
  const auto advance = [&](int row, int turn) OSTRO_BODY {
    if (next_tile) fetch_row(next_tile, row);
    const Factor own = updates ? factor(k[row]) : Factor{}, read = reads ? factor(k_next[row]) : Factor{},
                 asked = reads ? factor(q_next[row]) : Factor{};
    for (int i = 0; i < kVectors; ++i) {
      float* at = state + static_cast<long>(row) * kStateLanes + i * kPanel;
      Floats s = load(at);
      if constexpr (updates) {
        s = madd(s * kept, d[i], own);
        store(at, s);
      }
      if constexpr (reads) {
        sums.a[turn][i] = madd(sums.a[turn][i], s, read);
        sums.b[turn][i] = madd(sums.b[turn][i], s, asked);
      }
    }
  };
  int row = 0;
  for (; row + kTurns <= rows; row += kTurns)
    each_lane<kTurns>([&]<int turn>() OSTRO_BODY { advance(row + turn, turn); });
  for (; row < rows; ++row) advance(row, 0);
}

// A tile of a delta net's state, [rows][kStateLanes], over some tokens. What is read of the state is read before it
// changes: with kept = e, a = Sᵀk and b = Sᵀq,
//     d = strength * (v - e a)        out = e b + (q·k) d        S = e S + k dᵀ
// While a row is at hand, it is advanced by one token and read by the next.
static void delta_tile(int rows, const DeltaTokens& tokens, float* state) {
  if (!tokens.count) return;
  DeltaReads sums;
  Floats d[kVectors];
  const float *q = tokens.q, *k = tokens.k;
  delta_rows<false, true>(rows, state, nullptr, 0.0f, d, k, q, nullptr, sums);
  for (int t = 0; t < tokens.count; ++t, q += rows, k += rows) {
    const float kept = tokens.kept[t], strength = tokens.strength[t], likeness = tokens.likeness[t];
    float* v = tokens.v + static_cast<long>(t) * kStateLanes;
    for (int i = 0; i < kVectors; ++i) {
      Floats a = sums.a[0][i], b = sums.b[0][i];
      for (int turn = 1; turn < kTurns; ++turn) a = a + sums.a[turn][i], b = b + sums.b[turn][i];
      d[i] = (load(v + i * kPanel) - a * kept) * strength;
      store(v + i * kPanel, madd(b * kept, d[i], likeness));
    }
    if (t + 1 < tokens.count) delta_rows<true, true>(rows, state, k, kept, d, k + rows, q + rows, nullptr, sums);
    else delta_rows<true, false>(rows, state, k, kept, d, nullptr, nullptr, tokens.next, sums);
  }
}

// A tile of Mamba2's state, [rows][kStateLanes], over some tokens: S = kept * S + u bᵀ, out = S c.
static void ssm_tile(int rows, const SsmTokens& tokens, float* state) {
  for (int t = 0; t < tokens.count; ++t) {
    const float *b = tokens.b + static_cast<long>(t) * rows, *c = tokens.c + static_cast<long>(t) * rows;
    float* u = tokens.u + static_cast<long>(t) * kStateLanes;
    const float kept = tokens.kept[t];
    Floats scaled[kVectors], sums[kTurns][kVectors];
    for (int i = 0; i < kVectors; ++i) {
      scaled[i] = load(u + i * kPanel) * tokens.step[t];
      for (int turn = 0; turn < kTurns; ++turn) sums[turn][i] = zeros();
    }
    const float* const next = t + 1 == tokens.count ? tokens.next : nullptr;
    const auto advance = [&](int row, int turn) OSTRO_BODY {
      if (next) fetch_row(next, row);
      const Factor written = factor(b[row]), read = factor(c[row]);
      for (int i = 0; i < kVectors; ++i) {
        float* at = state + static_cast<long>(row) * kStateLanes + i * kPanel;
        const Floats s = madd(load(at) * kept, scaled[i], written);
        store(at, s);
        sums[turn][i] = madd(sums[turn][i], s, read);
      }
    };
    int row = 0;
    for (; row + kTurns <= rows; row += kTurns)
      each_lane<kTurns>([&]<int turn>() OSTRO_BODY { advance(row + turn, turn); });
    for (; row < rows; ++row) advance(row, 0);
    for (int i = 0; i < kVectors; ++i) {
      for (int turn = 1; turn < kTurns; ++turn) sums[0][i] = sums[0][i] + sums[turn][i];
      store(u + i * kPanel, madd(sums[0][i], load(u + i * kPanel), tokens.skip));
    }
  }
}

}  // namespace OSTRO_ISA
