// Implements the same distribution, from the same random numbers, as ostro.backends.sampling.sampler and
// ostro.backends.sampling.distribution: see there for top-k, top-p, min-p and the race. Weights differ from torch's in their last
// digits.
#include "sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace ostro {
namespace {

constexpr int kRacers = 128;  // tokens that race as one entry first
constexpr int kCandidates = 256;

// SplitMix64.
double exponential(uint64_t key, uint64_t index) {
  uint64_t word = key + (index + 1) * 0x9E3779B97F4A7C15ull;
  word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9ull;
  word = (word ^ word >> 27) * 0x94D049BB133111EBull;
  word ^= word >> 31;
  return -std::log1p(-((static_cast<double>(word >> 12) + 0.5) * 0x1p-52));
}

// The first to arrive if entry i takes noise[first + i] / weight.
template <typename Weight>
int winner(uint64_t key, int first, int count, Weight weight) {
  int found = 0;
  double least = INFINITY;
  for (int i = 0; i < count; ++i) {
    const double weighs = weight(i);
    if (weighs <= 0.0) continue;
    const double arrives = exponential(key, first + i) / weighs;
    if (arrives < least) least = arrives, found = i;
  }
  return found;
}

int race(const std::vector<float>& weights, int vocab, uint64_t key) {
  const int blocks = (vocab + kRacers - 1) / kRacers;
  auto length = [&](int block) { return std::min(kRacers, vocab - block * kRacers); };
  const int block = winner(key, kRacers, blocks, [&](int i) {
    const float* from = weights.data() + static_cast<long>(i) * kRacers;
    float sums[8] = {};
    const int count = length(i);
    int at = 0;
    for (; at + 8 <= count; at += 8)
      for (int lane = 0; lane < 8; ++lane) sums[lane] += from[at + lane];
    for (; at < count; ++at) sums[0] += from[at];
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  });
  const float* within = weights.data() + static_cast<long>(block) * kRacers;
  return block * kRacers + winner(key, 0, length(block), [&](int i) { return within[i]; });
}

// Sorts by score, ties by lower id: a gap below the best is never negative, so its bits sort like an integer.
void rank(const float* logits, int vocab, float best, int count, std::vector<uint64_t>& ranking) {
  ranking.resize(vocab);
  for (int id = 0; id < vocab; ++id) {
    const float gap = best + 0.0f - logits[id];
    uint32_t bits;
    std::memcpy(&bits, &gap, sizeof bits);
    ranking[id] = static_cast<uint64_t>(bits) << 32 | static_cast<uint32_t>(id);
  }
  if (count < vocab) {
    std::nth_element(ranking.begin(), ranking.begin() + count, ranking.end());
    ranking.resize(count);
  }
  std::sort(ranking.begin(), ranking.end());
}

// How many of the ranked tokens are kept; -1 if there are too few candidates to tell.
int kept_of(const std::vector<uint64_t>& ranking, const std::vector<float>& weights, double share, float min_p) {
  double sum = 0.0;
  for (size_t i = 0; i < ranking.size(); ++i) {
    const float weight = weights[static_cast<uint32_t>(ranking[i])];
    if (weight < min_p) return static_cast<int>(i);
    sum += weight;
    if (sum >= share) return static_cast<int>(i) + 1;
  }
  return -1;
}

double total(const std::vector<float>& weights, int vocab) {
  double sum = 0.0;
  for (int at = 0; at < vocab; at += kRacers) {
    float block = 0.0f;
    for (int i = at; i < std::min(vocab, at + kRacers); ++i) block += weights[i];
    sum += block;
  }
  return sum;
}

void keep_best(const float* logits, int vocab, Draw& draw, DrawScratch& scratch) {
  auto& weights = scratch.weights;
  auto& ranking = scratch.ranking;
  int count = draw.top_k > 0 ? std::min(draw.top_k, vocab) : std::min(kCandidates, vocab);
  rank(logits, vocab, draw.best, count, ranking);
  double whole = 0.0;
  if (draw.top_k > 0) {
    for (const uint64_t each : ranking) whole += weights[static_cast<uint32_t>(each)];
  } else {
    whole = total(weights, vocab);
  }
  const double share = draw.top_p < 1.0 ? draw.top_p * whole : INFINITY;
  int kept = kept_of(ranking, weights, share, draw.min_p);
  if (kept < 0 && draw.top_k == 0 && count < vocab) {
    rank(logits, vocab, draw.best, vocab, ranking);
    kept = kept_of(ranking, weights, share, draw.min_p);
  }
  if (kept < 0) kept = static_cast<int>(ranking.size());
  std::vector<std::pair<uint32_t, float>> stays;
  for (int i = 0; i < std::max(1, kept); ++i) {
    const auto id = static_cast<uint32_t>(ranking[i]);
    stays.emplace_back(id, weights[id]);
  }
  std::fill(weights.begin(), weights.begin() + vocab, 0.0f);
  for (const auto& [id, weight] : stays) weights[id] = weight;
}

// A ban adds infinity below instead of writing it: NaN or an infinite logit then stays visible to the check of the row.
void mask(const float* logits, int vocab, const uint32_t* allowed, float* masked) {
  constexpr int kBits = 32;
  for (int at = 0; at < vocab; at += kBits) {
    const uint32_t word = allowed[at / kBits];
    const int count = std::min(kBits, vocab - at);
    if (word == ~0u) {
      std::copy_n(logits + at, count, masked + at);
    } else if (word == 0) {
      for (int i = 0; i < count; ++i) masked[at + i] = logits[at + i] - INFINITY;
    } else {
      for (int i = 0; i < count; ++i) masked[at + i] = logits[at + i] - (word >> i & 1 ? 0.0f : INFINITY);
    }
  }
}

}  // namespace

void draw_token(const Kernels& kernels, const float* logits, int vocab, Draw& draw, DrawScratch& scratch) {
  if (draw.allowed) {
    scratch.masked.resize(vocab);
    mask(logits, vocab, draw.allowed, scratch.masked.data());
    logits = scratch.masked.data();
  }
  float best = -INFINITY;
  bool numbers = true;
  for (int i = 0; i < vocab; ++i) {
    best = logits[i] > best ? logits[i] : best;
    numbers &= logits[i] == logits[i];
  }
  draw.best = numbers ? best : NAN;
  if (!std::isfinite(draw.best) || draw.temperature == 0.0f) {
    draw.token = static_cast<int32_t>(std::find(logits, logits + vocab, best) - logits);
    if (draw.token == vocab) draw.token = 0;
    return;
  }
  scratch.weights.resize(vocab);
  kernels.weigh(logits, vocab, best, std::max(draw.temperature, 1e-37f), scratch.weights.data());
  if (draw.top_k > 0 || draw.top_p < 1.0) {
    keep_best(logits, vocab, draw, scratch);
  } else if (draw.min_p > 0.0f) {
    for (int i = 0; i < vocab; ++i)
      if (scratch.weights[i] < draw.min_p) scratch.weights[i] = 0.0f;
  }
  draw.token = race(scratch.weights, vocab, draw.key);
}

}  // namespace ostro
