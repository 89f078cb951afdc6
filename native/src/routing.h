// Which experts each token goes through, with which weights, and the tokens of each expert. Knows no matrices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ostro {

// A slot is one token with one of its experts. Slots are sorted by expert, and those of an expert by token, so that each
// expert's are consecutive rows of a buffer.
class Routing {
 public:
  // The largest numbers that will be needed.
  void reserve(int rows, int experts, int chosen);

  // Picks a row's experts: those with the highest logits, and of equal ones the first. Their weights are the softmax of
  // the chosen logits if `normalized`, otherwise their part of the softmax over all. Rows may be chosen in parallel.
  void choose(int row, const float* logits, int experts, int chosen, bool normalized);
  // The same by the logits' sigmoids, which are the experts' weights, times `scale`, and divided by their sum and `eps` if
  // they are normalized. `biases`, which may be null, are added for the choice alone.
  void choose_by_sigmoids(int row, const float* logits, const float* biases, int experts, int chosen, bool normalized,
                          float eps, float scale);
  // Takes a row's experts as given. A number that is no expert's has no slot: -1 adds nothing to the row's sum, and
  // anything else makes it NaN.
  void take(int row, const float* numbers, const float* weights, int experts, int chosen);
  // Sorts the slots of all rows. Every row must have been chosen or taken.
  void sort(int rows, int experts, int chosen);

  // Whether the slots were sorted for such a mixture. They were not if a run began after its routing.
  bool holds(int experts, int chosen) const { return experts == num_experts_ && chosen == num_chosen_; }
  // Experts that have any slots.
  int num_active() const { return static_cast<int>(active_.size()); }
  int expert(int active) const { return active_[active]; }
  int begin(int active) const { return begins_[active]; }
  int end(int active) const { return begins_[active + 1]; }
  int token(int slot) const { return tokens_[slot]; }
  // A row's experts, in their order of choice. A slot is negative if there is no such expert.
  int slot(int row, int rank, int chosen) const { return slots_[static_cast<size_t>(row) * chosen + rank]; }
  float weight(int row, int rank, int chosen) const { return weights_[static_cast<size_t>(row) * chosen + rank]; }

 private:
  // Stores the experts for which value(expert) is largest, in their order; returns whether all are numbers.
  template <typename Value>
  bool choose_best(int row, int experts, int chosen, Value value);
  // By row and rank.
  std::vector<int32_t> experts_;  // negative if there is none
  std::vector<float> weights_;
  std::vector<int32_t> slots_;
  std::vector<int32_t> tokens_;  // by slot
  std::vector<int32_t> counts_;  // by expert
  std::vector<int32_t> active_;
  std::vector<int32_t> begins_ = {0};
  int num_experts_ = 0, num_chosen_ = 0;
};

}  // namespace ostro
