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

// x *= activation(gates)
static void multiply(const float* gates, int count, ostro::After after, float* x) {
  for (int at = 0; at < count; at += kPanel) {
    Floats gate = load(gates + at);
    if (after == ostro::After::kSilu) gate = silu(gate);
    else if (after == ostro::After::kSigmoid) gate = all(1.0f) / (all(1.0f) + exponential(all(0.0f) - gate));
    store(x + at, load(x + at) * gate);
  }
}

// A tile of a delta net's state, [rows][kStateLanes], over some tokens. What is read of the state is read before it
// changes: with kept = e, a = Sᵀk and b = Sᵀq,
//     d = strength * (v - e a)        out = e b + (q·k) d        S = e S + k dᵀ
static void delta_tile(int rows, const DeltaTokens& tokens, float* state) {
  for (int t = 0; t < tokens.count; ++t) {
    const float *q = tokens.q + static_cast<long>(t) * rows, *k = tokens.k + static_cast<long>(t) * rows;
    Floats a[kTurns][kVectors], b[kTurns][kVectors];
    for (int turn = 0; turn < kTurns; ++turn)
      for (int i = 0; i < kVectors; ++i) a[turn][i] = b[turn][i] = zeros();
    const auto read = [&](int row, int turn) OSTRO_BODY {
      for (int i = 0; i < kVectors; ++i) {
        const Floats s = load(state + static_cast<long>(row) * kStateLanes + i * kPanel);
        a[turn][i] = madd(a[turn][i], s, k[row]);
        b[turn][i] = madd(b[turn][i], s, q[row]);
      }
    };
    int row = 0;
    for (; row + kTurns <= rows; row += kTurns) each_lane<kTurns>([&]<int turn>() OSTRO_BODY { read(row + turn, turn); });
    for (; row < rows; ++row) read(row, 0);
    const float kept = tokens.kept[t], strength = tokens.strength[t], likeness = tokens.likeness[t];
    float* v = tokens.v + static_cast<long>(t) * kStateLanes;
    Floats d[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      for (int turn = 1; turn < kTurns; ++turn) a[0][i] = a[0][i] + a[turn][i], b[0][i] = b[0][i] + b[turn][i];
      d[i] = (load(v + i * kPanel) - a[0][i] * kept) * strength;
      store(v + i * kPanel, madd(b[0][i] * kept, d[i], likeness));
    }
    for (row = 0; row < rows; ++row)
      for (int i = 0; i < kVectors; ++i) {
        float* at = state + static_cast<long>(row) * kStateLanes + i * kPanel;
        store(at, madd(load(at) * kept, d[i], k[row]));
      }
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
    const auto advance = [&](int row, int turn) OSTRO_BODY {
      for (int i = 0; i < kVectors; ++i) {
        float* at = state + static_cast<long>(row) * kStateLanes + i * kPanel;
        const Floats s = madd(load(at) * kept, scaled[i], b[row]);
        store(at, s);
        sums[turn][i] = madd(sums[turn][i], s, c[row]);
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
