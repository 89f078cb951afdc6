// The library's plain C interface: what ostro.kernels.cpu calls through ctypes. Structs are those of plan.h, pack.h and
// sample.h. Nothing throws across it: what fails returns null or a number below zero.
#include <exception>

#include "kernels.h"
#include "pack.h"
#include "plan.h"

#if defined(_WIN32)
#define OSTRO_API extern "C" __declspec(dllexport)
#else
#define OSTRO_API extern "C" __attribute__((visibility("default")))
#endif

using namespace ostro;

namespace {

// Changes with any change of a struct, of a format or of what a function means: a library of another version is refused.
constexpr int kVersion = 2;

}  // namespace

OSTRO_API int ostro_version() { return kVersion; }

// The names of the instruction sets that run here, the best first, one at a time; null after the last.
OSTRO_API const char* ostro_isa(int index) {
  for (int i = 0; i < kernels_count(); ++i)
    if (kernels_begin()[i]->runs_here() && index-- == 0) return kernels_begin()[i]->name;
  return nullptr;
}

OSTRO_API int ostro_panel(const char* isa) {
  const Kernels* kernels = find_kernels(isa);
  return kernels ? kernels->panel : -1;
}

// How many bytes a matrix takes once packed; fills in its format. Below zero where it cannot be packed.
OSTRO_API int64_t ostro_format(int32_t source, int bits, Matrix* matrix) {
  return choose_format(source, bits, *matrix) ? Layout(*matrix).total() : -1;
}

// Points a matrix of known format at its packed bytes.
OSTRO_API void ostro_point(Matrix* matrix, const uint8_t* packed) {
  const Layout layout(*matrix);
  matrix->data = packed;
  matrix->scale_data = packed + layout.scales_at();
  matrix->minimum_data = packed + layout.minima_at();
}

OSTRO_API void ostro_pack(int32_t source, const uint8_t* const* rows, const Matrix* matrix, int panel, int threads,
                          uint8_t* to) {
  pack_matrix(source, rows, *matrix, panel, threads, to);
}

OSTRO_API void ostro_unpack_row(const Matrix* matrix, int panel, int row, float* to) {
  unpack_row(*matrix, panel, row, to);
}

OSTRO_API Plan* ostro_plan(const char* isa, const Shape* shape, const BufferShape* buffers, int num_buffers,
                           const Rotation* rotations, int num_rotations, const Step* steps, int num_steps) {
  const Kernels* kernels = find_kernels(isa);
  if (!kernels) return nullptr;
  // No memory, or no thread.
  try {
    return new Plan(*kernels, *shape, {buffers, buffers + num_buffers}, {rotations, rotations + num_rotations},
                    {steps, steps + num_steps});
  } catch (const std::exception&) {
    return nullptr;
  }
}

OSTRO_API void ostro_free(Plan* plan) { delete plan; }
OSTRO_API float* ostro_buffer(Plan* plan, int index) { return plan->buffer(index); }
OSTRO_API void ostro_copy_page(Plan* plan, int from, int to) { plan->copy_page(from, to); }
OSTRO_API void ostro_run(Plan* plan, const Batch* batch, int begin, int end) { plan->run(*batch, begin, end); }

OSTRO_API void ostro_profile(Plan* plan, double* seconds) {
  const auto taken = plan->take_profile();
  for (int op = 0; op < kOps; ++op) seconds[op] = taken[op];
}
