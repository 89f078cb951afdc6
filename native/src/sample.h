// Samples tokens from logits, one row at a time. Knows rows of logits and their sampling settings; keeps no state.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace ostro {

struct Draw {
  int32_t row;        // of the logits
  int32_t top_k;      // 0 keeps all
  float temperature;  // 0 is greedy
  float min_p;        // 0 keeps all
  int32_t token;      // the drawn token
  float best;         // the row's highest logit; NaN if any logit is
  double top_p;       // 1 keeps all
  uint64_t key;       // start of the row's random stream
  // Tokens that may be drawn: token i is bit i % 32 of word i / 32. Null allows all.
  const uint32_t* allowed;
  int32_t num_words;  // in `allowed`
  int32_t reserved;
};

// A thread's working memory for drawing; kept between steps.
struct DrawScratch {
  std::vector<float> masked;
  std::vector<float> weights;
  std::vector<uint64_t> ranking;
};

// Leaves the logits as they are: log-probabilities are read from them afterwards.
void draw_token(const Kernels& kernels, const float* logits, int vocab, Draw& draw, DrawScratch& scratch);

}  // namespace ostro
