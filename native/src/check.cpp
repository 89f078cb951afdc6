#include "check.h"

#include <algorithm>
#include <climits>
#include <cmath>

namespace ostro {
namespace {

constexpr int kMostThreads = 1024;
constexpr int kDimMultiple = 16;
constexpr int kMostExperts = 1 << 12;
constexpr int kMostDrafts = 64;  // as many tokens as recurrences take together
constexpr const char* kNames[kOps] = {"embed",  "linear",   "norm",  "attend",      "gather",   "softcap", "sample",
                                      "adapt",  "activate", "scale", "apply",       "position", "route",   "expand",
                                      "expert", "combine",  "gate",  "attend_text", "type",     "choose",  "multiply",
                                      "convolve", "delta",  "ssm"};

// Thrown and caught in this file only, so that the checks below read as a list of conditions.
struct Broken {
  std::string why;
};

template <typename... Parts>
void require(bool holds, const Parts&... parts) {
  if (holds) return;
  std::string why;
  const auto text = [](const auto& part) -> std::string {
    if constexpr (std::is_convertible_v<decltype(part), std::string>) return part;
    else return std::to_string(part);
  };
  ((why += text(parts)), ...);
  throw Broken{why};
}

void require_range(const char* name, int64_t value, int64_t least, int64_t most) {
  require(value >= least && value <= most, name, " is ", value, ", not from ", least, " to ", most);
}

void require_matrix(const Kernels& kernels, const Step& step) {
  require(step.matrix != nullptr && step.matrix->data != nullptr, "it has no matrix");
  const Matrix& matrix = *step.matrix;
  require_range("its matrix's number of rows", matrix.rows, 1, INT_MAX);
  require_range("its matrix's number of columns", matrix.cols, 1, INT_MAX / 8);
  require(matrix.rows % kernels.panel == 0, "its matrix has ", matrix.rows, " rows, no multiple of ", kernels.panel);
  require(std::find(std::begin(kForms), std::end(kForms), matrix.form()) != std::end(kForms),
          "its matrix has no known form");
  require(matrix.cols % matrix.form().unit() == 0, "its matrix has ", matrix.cols, " columns, no multiple of ",
          matrix.form().unit());
  require(matrix.cols == step.cols, "its matrix has ", matrix.cols, " columns, and the step ", step.cols);
}

// Whether what follows is an activation that needs no gates.
bool is_activation(const Step& step) {
  const After after = static_cast<After>(step.after);
  return (after >= After::kSilu && after <= After::kRelu) || after == After::kRelu2;
}

// Checks one plan's steps, in order. Rows are tokens before a gather, and requested rows after it.
class Steps {
 public:
  Steps(const Kernels& kernels, const Shape& shape, const std::vector<BufferShape>& buffers,
        const std::vector<Rotation>& rotations)
      : kernels_(kernels), shape_(shape), buffers_(buffers), rotations_(rotations), rows_(shape.max_rows) {}

