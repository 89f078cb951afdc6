// Plans on several threads, several at a time: what the sanitizers for threads watch. The same tokens must come out
// however many threads there are, and whatever else runs beside.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "pack.h"
#include "plan.h"
#include "twins.h"

using namespace ostro;

namespace {

constexpr int kHidden = 64, kHeads = 4, kKvHeads = 2, kDim = 16, kLayers = 2, kVocab = 64, kPages = 8, kRows = 48;
constexpr int kQkv = (kHeads + 2 * kKvHeads) * kDim;

// Numbers that look random and are the same everywhere.
struct Numbers {
  uint32_t state = 7;
  float next() {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(state >> 8) / (1 << 24) - 0.5f;
  }
  std::vector<float> many(size_t count, float scale, float base = 0) {
    std::vector<float> found(count);
    for (float& each : found) each = base + scale * next();
    return found;
  }
};

struct Packed {
  Matrix matrix{};
  std::vector<uint8_t> bytes;

  Packed(Numbers& numbers, int rows, int cols, int panel, int bits) {
    const std::vector<float> values = numbers.many(static_cast<size_t>(rows) * cols, 0.6f);
    std::vector<const uint8_t*> addresses(rows);
    for (int row = 0; row < rows; ++row) addresses[row] = reinterpret_cast<const uint8_t*>(values.data() + row * cols);
    matrix.rows = rows, matrix.cols = cols;
    if (!choose_format(kF32, bits, matrix)) std::abort();
    const Layout layout(matrix);
    bytes.resize(layout.total() + Layout::kAlign);
    pack_matrix(kF32, addresses.data(), matrix, panel, 2, bytes.data());
    matrix.data = bytes.data();
    matrix.scale_data = bytes.data() + layout.scales_at();
    matrix.minimum_data = bytes.data() + layout.minima_at();
  }
};

constexpr int kRank = 3, kExperts = 16, kChosen = 3, kTaps = 4, kStates = 3, kLanes = 2;

// A decoder of two layers, as lowering makes it, each with a mixer of either recurrence, attention, an MLP, whose gates and
// ups have adapters, and experts.
struct Model {
  std::vector<Packed> matrices;
  std::vector<float> norm, cosines, sines;
  std::vector<float> a, b, sinks;
  std::vector<Term> terms;
  std::vector<Step> steps;
  std::vector<Recurrence> recurrences;
  std::vector<float> filters, numbers_of_heads;
  int state_floats = 0, draft_floats = 0;

