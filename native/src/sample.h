// Samples tokens from logits, one row at a time. Knows rows of logits and their sampling settings; keeps no state.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace ostro {

struct Draw {
  int32_t row;        // of the logits
  int32_t top_k;      // 0 keeps all
  float temperature;  // 0 takes the best
  float min_p;        // 0 keeps all
  int32_t token;      // what was drawn
  float best;         // the row's highest logit; not a number where any of them is none
  double top_p;       // 1 keeps all
  uint64_t key;       // where the row's stream of random numbers begins
};

// What a thread needs to draw; kept between steps.
struct DrawScratch {
  std::vector<float> weights;
  std::vector<uint64_t> ranking;
};

void draw_token(const Kernels& kernels, const float* logits, int vocab, Draw& draw, DrawScratch& scratch);

}  // namespace ostro
