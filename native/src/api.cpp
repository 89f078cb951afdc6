// The library's plain C interface, called by ostro.kernels.cpu through ctypes. Structs are those of plan.h, pack.h and
// sample.h. No exception crosses it: failures return null or a negative number.
#include <cstdio>
#include <exception>
#include <string>

#include "check.h"
#include "digest.h"
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

// Incremented with any change to a struct, a format or a function's meaning: other versions of the library are refused.
constexpr int kVersion = 16;

// A validated plan, and the limits on its batches.
struct Checked {
  Checked(const Kernels& kernels, const Shape& shape, const std::vector<BufferShape>& buffers,
          const std::vector<Rotation>& rotations, const std::vector<Step>& steps)
      : limits(shape, buffers, rotations, steps),
        num_buffers(static_cast<int>(buffers.size())),
        plan(kernels, shape, buffers, rotations, steps) {}

  const BatchLimits limits;
  const int num_buffers;
  Plan plan;
  std::string why;
};

// A checked run of steps that read nothing of a batch but its number of rows.
struct RowwiseRun {
  Checked* checked;
  int32_t begin, end, rows, reserved;
};

Checked* refused(const std::string& reason, char* why, int why_size) {
  std::snprintf(why, why_size, "%s", reason.c_str());
  return nullptr;
}

}  // namespace

OSTRO_API int ostro_version() { return kVersion; }

// The names of instruction sets supported here, best first, one per index; null after the last.
OSTRO_API const char* ostro_isa(int index) {
  for (int i = 0; i < kernels_count(); ++i)
    if (kernels_begin()[i]->runs_here() && index-- == 0) return kernels_begin()[i]->name;
  return nullptr;
}

OSTRO_API int ostro_panel(const char* isa) {
  const Kernels* kernels = find_kernels(isa);
  return kernels ? kernels->panel : -1;
}

// The packed size of a matrix in bytes; fills in its format. Negative if it cannot be packed.
OSTRO_API int64_t ostro_format(int32_t source, int bits, Matrix* matrix) {
  return choose_format(source, bits, *matrix) ? Layout(*matrix).total() : -1;
}

// The packed size in bytes of a matrix of known format, with panels of this width. Negative if no such matrix can
// exist: a file's description of a matrix is not trusted before this check.
OSTRO_API int64_t ostro_packed_bytes(const Matrix* matrix, int panel) {
  return is_packable(*matrix, panel) ? Layout(*matrix).total() : -1;
}

OSTRO_API uint64_t ostro_digest(const uint8_t* data, int64_t size, uint64_t before) {
  return digest(data, size, before);
}

// Points a matrix of known format to its packed bytes.
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

// Returns null if a plan is refused, with the reason in `why`; an empty reason means out of memory or threads.
OSTRO_API Checked* ostro_plan(const char* isa, const Shape* shape, const BufferShape* buffers, int num_buffers,
                              const Rotation* rotations, int num_rotations, const Step* steps, int num_steps, char* why,
                              int why_size) {
  const Kernels* kernels = find_kernels(isa);
  if (!kernels) return refused("there are no kernels of that name", why, why_size);
  try {
    const std::vector<BufferShape> all_buffers(buffers, buffers + num_buffers);
    const std::vector<Rotation> all_rotations(rotations, rotations + num_rotations);
    const std::vector<Step> all_steps(steps, steps + num_steps);
    const std::string reason = why_no_plan(*kernels, *shape, all_buffers, all_rotations, all_steps);
    if (!reason.empty()) return refused(reason, why, why_size);
    return new Checked(*kernels, *shape, all_buffers, all_rotations, all_steps);
  } catch (const std::exception&) {
    return refused("", why, why_size);
  }
}

// Whether each of the plan's threads has a CPU of its own, so that it may poll while it waits.
OSTRO_API void ostro_set_polling(Checked* checked, int polling) { checked->plan.set_polling(polling != 0); }

OSTRO_API void ostro_free(Checked* checked) { delete checked; }

OSTRO_API float* ostro_buffer(Checked* checked, int index) {
  return index >= 0 && index < checked->num_buffers ? checked->plan.buffer(index) : nullptr;
}

// Returns whether both are valid pages.
OSTRO_API int ostro_copy_page(Checked* checked, int from, int to) {
  const int pages = checked->limits.pages;
  if (from < 0 || from >= pages || to < 0 || to >= pages) return 0;
  checked->plan.copy_page(from, to);
  return 1;
}

// Returns whether both are valid slots.
OSTRO_API int ostro_copy_state(Checked* checked, int from, int to) {
  const int states = checked->limits.states;
  if (from < 0 || from >= states || to < 0 || to >= states) return 0;
  if (from != to) checked->plan.copy_state(from, to);
  return 1;
}

// Null if there is no such slot.
OSTRO_API void* ostro_state(Checked* checked, int slot) {
  return slot < 0 || slot >= checked->limits.states ? nullptr : checked->plan.state(slot);
}

OSTRO_API int64_t ostro_page_bytes(const Checked* checked) { return checked->plan.page_bytes(); }

// Null if there is no such page.
OSTRO_API void* ostro_page(Checked* checked, int number) {
  return number < 0 || number >= checked->limits.pages ? nullptr : checked->plan.page(number);
}

// Returns null, or the reason why nothing was run. The text is valid until the plan's next run.
OSTRO_API const char* ostro_run(Checked* checked, const Batch* batch, int begin, int end) {
  checked->why = why_no_run(checked->limits, *batch, begin, end);
  if (!checked->why.empty()) return checked->why.c_str();
  checked->plan.run(*batch, begin, end);
  return nullptr;
}

// Fills in a run for `ostro_run_rowwise`; returns null, or the reason why there is none, as `ostro_run` does.
OSTRO_API const char* ostro_prepare_rowwise(Checked* checked, int begin, int end, int rows, RowwiseRun* run) {
  checked->why = why_no_rowwise_run(checked->limits, rows, begin, end);
  if (!checked->why.empty()) return checked->why.c_str();
  *run = {checked, begin, end, rows, 0};
  return nullptr;
}

// Runs a prepared `RowwiseRun`. A CUDA host function: it needs no interpreter, and may run on any thread, one at a time.
OSTRO_API void ostro_run_rowwise(void* prepared) {
  const RowwiseRun& run = *static_cast<const RowwiseRun*>(prepared);
  Batch batch{};
  batch.num_rows = run.rows;
  run.checked->plan.run(batch, run.begin, run.end);
}

OSTRO_API void ostro_profile(Checked* checked, double* seconds) {
  const auto taken = checked->plan.take_profile();
  for (int op = 0; op < kOps; ++op) seconds[op] = taken[op];
}
