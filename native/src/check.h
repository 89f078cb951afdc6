// Validates a plan and each batch before anything runs: no number from a file or a caller is used as an address before
// it was checked here.
#pragma once

#include <string>
#include <vector>

#include "plan.h"

namespace ostro {

// Why such a plan must not be made; empty where it may. Knows every width, offset and index that an operation reads.
std::string why_no_plan(const Kernels& kernels, const Shape& shape, const std::vector<BufferShape>& buffers,
                        const std::vector<Rotation>& rotations, const std::vector<Step>& steps);

// What batches of a plan may hold, read off the plan once.
struct BatchLimits {
  int rows, asked, pages, vocab, positions, adapters, steps;

  BatchLimits(const Shape& shape, const std::vector<BufferShape>& buffers, const std::vector<Rotation>& rotations,
              const std::vector<Step>& steps);
};

// Why such a batch must not run; empty where it may. A few nanoseconds a token.
std::string why_no_run(const BatchLimits& limits, const Batch& batch, int begin, int end);

}  // namespace ostro