  Model(int panel, int bits) {
    Numbers numbers;
    matrices.reserve(1 + 9 * kLayers);
    recurrences.reserve(2 * kLayers);
    norm = numbers.many(kHidden, 0.2f, 1.0f);
    for (int position = 0; position < kPages * kPage; ++position)
      for (int pair = 0; pair < kDim / 2; ++pair) {
        const float angle = position * std::pow(10000.0f, -pair / static_cast<float>(kDim / 2));
        cosines.push_back(std::cos(angle)), sines.push_back(std::sin(angle));
      }
    const auto matrix = [&](int rows, int cols) {
      matrices.emplace_back(numbers, rows, cols, panel, bits);
      return &matrices.back().matrix;
    };
    sinks = numbers.many(kHeads, 1.0f);
    a = numbers.many(kRank * kHidden, 0.4f), b = numbers.many(kRank * 2 * kHidden, 0.4f);
    terms = {{kRank, 0, a.data(), b.data()}, {0, 0, nullptr, nullptr}};
    const Matrix* embedding = matrix(kVocab, kHidden);
    add(Op::kEmbed, 0, 0, kHidden, After::kStore, embedding, false);
    filters = numbers.many(kTaps * kQkv, 0.8f);
    numbers_of_heads = numbers.many(3 * kHeads, 1.0f, -1.0f);
    for (int layer = 0; layer < kLayers; ++layer) {
      add(Op::kLinear, 0, 1, kHidden, After::kStore, matrix(kQkv, kHidden), true);
      mix(layer ? Op::kSsm : Op::kDelta);
      add(Op::kLinear, 2, 0, kHeads * kDim, After::kAdd, matrix(kHidden, kHeads * kDim), false);
      add(Op::kLinear, 0, 1, kHidden, After::kStore, matrix(kQkv, kHidden), true);
      Step& attend = add(Op::kAttend, 1, 2, 0, After::kStore, nullptr, false);
      attend.layer = layer, attend.scale = 0.25f;
      if (layer) attend.bias = sinks.data(), attend.bias_size = kHeads;
      add(Op::kLinear, 2, 0, kHeads * kDim, After::kAdd, matrix(kHidden, kHeads * kDim), false);
      add(Op::kLinear, 0, 6, kHidden, After::kStore, matrix(2 * kHidden, kHidden), true);
      Step& adapt = add(Op::kAdapt, 0, 6, kHidden, After::kStore, nullptr, true);
      adapt.width = 2 * kHidden, adapt.terms = terms.data(), adapt.num_terms = static_cast<int32_t>(terms.size());
      add(Op::kActivate, 6, 3, 0, After::kSilu, nullptr, false).width = kHidden;
      add(Op::kLinear, 3, 0, kHidden, After::kAdd, matrix(kHidden, kHidden), false);
      add(Op::kLinear, 0, 7, kHidden, After::kStore, matrix(kExperts, kHidden), true);
      add_mixed(Op::kRoute, 7, 0, 0, After::kStore, nullptr, false).normalized = layer;
      add_mixed(Op::kExpand, 0, 8, kHidden, layer ? After::kClampedSilu : After::kSilu,
                matrix(kExperts * 2 * kHidden, kHidden), true);
      add_mixed(Op::kExpert, 8, 9, kHidden, After::kStore, matrix(kExperts * kHidden, kHidden), false);
      add_mixed(Op::kCombine, 9, 0, kHidden, After::kAdd, nullptr, false);
    }
    add(Op::kGather, 0, 4, kHidden, After::kStore, nullptr, false);
    add(Op::kNorm, 4, 4, kHidden, After::kStore, nullptr, true);
    add(Op::kLinear, 4, 5, kHidden, After::kStore, embedding, false);
    add(Op::kSample, 5, 0, kVocab, After::kStore, nullptr, false);
  }

  // From products in buffer 1, of which the first numbers serve as decays and gates as well.
  void mix(Op op) {
    const int inputs = kKvHeads * 2 * kDim + kHeads * kDim;
    Step& filter = add(Op::kConvolve, 1, 10, inputs, After::kSilu, nullptr, false);
    recurrences.push_back({state_floats, kTaps, 0, 0, 0, 0, 0, draft_floats});
    draft_floats += inputs;
    filter.recurrence = &recurrences.back(), state_floats += (kTaps - 1) * inputs;
    filter.weights = filters.data(), filter.weights_size = static_cast<int32_t>(filters.size());
    Step& recur = add(op, 10, 2, 0, After::kStore, nullptr, false);
    recurrences.push_back({state_floats, 0, kHeads, kKvHeads, op == Op::kDelta, kDim, kDim, draft_floats});
    draft_floats += kHeads * static_cast<int>(recurrences.back().draft_floats());
    recur.recurrence = &recurrences.back(), state_floats += static_cast<int>(recurrences.back().floats());
    recur.weights = numbers_of_heads.data(), recur.weights_size = 3 * kHeads;
    recur.beside = 1, recur.eps = 1e-6f, recur.scale = 0.25f;
    Step& gate = add(Op::kMultiply, 1, 2, kDim, After::kSilu, nullptr, true);
    gate.width = kHeads * kDim, gate.normalized = op == Op::kSsm;
  }

  Step& add_mixed(Op op, int in, int out, int cols, After after, const Matrix* matrix, bool normed) {
    Step& step = add(op, in, out, cols, after, matrix, normed);
    step.experts = kExperts, step.chosen = kChosen;
    return step;
  }

