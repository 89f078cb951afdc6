#include "routing.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace ostro {

void Routing::reserve(int rows, int experts, int chosen) {
  const size_t slots = static_cast<size_t>(rows) * chosen;
  if (slots > experts_.size())
    experts_.resize(slots), weights_.resize(slots), slots_.resize(slots), tokens_.resize(slots);
  if (static_cast<size_t>(experts) > counts_.size()) counts_.resize(experts);
  active_.reserve(counts_.size());
  begins_.reserve(counts_.size() + 1);
}

template <typename Value>
bool Routing::choose_best(int row, int experts, int chosen, Value value) {
  int32_t* best = experts_.data() + static_cast<size_t>(row) * chosen;
  // Their values, until the caller has weights.
  float* values = weights_.data() + static_cast<size_t>(row) * chosen;
  bool numbers = true;
  int count = 0;
  for (int expert = 0; expert < experts; ++expert) {
    const float own = value(expert);
    numbers &= !std::isnan(own);
    if (count == chosen && !(own > values[count - 1])) continue;
    int at = count < chosen ? count++ : count - 1;
    for (; at > 0 && own > values[at - 1]; --at) best[at] = best[at - 1], values[at] = values[at - 1];
    best[at] = expert, values[at] = own;
  }
  return numbers;
}

void Routing::choose(int row, const float* logits, int experts, int chosen, bool normalized) {
  const bool numbers = choose_best(row, experts, chosen, [&](int expert) { return logits[expert]; });
  const int32_t* best = experts_.data() + static_cast<size_t>(row) * chosen;
  float* weights = weights_.data() + static_cast<size_t>(row) * chosen;
  const float top = logits[best[0]];
  float total = 0;
  for (int rank = 0; rank < chosen; ++rank) total += weights[rank] = std::exp(logits[best[rank]] - top);
  if (!normalized) {
    total = 0;
    for (int expert = 0; expert < experts; ++expert) total += std::exp(logits[expert] - top);
  }
  // A row that has gone wrong is noticed later, as long as it stays wrong.
  if (!numbers) total = std::numeric_limits<float>::quiet_NaN();
  for (int rank = 0; rank < chosen; ++rank) weights[rank] /= total;
}

void Routing::choose_by_sigmoids(int row, const float* logits, const float* biases, int experts, int chosen,
                                 bool normalized, float eps, float scale) {
  const auto sigmoid = [&](int expert) { return 1.0f / (1.0f + std::exp(-logits[expert])); };
  const bool numbers = choose_best(row, experts, chosen,
                                   [&](int expert) { return sigmoid(expert) + (biases ? biases[expert] : 0.0f); });
  const int32_t* best = experts_.data() + static_cast<size_t>(row) * chosen;
  float* weights = weights_.data() + static_cast<size_t>(row) * chosen;
  float total = eps;
  for (int rank = 0; rank < chosen; ++rank) total += weights[rank] = sigmoid(best[rank]);
  if (!normalized) total = 1.0f;
  if (!numbers) total = std::numeric_limits<float>::quiet_NaN();
  for (int rank = 0; rank < chosen; ++rank) weights[rank] = weights[rank] / total * scale;
}

void Routing::take(int row, const float* numbers, const float* weights, int experts, int chosen) {
  for (int rank = 0; rank < chosen; ++rank) {
    const size_t at = static_cast<size_t>(row) * chosen + rank;
    // Compared as floats: not every float has an integer.
    const bool exists = numbers[rank] >= 0 && numbers[rank] < static_cast<float>(experts);
    experts_[at] = exists ? static_cast<int32_t>(numbers[rank]) : -1;
    weights_[at] = exists ? weights[rank] : numbers[rank] == -1 ? 0 : std::numeric_limits<float>::quiet_NaN();
  }
}

void Routing::sort(int rows, int experts, int chosen) {
  const int slots = rows * chosen;
  num_experts_ = experts, num_chosen_ = chosen;
  std::fill_n(counts_.begin(), experts, 0);
  for (int i = 0; i < slots; ++i)
    if (experts_[i] >= 0) ++counts_[experts_[i]];
  active_.clear();
  begins_.assign(1, 0);
  for (int expert = 0; expert < experts; ++expert) {
    if (counts_[expert] == 0) continue;
    const int begin = begins_.back();
    active_.push_back(expert);
    begins_.push_back(begin + counts_[expert]);
    counts_[expert] = begin;  // from here on, its next slot
  }
  for (int i = 0; i < slots; ++i) {
    slots_[i] = experts_[i] < 0 ? -1 : counts_[experts_[i]]++;
    if (slots_[i] < 0) continue;
    tokens_[slots_[i]] = i / chosen;
  }
}

}  // namespace ostro