  void check(const Step& step) {
    switch (static_cast<Op>(step.op)) {
      case Op::kEmbed:
        require_matrix(kernels_, step);
        require(!gathered_, "it comes after a gather");
        require(std::isfinite(step.scale), "its scale is not finite");
        whole("out", step.out, 0, step.cols);
        break;
      case Op::kLinear: linear(step); break;
      case Op::kNorm:
        norm(step, step.cols);
        require(step.norm != nullptr, "it has no weights");
        require(!step.bias || step.bias_size >= step.cols, "its bias has ", step.bias_size, " numbers for ", step.cols,
                " columns");
        require_range("after", step.after, 0, static_cast<int>(step.bias ? After::kStore : After::kAdd));
        whole("in", step.in, step.in_at, step.cols);
        whole("out", step.out, step.out_at, step.cols);
        break;
      case Op::kAttend: attend(step); break;
      case Op::kGather:
        require(!gathered_, "it is the second gather");
        require_range("cols", step.cols, 1, INT_MAX / 8);
        whole("in", step.in, 0, step.cols);
        require_range("out", step.out, 0, static_cast<int>(buffers_.size()) - 1);
        rows_ = buffers_[step.out].rows;
        whole("out", step.out, 0, step.cols);
        gathered_ = true;
        break;
      case Op::kSoftcap:
        require(std::isfinite(step.cap) && step.cap > 0, "its cap is not a number above zero");
        panels(step.cols);
        whole("out", step.out, 0, step.cols);
        break;
      case Op::kSample:
        require(gathered_, "it comes before a gather");
        whole("in", step.in, 0, step.cols);
        break;
      case Op::kAdapt: adapt(step); break;
      case Op::kActivate:
        width(step);
        require(has_gates(static_cast<After>(step.after)), "after is ", step.after, ", which has no gates");
        whole("in", step.in, step.in_at, 2 * static_cast<int64_t>(step.width));
        whole("out", step.out, step.out_at, step.width);
        require(step.in != step.out, "it reads the buffer that it writes");
        break;
      case Op::kScale:
        require(std::isfinite(step.scale), "its scale is not finite");
        require_range("after", step.after, 0, static_cast<int>(After::kAdd));
        panels(step.cols);
        whole("in", step.in, step.in_at, step.cols);
        whole("out", step.out, step.out_at, step.cols);
        break;
      case Op::kApply:
        require(is_activation(step), "after is ", step.after, ", which is no activation");
        panels(step.cols);
        whole("out", step.out, 0, step.cols);
        break;
      case Op::kAttendText: attend_text(step); break;
      case Op::kType:
        require_matrix(kernels_, step);
        require(!gathered_, "it comes after a gather");
        whole("out", step.out, 0, step.cols);
        break;
      case Op::kRoute:
      case Op::kChoose: route(step); break;
      case Op::kExpand:
      case Op::kExpert: multiply_slots(step); break;
      case Op::kCombine:
        routed(step);
        require(std::isfinite(step.scale), "its scale is not finite");
        require_range("after", step.after, 0, static_cast<int>(After::kAdd));
        panels(step.cols);
        slots("in", step.in, step.in_at, step.cols);
        whole("out", step.out, step.out_at, step.cols);
        require(step.in != step.out, "it reads the buffer that it writes");
        break;
      case Op::kMultiply: multiply(step); break;
      case Op::kConvolve: convolve(step); break;
      case Op::kDelta: recur(step, 2); break;
      case Op::kSsm: recur(step, 3); break;
      case Op::kGate:
        panels(step.cols);
        whole("in", step.in, step.in_at, 1);
        whole("out", step.out, step.out_at, step.cols);
        require(step.in != step.out, "it reads the buffer that it writes");
        break;
      case Op::kPosition:
        require_matrix(kernels_, step);
        require(!gathered_, "it comes after a gather");
        whole("out", step.out, 0, step.cols);
        break;
    }
  }

  // After all steps.
  void check_slots() const {
    require(used_ == shape_.state_floats, "a slot has ", shape_.state_floats, " numbers, of which ", used_,
            " are used");
    require(drafted_ == shape_.draft_floats, "a draft has ", shape_.draft_floats, " numbers, of which ", drafted_,
            " are used");
  }

 private:
  // Checks that columns [at, at + cols) are in the buffer, and that it has a row for each row of the step.
  void whole(const char* which, int buffer, int at, int64_t cols) const {
    require_range(which, buffer, 0, static_cast<int>(buffers_.size()) - 1);
    const BufferShape& shape = buffers_[buffer];
    require(cols > 0 && at >= 0 && at + cols <= shape.cols, "columns ", at, " to ", at + cols, " of buffer ", buffer,
            " do not exist: it has ", shape.cols);
    require(shape.rows >= rows_, "buffer ", buffer, " has ", shape.rows, " rows, and the step ", rows_);
  }

  void panels(int cols) const {
    require(cols % kernels_.panel == 0, "it has ", cols, " columns, no multiple of ", kernels_.panel);
  }

  void norm(const Step& step, int64_t cols) const {
    if (!step.norm) return;
    require(std::isfinite(step.eps) && step.eps > 0, "its eps is not a number above zero");
    require(cols > 0 && cols % kernels_.panel == 0, "it norms ", cols, " columns, no multiple of ", kernels_.panel);
    require(step.norm_size >= cols, "its norm has ", step.norm_size, " weights for ", cols, " columns");
  }

