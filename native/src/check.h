// Validates a plan and each batch before anything runs: no number from a file or a caller is used as an address before
// it is checked here.
#pragma once

#include <string>
#include <vector>

#include "plan.h"

namespace ostro {

// The reason why such a plan must not be built; empty if it is valid. Covers every width, offset and index that is
// used.
std::string why_no_plan(const Kernels& kernels, const Shape& shape, const std::vector<BufferShape>& buffers,
                        const std::vector<Rotation>& rotations, const std::vector<Step>& steps);

// Limits on a plan's batches, computed once.
struct BatchLimits {
  int rows, asked, pages, states, lanes, drafts, vocab, drawn, positions, adapters, types, steps;  // drawn: tokens that draws choose from
  int rowwise;  // the first so many steps read nothing of a batch but its number of rows

  BatchLimits(const Shape& shape, const std::vector<BufferShape>& buffers, const std::vector<Rotation>& rotations,
              const std::vector<Step>& steps);
};

// The reason why such a batch must not run; empty if it is valid. Takes a few nanoseconds per token.
std::string why_no_run(const BatchLimits& limits, const Batch& batch, int begin, int end);

// The same for a batch of which nothing but its number of rows is known.
std::string why_no_rowwise_run(const BatchLimits& limits, int rows, int begin, int end);

}  // namespace ostro