  Step& add(Op op, int in, int out, int cols, After after, const Matrix* matrix, bool normed) {
    Step step{};
    step.op = static_cast<int32_t>(op), step.in = in, step.out = out, step.cols = cols;
    step.after = static_cast<int32_t>(after), step.scale = 1.0f, step.matrix = matrix;
    if (normed) step.norm = norm.data(), step.norm_size = kHidden, step.eps = 1e-5f;
    steps.push_back(step);
    return steps.back();
  }
};

std::vector<int> generate(const Kernels& kernels, const Model& model, int threads, Cells cells) {
  const Shape shape{kHeads, kKvHeads, kDim, kLayers, kPages, static_cast<int32_t>(cells), kRows, threads,
                    kStates, model.state_floats, kLanes, 1, model.draft_floats, 0};
  const std::vector<BufferShape> buffers{{kRows, kHidden}, {kRows, kQkv}, {kRows, kHidden},
                                         {kRows, kHidden}, {4, kHidden},  {4, kVocab},
                                         {kRows, 2 * kHidden},
                                         {kRows, kExperts},
                                         {kRows * kChosen, kHidden},
                                         {kRows * kChosen, kHidden},
                                         {kRows, kQkv}};
  const std::vector<Rotation> rotations{{model.cosines.data(), model.sines.data(), kDim, kPages * kPage}};
  const std::string why = why_no_plan(kernels, shape, buffers, rotations, model.steps);
  if (!why.empty()) std::printf("refused: %s\n", why.c_str()), std::exit(1);
  const BatchLimits limits(shape, buffers, rotations, model.steps);
  Plan plan(kernels, shape, buffers, rotations, model.steps);
  const int32_t pages[2][4] = {{0, 2, 4, 6}, {1, 3, 5, 7}};
  std::vector<int32_t> tokens, last(3, 1);
  for (int i = 0; i < kRows; ++i) tokens.push_back((5 * i + 3) % kVocab);
  std::vector<int> found;
  int length = kRows / 2, own = 0;
  for (int start = 0; start + length <= 4 * kPage; start += length, length = 1) {
    // One goes on from a copy of its state each time.
    const Capture capture{length, 2 - own};
    // The other drafts a token after each of its own, which is wrong.
    const int drafts = start && start + 1 < 4 * kPage;
    const int rows = 2 * length + drafts;
    const Piece pieces[2] = {{0, start, length, 4, pages[0], std::exchange(own, 2 - own), 1, &capture, 0, 0, 0, 0},
                             {length, start, length + drafts, 4, pages[1], 1, 0, nullptr, drafts, 0, kLanes - 1, 0}};
    const int32_t asked[2] = {length - 1, 2 * length - 1};
    const unsigned key = 99u + static_cast<unsigned>(start);
    const std::vector<uint32_t> words((kVocab + 31) / 32, 0xA5A5A5A5u);
    Draw draws[2] = {{0, 0, 0, 0, 0, 0, 1, 0, nullptr, 0, 0},
                     {1, 0, 0.8f, 0, 0, 0, 0.9, key, words.data(), static_cast<int32_t>(words.size()), 0}};
    // One sequence has an adapter, and the other none, or one that adds nothing here.
    std::vector<int32_t> adapters(rows, start % 2 ? 1 : -1);
    std::fill_n(adapters.begin(), length, 0);
    const Batch batch{rows, 2, 2, 2, start ? last.data() : tokens.data(), pieces, asked, draws, adapters.data(),
                      nullptr};
    const std::string refusal = why_no_run(limits, batch, 0, limits.steps);
    if (!refusal.empty()) std::printf("refused: %s\n", refusal.c_str()), std::exit(1);
    plan.run(batch, 0, limits.steps);
    for (int i = 0; i < 2; ++i) found.push_back(last[i] = draws[i].token);
  }
  return found;
}

}  // namespace

int main() {
  int failures = 0, runs = 0;
  std::vector<const Kernels*> tables(kernels_begin(), kernels_begin() + kernels_count());
  // Without AMX, its twin shows how threads share its tiles of rows.
  tables.push_back(&kTiles16Kernels);
  for (const Kernels* table : tables) {
    const Kernels& kernels = *table;
    if (!kernels.runs_here()) continue;
    for (int bits : {0, 8, 4}) {
      const Model model(kernels.panel, bits);
      for (Cells cells : {Cells::kFloat, Cells::kHalf, Cells::kInt8}) {
        const std::vector<int> alone = generate(kernels, model, 1, cells);
        if (table == &kTiles16Kernels) ++runs, failures += generate(kPlain16Kernels, model, 1, cells) != alone;
        std::vector<std::vector<int>> beside(3);
        std::vector<std::thread> callers;
        for (size_t i = 0; i < beside.size(); ++i)
          callers.emplace_back([&, i] { beside[i] = generate(kernels, model, static_cast<int>(i) + 2, cells); });
        for (std::thread& caller : callers) caller.join();
        for (const std::vector<int>& tokens : beside) ++runs, failures += tokens != alone;
      }
    }
  }
  std::printf("%d runs, %d with other tokens\n", runs, failures);
  return failures || !runs;
}