  void linear(const Step& step) const {
    require_matrix(kernels_, step);
    norm(step, step.cols);
    const int rows = step.matrix->rows;
    const bool gated = has_gates(static_cast<After>(step.after));
    if (!gated) require_range("after", step.after, 0, static_cast<int>(After::kAdd));
    require(!gated || rows % (2 * kernels_.panel) == 0, "its gates and ups are ", rows,
            " rows, no multiple of two panels of ", kernels_.panel);
    require(!step.bias || step.bias_size >= rows, "its bias has ", step.bias_size, " numbers for ", rows, " rows");
    whole("in", step.in, step.in_at, step.cols);
    whole("out", step.out, step.out_at, gated ? rows / 2 : rows);
    require(step.in != step.out, "it reads the buffer that it writes");
  }

  void route(const Step& step) {
    require(!gathered_, "it comes after a gather");
    require_range("the number of experts", step.experts, 1, kMostExperts);
    require_range("the number of chosen experts", step.chosen, 1, step.experts);
    require(static_cast<int64_t>(shape_.max_rows) * step.chosen <= INT_MAX / 8, "it has too many slots");
    const bool routes = static_cast<Op>(step.op) == Op::kRoute;
    whole("in", step.in, step.in_at, routes ? step.experts : 2 * step.chosen);
    if (routes && static_cast<After>(step.after) == After::kSigmoid) {
      require(!step.weights || step.weights_size >= step.experts, "it has ", step.weights_size, " biases for ",
              step.experts, " experts");
      require(std::isfinite(step.scale), "its scale is not finite");
      require(std::isfinite(step.eps) && step.eps >= 0, "its eps is negative or not finite");
    } else {
      require(step.after == static_cast<int>(After::kStore), "after is ", step.after, ", which chooses no experts");
    }
    experts_ = step.experts, chosen_ = step.chosen;
  }

  // Checks that such experts were chosen before.
  void routed(const Step& step) const {
    require(!gathered_, "it comes after a gather");
    require(experts_ > 0, "no tokens were routed before it");
    require(step.experts == experts_ && step.chosen == chosen_, "it has ", step.chosen, " of ", step.experts,
            " experts, and ", chosen_, " of ", experts_, " were chosen");
  }

  // Like `whole`, with a row for each slot.
  void slots(const char* which, int buffer, int at, int64_t cols) const {
    whole(which, buffer, at, cols);
    require(buffers_[buffer].rows >= static_cast<int64_t>(rows_) * chosen_, "buffer ", buffer, " has ",
            buffers_[buffer].rows, " rows for ", chosen_, " experts of ", rows_, " tokens");
  }

  void multiply_slots(const Step& step) const {
    routed(step);
    require_matrix(kernels_, step);
    norm(step, step.cols);
    require(!step.ungated || is_activation(step), "after is ", step.after, ", which is no activation");
    const bool gated = !step.ungated && has_gates(static_cast<After>(step.after));
    require(gated || step.ungated || step.after == static_cast<int>(After::kStore), "after is ", step.after,
            ", which adds to slots");
    const int all = step.matrix->rows, rows = all / experts_, whole_panels = kernels_.panel * (gated ? 2 : 1);
    require(all % experts_ == 0 && rows % whole_panels == 0, "its ", experts_, " experts share ", all,
            " rows, not in multiples of ", whole_panels);
    require(!step.bias || step.bias_size >= all, "its bias has ", step.bias_size, " numbers for ", all, " rows");
    if (static_cast<Op>(step.op) == Op::kExpand) whole("in", step.in, step.in_at, step.cols);
    else slots("in", step.in, step.in_at, step.cols);
    slots("out", step.out, step.out_at, gated ? rows / 2 : rows);
    require(step.in != step.out, "it reads the buffer that it writes");
  }

  void width(const Step& step) const {
    require_range("width", step.width, 1, INT_MAX / 8);
    require(step.width % kernels_.panel == 0, "it writes ", step.width, " columns, no multiple of ", kernels_.panel);
  }

  void adapt(const Step& step) const {
    require(!gathered_, "it comes after a gather");
    require_range("cols", step.cols, 1, INT_MAX / 8);
    norm(step, step.cols);
    width(step);
    whole("in", step.in, step.in_at, step.cols);
    whole("out", step.out, step.out_at, step.width);
    require(step.in != step.out, "it reads the buffer that it writes");
    require_range("the number of adapters", step.num_terms, 1, INT_MAX / 8);
    require(step.terms != nullptr, "it has no adapters");
    for (int i = 0; i < step.num_terms; ++i) {
      const Term& term = step.terms[i];
      require_range("a rank", term.rank, 0, 1 << 16);
      require(term.rank == 0 || (term.a && term.b), "an adapter has no matrices");
    }
  }

  void attend(const Step& step) const {
    const int64_t dim = shape_.head_dim, heads = shape_.heads, kv_heads = shape_.kv_heads;
    require(!gathered_, "it comes after a gather");
    require(shape_.num_pages > 0, "there are no pages");
    require_range("layer", step.layer, 0, shape_.num_layers - 1);
    require_range("rotation", step.rotation, -1, static_cast<int>(rotations_.size()) - 1);
    require_range("window", step.window, 0, INT_MAX);
    require(std::isfinite(step.scale), "its scale is not finite");
    require(std::isfinite(step.cap) && step.cap >= 0, "its cap is negative or not finite");
    norm(step, dim);
    require(!step.norm || step.norm_size >= (heads + kv_heads) * dim, "its norm has ", step.norm_size, " weights for ",
            heads + kv_heads, " heads of ", dim);
    require(!step.bias || step.bias_size >= heads, "it has ", step.bias_size, " sinks for ", heads, " heads");
    whole("in", step.in, step.in_at, (heads + 2 * kv_heads) * dim);
    whole("out", step.out, step.out_at, heads * dim);
    require(step.in != step.out, "it reads the buffer that it writes");
  }

  void attend_text(const Step& step) const {
    const int64_t columns = static_cast<int64_t>(shape_.heads) * shape_.head_dim;
    require(!gathered_, "it comes after a gather");
    require(shape_.kv_heads == shape_.heads, "heads share kv_heads");
    require_range("rotation", step.rotation, -1, static_cast<int>(rotations_.size()) - 1);
    require_range("window", step.window, 0, INT_MAX / 2);
    require(static_cast<int64_t>(shape_.max_rows) * shape_.heads <= INT_MAX, "it has too many heads and rows");
    require(std::isfinite(step.scale) && step.scale > 0, "its scale is not a number above zero");
    whole("in", step.in, step.in_at, 3 * columns);
    whole("out", step.out, step.out_at, columns);
    require(step.in != step.out, "it reads the buffer that it writes");
  }

  void multiply(const Step& step) const {
    width(step);
    const After after = static_cast<After>(step.after);
    require(after == After::kStore || after == After::kSilu || after == After::kSigmoid, "after is ", step.after,
            ", which multiplies nothing");
    whole("in", step.in, step.in_at, step.width);
    whole("out", step.out, step.out_at, step.width);
    require(step.in != step.out || step.in_at + step.width <= step.out_at || step.out_at + step.width <= step.in_at,
            "it reads the columns that it writes");
    if (!step.norm) return;
    norm(step, step.cols);
    require(step.width % step.cols == 0, "it norms ", step.cols, " of ", step.width, " columns at a time");
    require(step.norm_size >= step.width, "its norm has ", step.norm_size, " weights for ", step.width, " columns");
  }

  const Recurrence& recurrence(const Step& step) const {
    require(!gathered_, "it comes after a gather");
    require(shape_.num_states > 0, "there are no states");
    require(step.recurrence != nullptr, "it has no recurrence");
    return *step.recurrence;
  }

  // Checks that a state of so many numbers is within a slot.
  void kept(const Recurrence& how, int64_t floats) {
    require_range("the place of its state", how.state_at, 0, INT_MAX);
    require(how.state_at + floats <= shape_.state_floats, "its state of ", floats, " numbers from ", how.state_at,
            " on is beyond a slot's ", shape_.state_floats);
    used_ = std::max(used_, how.state_at + floats);
  }

  // The same for what is kept of a draft.
  void drafted(const Recurrence& how, int64_t floats) {
    require_range("the place of its drafts", how.draft_at, 0, INT_MAX);
    require(how.draft_at + floats <= shape_.draft_floats, "what it keeps of a draft, ", floats, " numbers from ",
            how.draft_at, " on, is beyond ", shape_.draft_floats);
    drafted_ = std::max(drafted_, how.draft_at + floats);
  }

  void weights(const Step& step, int64_t count) const {
    require(step.weights && step.weights_size >= count, "it has ", step.weights ? step.weights_size : 0,
            " weights of ", count);
  }

  void convolve(const Step& step) {
    const Recurrence& how = recurrence(step);
    require_range("the number of taps", how.taps, 1, kMostTaps);
    require_range("cols", step.cols, 1, INT_MAX / 8 / kMostTaps);
    panels(step.cols);
    require(static_cast<int64_t>(shape_.max_rows) * (step.cols / kernels_.panel) <= INT_MAX, "it has too many channels");
    kept(how, static_cast<int64_t>(how.taps - 1) * step.cols);
    drafted(how, step.cols);
    weights(step, static_cast<int64_t>(how.taps) * step.cols);
    require(!step.bias || step.bias_size >= step.cols, "its bias has ", step.bias_size, " numbers for ", step.cols,
            " columns");
    require(step.after == static_cast<int>(After::kStore) || step.after == static_cast<int>(After::kSilu), "after is ",
            step.after, ", which no filter ends with");
    whole("in", step.in, step.in_at, step.cols);
    whole("out", step.out, step.out_at, step.cols);
    require(step.in != step.out, "it reads the buffer that it writes");
  }

  // `numbers` is how many of its weights each head has.
  void recur(const Step& step, int numbers) {
    const Recurrence& how = recurrence(step);
    const bool is_delta = static_cast<Op>(step.op) == Op::kDelta;
    require_range("the number of heads", how.heads, 1, 1 << 16);
    require_range("the number of groups", how.groups, 1, how.heads);
    require(how.heads % how.groups == 0, how.heads, " heads cannot share ", how.groups, " groups evenly");
    require_range("a matrix's number of rows", how.rows, 1, 1 << 12);
    require_range("a matrix's number of columns", how.cols, 1, 1 << 12);
    require(static_cast<int64_t>(shape_.max_rows) * how.heads * state_tiles(how.cols) <= INT_MAX, "it has too many heads");
    kept(how, how.floats());
    drafted(how, how.heads * how.draft_floats());
    weights(step, static_cast<int64_t>(numbers) * how.heads);
    require(std::isfinite(step.scale), "its scale is not finite");
    require(std::isfinite(step.eps) && step.eps >= 0, "its eps is negative or not finite");
    const int64_t values = static_cast<int64_t>(how.heads) * how.cols, grouped = 2LL * how.groups * how.rows;
    whole("in", step.in, step.in_at, values + grouped);
    whole("beside", step.beside, step.beside_at, (is_delta ? 2 : 1) * how.heads);
    whole("out", step.out, step.out_at, values);
    require(step.in != step.out && step.beside != step.out, "it reads the buffer that it writes");
  }

  const Kernels& kernels_;
  const Shape& shape_;
  const std::vector<BufferShape>& buffers_;
  const std::vector<Rotation>& rotations_;
  int rows_;
  int experts_ = 0, chosen_ = 0;  // as routed last
  int64_t used_ = 0;              // of a slot's numbers
  int64_t drafted_ = 0;           // of a draft's
  bool gathered_ = false;
};

void require_shape(const Shape& shape) {
  require_range("heads", shape.heads, 1, 1 << 16);
  require_range("kv_heads", shape.kv_heads, 1, shape.heads);
  require(shape.heads % shape.kv_heads == 0, shape.heads, " heads cannot share ", shape.kv_heads, " kv_heads evenly");
  require_range("head_dim", shape.head_dim, kDimMultiple, kMostDim);
  require(shape.head_dim % kDimMultiple == 0, "head_dim is ", shape.head_dim, ", no multiple of ", kDimMultiple);
  require_range("num_layers", shape.num_layers, 1, 1 << 16);
  require_range("num_pages", shape.num_pages, 0, INT_MAX);
  require_range("cells", shape.cells, 0, static_cast<int>(Cells::kInt8));
  require_range("max_rows", shape.max_rows, 1, 1 << 24);
  require_range("threads", shape.threads, 1, kMostThreads);
  require_range("num_states", shape.num_states, 0, 1 << 20);
  require_range("state_floats", shape.state_floats, 0, INT_MAX);
  require_range("num_lanes", shape.num_lanes, 0, 1 << 20);
  require_range("most_drafts", shape.most_drafts, 0, kMostDrafts);
  require_range("draft_floats", shape.draft_floats, 0, INT_MAX);
}

void require_rotation(const Rotation& rotation, int head_dim) {
  require(rotation.cosines && rotation.sines, "a rotation has no tables");
  require_range("rotated", rotation.rotated, 2, head_dim);
  require(rotation.rotated % 2 == 0, "rotated is ", rotation.rotated, ", and dimensions rotate in pairs");
  require_range("a rotation's positions", rotation.positions, 1, INT_MAX);
}

// Whether an operation reads nothing of a batch but its number of rows.
bool is_rowwise(Op op) {
  switch (op) {
    case Op::kEmbed:
    case Op::kAttend:
    case Op::kGather:
    case Op::kSample:
    case Op::kAdapt:
    case Op::kPosition:
    case Op::kAttendText:
    case Op::kType:
    case Op::kConvolve:
    case Op::kDelta:
    case Op::kSsm: return false;
    default: return true;
  }
}

void require_states(const BatchLimits& limits, const Piece& piece) {
  if (!limits.states) return;
  require_range("a sequence's state", piece.state, 0, limits.states - 1);
  require_range("the number of captures", piece.num_captures, 0, piece.length);
  require(piece.captures || !piece.num_captures, "there are no captures");
  int after = 1;
  for (int i = 0; i < piece.num_captures; ++i) {
    require_range("a capture's place", piece.captures[i].after, after, piece.length);
    require_range("a capture's slot", piece.captures[i].slot, 0, limits.states - 1);
    after = piece.captures[i].after;
  }
  // A capture is of known tokens, of which there is one at least.
  require_range("the number of drafts", piece.drafts, 0, std::min(limits.drafts, piece.length - after));
  require_range("the number of applied drafts", piece.applied, 0, std::min(limits.drafts, piece.start));
  require_range("a lane", piece.lane, 0, std::max(0, limits.lanes - 1));
}

}  // namespace

std::string why_no_plan(const Kernels& kernels, const Shape& shape, const std::vector<BufferShape>& buffers,
                        const std::vector<Rotation>& rotations, const std::vector<Step>& steps) try {
  require_shape(shape);
  for (const BufferShape& each : buffers) {
    require_range("a buffer's number of rows", each.rows, 1, 1 << 24);
    require_range("a buffer's number of columns", each.cols, 1, 1 << 26);
  }
  for (const Rotation& each : rotations) require_rotation(each, shape.head_dim);
  Steps checked(kernels, shape, buffers, rotations);
  for (size_t i = 0; i < steps.size(); ++i) {
    const Step& step = steps[i];
    require(step.op >= 0 && step.op < kOps, "step ", i, " has the unknown operation ", step.op);
    try {
      checked.check(step);
    } catch (const Broken& broken) {
      require(false, "step ", i, " (", kNames[step.op], "): ", broken.why);
    }
  }
  checked.check_slots();
  return "";
} catch (const Broken& broken) {
  return broken.why;
}

BatchLimits::BatchLimits(const Shape& shape, const std::vector<BufferShape>& buffers,
                         const std::vector<Rotation>& rotations, const std::vector<Step>& steps)
    : rows(shape.max_rows),
      asked(INT_MAX),
      pages(shape.num_pages),
      states(shape.num_states),
      lanes(shape.num_lanes),
      drafts(shape.num_lanes ? shape.most_drafts : 0),
      vocab(INT_MAX),
      drawn(0),
      positions(INT_MAX),
      adapters(INT_MAX),
      types(INT_MAX),
      steps(static_cast<int>(steps.size())),
      rowwise(0) {
  while (rowwise < this->steps && is_rowwise(static_cast<Op>(steps[rowwise].op))) ++rowwise;
  for (const Rotation& each : rotations) positions = std::min(positions, each.positions);
  for (const Step& step : steps) {
    if (static_cast<Op>(step.op) == Op::kEmbed) vocab = std::min(vocab, step.matrix->rows);
    if (static_cast<Op>(step.op) == Op::kType) types = std::min(types, step.matrix->rows);
    if (static_cast<Op>(step.op) == Op::kPosition) positions = std::min(positions, step.matrix->rows);
    if (static_cast<Op>(step.op) == Op::kGather) asked = buffers[step.out].rows;
    if (static_cast<Op>(step.op) == Op::kSample) drawn = std::max(drawn, step.cols);
    if (static_cast<Op>(step.op) == Op::kAdapt) adapters = std::min(adapters, step.num_terms);
  }
}

std::string why_no_run(const BatchLimits& limits, const Batch& batch, int begin, int end) try {
  require_range("the number of rows", batch.num_rows, 1, limits.rows);
  require_range("the number of rows asked for", batch.num_asked, 0, limits.asked);
  require_range("the first step", begin, 0, limits.steps);
  require_range("the last step", end, begin, limits.steps);
  for (int i = 0; i < batch.num_rows; ++i) require_range("a token", batch.tokens[i], 0, limits.vocab - 1);
  for (int i = 0; i < batch.num_asked; ++i) require_range("a row asked for", batch.asked[i], 0, batch.num_rows - 1);
  for (int i = 0; i < batch.num_draws; ++i) {
    require_range("a draw's row", batch.draws[i].row, 0, batch.num_asked - 1);
    require_range("top_k", batch.draws[i].top_k, 0, INT_MAX);
    if (batch.draws[i].allowed)
      require_range("the number of words of a mask", batch.draws[i].num_words, (limits.drawn + 31) / 32, INT_MAX);
  }
  if (batch.adapters)
    for (int i = 0; i < batch.num_rows; ++i) require_range("an adapter", batch.adapters[i], -1, limits.adapters - 1);
  if (batch.types)
    for (int i = 0; i < batch.num_rows; ++i) require_range("a token's type", batch.types[i], 0, limits.types - 1);
  int row = 0;
  for (int i = 0; i < batch.num_pieces; ++i) {
    const Piece& piece = batch.pieces[i];
    require(piece.row == row, "a sequence's rows begin at ", piece.row, ", not at ", row);
    require_range("a sequence's length", piece.length, 1, batch.num_rows - row);
    require_range("a sequence's first position", piece.start, 0, limits.positions - piece.length);
    // A plan without pages keeps nothing.
    const int used = limits.pages ? (piece.start + piece.length - 1) / kPage + 1 : 0;
    require(used <= piece.num_pages, "a sequence has ", piece.num_pages, " pages and needs ", used);
    for (int page = 0; page < used; ++page) require_range("a page", piece.pages[page], 0, limits.pages - 1);
    require_states(limits, piece);
    row += piece.length;
  }
  require(row == batch.num_rows, "sequences have ", row, " of ", batch.num_rows, " rows");
  return "";
} catch (const Broken& broken) {
  return broken.why;
}

std::string why_no_rowwise_run(const BatchLimits& limits, int rows, int begin, int end) try {
  require_range("the number of rows", rows, 1, limits.rows);
  require_range("the first step", begin, 0, limits.rowwise);
  require_range("the last step", end, begin, limits.rowwise);
  return "";
} catch (const Broken& broken) {
  return broken.why;
}

}  // namespace ostro
