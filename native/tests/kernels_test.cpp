// Holds every table of kernels that runs here against references in double precision, which know nothing of tiles,
// panels or vectors; and against the plain kernels of its width, bit for bit. Knows nothing of models and plans.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels.h"
#include "twins.h"

using namespace ostro;

namespace {

using Values = std::vector<float>;

// ---- What is expected, and what was seen

const Kernels* table;  // under test
Values* seen;          // all results of it, in order
int failures = 0;

void expect(bool holds, const std::string& what) {
  if (holds) return;
  if (++failures <= 20) std::printf("FAILED %s: %s\n", table->name, what.c_str());
}

void expect_near(float got, double want, double tolerance, const std::string& what) {
  if (std::fabs(got - want) <= tolerance) return;
  char text[200];
  std::snprintf(text, sizeof text, ": %.9g, not %.9g +- %.2g", got, want, tolerance);
  expect(false, what + text);
}

bool same_bits(const float* a, const float* b, long count) { return !std::memcmp(a, b, count * sizeof *a); }

void remember(const Values& values) { seen->insert(seen->end(), values.begin(), values.end()); }

// ---- Numbers

std::mt19937 bits(1);

int whole(int least, int most) { return least + static_cast<int>(bits() % static_cast<unsigned>(most - least + 1)); }
float number(float least, float most) { return least + (most - least) * static_cast<float>(bits() >> 8) * 0x1p-24f; }
Values numbers(long count, float least, float most) {
  Values values(count);
  for (float& value : values) value = number(least, most);
  return values;
}

double clamped_silu(double gate, double up) {
  gate = std::min(gate, 7.0), up = std::clamp(up, -7.0, 7.0);
  return gate / (1 + std::exp(-1.702 * gate)) * (up + 1);
}
double silu(double x) { return x / (1 + std::exp(-x)); }
double gelu(double x) { return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }

// ---- Matrices

struct Kind : Form {
  std::string name;

  // The smallest code.
  int least() const {
    switch (codes) {
      case kInt8: return -128;
      case kInt6Halves: return -32;
      case kInt5: return -16;
      case kInt4: return -8;
      case kFloat4: return -12;
      default: return 0;
    }
  }
  int most() const { return codes == kFloat4 ? 12 : least() + (1 << bits()) - 1; }
  int code() const {
    constexpr int floats[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    return codes == kFloat4 ? floats[whole(0, 15)] : whole(least(), most());
  }
  int bits() const { return codes == kInt8 ? 8 : 4 + high_bits(); }
  int per_scale() const { return kGroup / per_group(); }
  // This many columns, or as many more as make its rows whole.
  int columns(int least) const { return (least + unit() - 1) / unit() * unit(); }
};

std::vector<Kind> all_kinds() {
  std::vector<Kind> kinds;
  for (const Form& form : kForms) {
    const std::string numbers = std::to_string(form.codes) + " with scales " + std::to_string(form.scales);
    kinds.push_back({form, "codes " + numbers + (form.has_minima ? " and minima" : "")});
  }
  return kinds;
}

// Scales or minima of a matrix's rows: in blocks, products of a block's half and factors.
struct Numbers {
  Values values, halves;
  std::vector<int> factors;

  Numbers() = default;
  Numbers(long count, const Kind& kind, float least, float most) : values(numbers(count, least, most)) {
    if (kind.scales == kPowerScales)
      for (float& value : values) value = std::ldexp(1.0f, whole(-12, -6));
    if (kind.scales != kBlockScales) {
      round_to_halves(values);
      return;
    }
    const int each = kBlock * kind.per_group();
    halves = numbers(count / each, least / 64, most / 64);
    round_to_halves(halves);
    for (int i = 0; i < count; ++i) factors.push_back(kind.has_minima ? whole(0, 63) : whole(-128, 127));
    for (int i = 0; i < count; ++i) values[i] = halves[i / each] * static_cast<float>(factors[i]);
  }

  void become_one() {
    for (Values* all : {&values, &halves}) std::fill(all->begin(), all->end(), 1.0f);
    std::fill(factors.begin(), factors.end(), 1);
  }

  static void round_to_halves(Values& values) {
    for (float& value : values) value = to_float(to_half(value));
  }
};

// A matrix as it is meant, before it is packed for anyone.
struct Meaning {
  Kind kind;
  int rows, cols;
  std::vector<int> codes;
  Values floats;
  Numbers scales, minima;

  Meaning(const Kind& kind, int rows, int cols) : kind(kind), rows(rows), cols(cols) {
    const long values = static_cast<long>(rows) * cols;
    if (kind.is_float()) {
      floats = numbers(values, -1, 1);
      if (kind.codes == kFloat16) Numbers::round_to_halves(floats);
      return;
    }
    codes.resize(values);
    for (int& code : codes) code = kind.code();
    scales = Numbers(values / kind.per_scale(), kind, 0.001f, 0.02f);
    if (kind.has_minima) minima = Numbers(values / kGroup, kind, -0.1f, 0.1f);
  }
};

// The first rows of a matrix as format.h lays them out.
struct Packed {
  Matrix matrix;
  std::vector<uint8_t> bytes;

  Packed(const Meaning& from, int panel, int rows) {
    const Kind& kind = from.kind;
    matrix = {rows, from.cols, kind.codes, kind.scales, kind.has_minima, 0, nullptr, nullptr, nullptr};
    const Layout layout(matrix);
    bytes.assign(layout.total(), 0);
    matrix.data = bytes.data();
    matrix.scale_data = bytes.data() + layout.scales_at();
    matrix.minimum_data = bytes.data() + layout.minima_at();
    for (int row = 0; row < rows; ++row) {
      const long first = static_cast<long>(row / panel) * panel * from.cols;  // values of the panels before
      const int in_panel = row % panel;
      for (int col = 0; col < from.cols; ++col) put(from, row, col, first, in_panel, panel);
      if (kind.is_float()) continue;
      put_numbers(layout.scales_at(), from.scales, row, from.cols / kind.per_scale(), kind, panel);
      if (kind.has_minima) put_numbers(layout.minima_at(), from.minima, row, from.cols / kGroup, kind, panel);
    }
  }

 private:
  void put(const Meaning& from, int row, int col, long first, int in_panel, int panel) {
    const long value = static_cast<long>(row) * from.cols + col;
    const int step = col % kGroup / 4;
    switch (from.kind.codes) {
      case kFloat32: put_at((first + static_cast<long>(col) * panel + in_panel) * 4, from.floats[value]); break;
      case kFloat16:
        put_at((first + static_cast<long>(col) * panel + in_panel) * 2, to_half(from.floats[value]));
        break;
      case kInt8:
        bytes[first + (static_cast<long>(col / kGroup) * 8 + step) * panel * 4 + in_panel * 4 + col % 4] =
            static_cast<uint8_t>(from.codes[value]);
        break;
      default: put_narrow(from, col, first / kGroup * from.kind.bits() * 4, in_panel, panel, from.codes[value]);
    }
  }

  void put_narrow(const Meaning& from, int col, long first, int in_panel, int panel, int code) {
    const int step = col % kGroup / 4, vector = panel * 4, bits = from.kind.bits();
    if (from.kind.codes == kFloat4) code = float_code(code);
    else if (from.kind.codes != kInt4) code -= from.kind.least();
    uint8_t* group = &bytes[first + static_cast<long>(col / kGroup) * bits * vector + in_panel * 4 + col % 4];
    group[step % 4 * vector] |= static_cast<uint8_t>((code & 15) << (step < 4 ? 0 : 4));
    if (bits == 5) group[4 * vector] |= static_cast<uint8_t>(code >> 4 << step);
    if (bits == 6) group[(4 + step / 4) * vector] |= static_cast<uint8_t>(code >> 4 << step % 4 * 2);
  }

  // Of twice a float of four bits.
  static int float_code(int doubled) {
    const int size = std::abs(doubled), code = size <= 4 ? size : size == 6 ? 5 : size == 8 ? 6 : 7;
    return doubled < 0 ? code + 8 : code;
  }

  // Of which a row has `count`.
  void put_numbers(long at, const Numbers& from, int row, int count, const Kind& kind, int panel) {
    const int each = kBlock * kind.per_group(), in_panel = row % panel;
    const long first = static_cast<long>(row) * count;
    at += row / panel * panel * kind.number_bytes(count / kind.per_group());
    for (int i = 0; i < count; ++i) {
      if (kind.scales == kPowerScales) {
        put_at(at + static_cast<long>(i) * panel + in_panel,
               static_cast<uint8_t>(127 + std::ilogb(from.values[first + i])));
        continue;
      }
      if (kind.scales != kBlockScales) {
        put_at(at + (static_cast<long>(i) * panel + in_panel) * 2, to_half(from.values[first + i]));
        continue;
      }
      const long block = at + static_cast<long>(i / each) * (each + 2) * panel;
      put_at(block + in_panel * 2, to_half(from.halves[(first + i) / each]));
      put_at(block + (2 + i % each) * panel + in_panel, static_cast<int8_t>(from.factors[first + i]));
    }
  }

  template <typename Value>
  void put_at(long at, Value value) {
    std::memcpy(&bytes[at], &value, sizeof value);
  }
};

// A product's sum, and the sum of what was added without its sign, which is what rounding errors are a share of.
struct Sum {
  double value = 0, size = 0;
  void add(double term) { value += term, size += std::fabs(term); }
};

// Activations rounded as quantize says: the one thing that is done in floats here, because another rounding would be
// another result. A group's largest stays as it is if a tenth of the row's noise comes from it alone.
std::vector<double> rounded(const float* x, int cols) {
  auto peak_of = [](const float* from, int without) {
    float peak = 0;
    for (int i = 0; i < kGroup; ++i)
      if (i != without) peak = std::max(peak, std::fabs(from[i]));
    return peak;
  };
  float noise = 0;
  for (int at = 0; at < cols; at += kGroup) noise += peak_of(x + at, -1) * peak_of(x + at, -1);
  std::vector<double> values;
  for (int at = 0; at < cols; at += kGroup) {
    const float* from = x + at;
    int outlier = 0;
    for (int i = 0; i < kGroup; ++i)
      if (std::fabs(from[i]) > std::fabs(from[outlier])) outlier = i;
    float peak = std::fabs(from[outlier]);
    const float next = peak_of(from, outlier);
    if ((peak * peak - next * next) * 10 > noise) peak = next;
    else outlier = -1;
    const float inverse = peak > 0 ? 127.0f / peak : 0.0f;
    const float scale = std::bit_cast<float>(std::bit_cast<uint32_t>(peak * (1.0f / 127.0f)) & ~3u);
    for (int i = 0; i < kGroup; ++i)
      values.push_back(i == outlier ? double(from[i]) : double(std::nearbyint(from[i] * inverse)) * scale);
  }
  return values;
}

// A row of activations times a row of a matrix.
Sum product(const Meaning& matrix, int row, const float* x) {
  Sum sum;
  if (matrix.kind.is_float()) {
    for (int col = 0; col < matrix.cols; ++col) sum.add(double(x[col]) * matrix.floats[long(row) * matrix.cols + col]);
    return sum;
  }
  const int per_scale = matrix.kind.per_scale();
  const std::vector<double> values = rounded(x, matrix.cols);
  for (int col = 0; col < matrix.cols; ++col) {
    const long value = long(row) * matrix.cols + col;
    sum.add(values[col] * matrix.codes[value] * matrix.scales.values[value / per_scale]);
    if (matrix.kind.has_minima) sum.add(values[col] * matrix.minima.values[value / kGroup]);
  }
  return sum;
}

// Rows of activations as models have them: most are of one size, and every third row has outliers, some in columns that
// rows share and some in columns of their own, and two in one group.
Values activations(int rows, int cols) {
  Values x = numbers(long(rows) * cols, -3, 3);
  for (int row = 0; row < rows; row += 3) {
    float* at = &x[long(row) * cols];
    at[5] *= 9, at[(11 * row + 40) % cols] = -31, at[(7 * row + 70) % cols] += 17;
    if (row % 2) at[cols - 1] = 60, at[cols - 2] = -60;
  }
  return x;
}

struct Call {
  int begin, end;
  After after = After::kStore;
  const float* bias = nullptr;
};

constexpr float kUntouched = 12345.0f;

// Rows of a product as a plan would have it computed; `out` starts as what is there before.
Values run(const Packed& packed, const float* x, int rows, const Call& call, Values out, long stride) {
  const Matrix& matrix = packed.matrix;
  const bool is_float = matrix.codes == kFloat32 || matrix.codes == kFloat16;
  std::vector<uint8_t> codes(is_float ? 0 : rows * table->row_bytes(matrix.cols));
  std::vector<uint8_t> scratch(ostro::scratch_bytes(table->panel, matrix.cols));
  for (int i = rows - 1; !is_float && i >= 0; --i)  // in another order than they are read
    table->quantize(x + static_cast<long>(i) * matrix.cols, i, rows, matrix.cols, codes.data());
  const void* from = is_float ? static_cast<const void*>(x) : codes.data();
  table->linear(matrix, from, matrix.cols, rows, call.begin, call.end, call.after, call.bias, out.data(), stride,
                scratch.data());
  return out;
}

Values run(const Packed& packed, const float* x, int rows) {
  const Matrix& matrix = packed.matrix;
  return run(packed, x, rows, {0, matrix.rows / table->panel}, Values(long(rows) * matrix.rows, kUntouched),
             matrix.rows);
}

constexpr int kMostRows = 38;  // more than it takes for panels of narrow codes to be unpacked first, and two of AMX's tiles

void check_products(const Kind& kind) {
  const int panel = table->panel, cols = kind.is_float() ? 75 : kind.columns(160);
  const Meaning meaning(kind, 7 * panel, cols);
  const Values x = activations(kMostRows, cols);
  std::vector<Sum> want;
  for (int row = 0; row < kMostRows; ++row)
    for (int i = 0; i < 7 * panel; ++i) want.push_back(product(meaning, i, &x[long(row) * cols]));
  for (int panels : {1, 2, 3, 5, 7}) {
    const Packed packed(meaning, panel, panels * panel);
    for (int rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 23, 24, kMostRows}) {
      const Values out = run(packed, x.data(), rows);
      remember(out);
      for (int row = 0; row < rows; ++row)
        for (int i = 0; i < panels * panel; ++i) {
          const Sum& sum = want[row * 7 * panel + i];
          expect_near(out[long(row) * panels * panel + i], sum.value, 1e-6 * sum.size, "product with " + kind.name);
        }
    }
  }
}

void check_rows_are_alone(const Kind& kind) {
  const int panel = table->panel, cols = kind.is_float() ? 33 : kind.columns(96), out_rows = 5 * panel;
  const Meaning meaning(kind, out_rows, cols);
  const Packed packed(meaning, panel, out_rows);
  const Values x = activations(kMostRows, cols);
  const Values all = run(packed, x.data(), kMostRows);
  for (int first = 0; first < kMostRows; ++first)
    for (int rows = 1; first + rows <= kMostRows; ++rows) {
      const Values some = run(packed, &x[long(first) * cols], rows);
      expect(same_bits(some.data(), &all[long(first) * out_rows], long(rows) * out_rows),
             "rows of " + kind.name + " beside others are not what they are alone");
    }
  for (int begin = 0; begin < 5; ++begin)
    for (int end = begin + 1; end <= 5; ++end) {
      const Values part = run(packed, x.data(), kMostRows, {begin, end}, Values(all.size(), kUntouched), out_rows);
      for (int row = 0; row < kMostRows; ++row)
        for (int i = 0; i < out_rows; ++i) {
          const bool inside = begin * panel <= i && i < end * panel;
          const long at = long(row) * out_rows + i;
          expect(part[at] == (inside ? all[at] : kUntouched), "panels of " + kind.name + " by parts are not the whole");
        }
    }
}

// Long rows in several blocks, and more panels than are worked on at a time.
void check_blocks(const Kind& kind) {
  if (kind.is_float()) return;
  const int panel = table->panel, cols = 2048, rows = 33;
  const int panels = ostro::unpacked_panels(panel, cols) + 5, out_rows = panels * panel;
  const Meaning meaning(kind, out_rows, cols);
  const Packed packed(meaning, panel, out_rows);
  const Values x = activations(rows, cols), all = run(packed, x.data(), rows);
  for (int row = 0; row < rows; ++row) {
    const Values alone = run(packed, &x[long(row) * cols], 1);
    expect(same_bits(alone.data(), &all[long(row) * out_rows], out_rows), "blocks of rows with " + kind.name);
  }
  for (int i = 0; i < out_rows; i += 7) {
    const Sum sum = product(meaning, i, &x[long(rows - 1) * cols]);
    expect_near(all[long(rows - 1) * out_rows + i], sum.value, 1e-6 * sum.size, "a long row with " + kind.name);
  }
}

// Every number of tiles, with and without rows beside them.
void check_many_rows(const Kind& kind) {
  const int panel = table->panel, cols = kind.columns(96), out_rows = 3 * panel, most = 200;
  const Meaning meaning(kind, out_rows, cols);
  const Packed packed(meaning, panel, out_rows);
  const Values x = activations(most, cols);
  Values alone;
  for (int row = 0; row < most; ++row) {
    const Values one = run(packed, &x[long(row) * cols], 1);
    alone.insert(alone.end(), one.begin(), one.end());
  }
  remember(alone);
  for (int rows : {15, 17, 31, 32, 47, 64, 113, most}) {
    const Values all = run(packed, x.data(), rows);
    expect(same_bits(all.data(), alone.data(), long(rows) * out_rows), "many rows with " + kind.name);
  }
}

void check_after(const Kind& kind) {
  const int panel = table->panel, cols = kind.columns(64), panels = 6, out_rows = panels * panel, rows = 37;
  const long stride = out_rows + 3;
  const Meaning meaning(kind, out_rows, cols);
  const Packed packed(meaning, panel, out_rows);
  const Values x = numbers(long(rows) * cols, -1, 1), bias = numbers(out_rows, -2, 2);
  const Values before = numbers(rows * stride, -1, 1);
  for (const After after : {After::kStore, After::kAdd, After::kSilu, After::kGelu, After::kClampedSilu})
    for (const float* added : {static_cast<const float*>(nullptr), bias.data()}) {
      const Values out = run(packed, x.data(), rows, {0, panels, after, added}, before, stride);
      remember(out);
      const std::string what = kind.name + ", after " + std::to_string(static_cast<int>(after));
      auto sum_of = [&](int row, int i) {
        Sum sum = product(meaning, i, &x[long(row) * cols]);
        if (added) sum.add(added[i]);
        return sum;
      };
      for (int row = 0; row < rows; ++row) {
        const float* got = &out[row * stride];
        if (after == After::kStore || after == After::kAdd) {
          for (int i = 0; i < out_rows; ++i) {
            Sum sum = sum_of(row, i);
            if (after == After::kAdd) sum.add(before[row * stride + i]);
            expect_near(got[i], sum.value, 1e-6 * sum.size, what);
          }
          expect(same_bits(got + out_rows, &before[row * stride + out_rows], 3), what + ": wrote beyond its row");
          continue;
        }
        for (int i = 0; i < out_rows / 2; ++i) {
          const int at = i / panel * 2 * panel + i % panel;
          const Sum gate = sum_of(row, at), up = sum_of(row, at + panel);
          if (after == After::kClampedSilu) {
            const double want = clamped_silu(gate.value, up.value);
            expect_near(got[i], want, 4e-6 * ((gate.size + 1) * 8 + 7 * up.size), what);
            continue;
          }
          const double open = after == After::kSilu ? silu(gate.value) : gelu(gate.value);
          expect_near(got[i], open * up.value, 2e-6 * (gate.size * std::fabs(up.value) + std::fabs(open) * up.size),
                      what);
        }
        expect(same_bits(got + out_rows / 2, &before[row * stride + out_rows / 2], stride - out_rows / 2),
               what + ": wrote beyond its half");
      }
    }
}

// Codes and activations as large as they come. With scales of one every sum is a whole number, and must be that number.
void check_extremes(const Kind& kind) {
  const int panel = table->panel, cols = kind.columns(64), out_rows = 5 * panel;
  Meaning meaning(kind, out_rows, cols);
  meaning.scales.become_one();
  meaning.minima.become_one();
  for (int row = 0; row < out_rows; ++row)
    for (int col = 0; col < cols; ++col) {
      int& code = meaning.codes[long(row) * cols + col];
      switch (row % 5) {
        case 0: code = kind.least(); break;
        case 1: code = kind.most(); break;
        case 2: code = col % 2 ? kind.least() : kind.most(); break;
        case 3: code = col / 2 % 2 ? kind.least() : kind.most(); break;
        default: code = whole(0, 1) ? kind.least() : kind.most();
      }
    }
  Values x(long(kMostRows) * cols);
  for (int row = 0; row < kMostRows; ++row)
    for (int col = 0; col < cols; ++col) {
      bool negative = false;
      switch (row % 5) {
        case 0: break;
        case 1: negative = true; break;
        case 2: negative = col % 2; break;
        case 3: negative = col / 2 % 2; break;
        default: negative = whole(0, 1);
      }
      x[long(row) * cols + col] = negative ? -127.0f : 127.0f;
    }
  const Packed packed(meaning, panel, out_rows);
  for (int rows : {1, kMostRows}) {
    const Values out = run(packed, x.data(), rows);
    for (int row = 0; row < rows; ++row)
      for (int i = 0; i < out_rows; ++i)
        expect_near(out[long(row) * out_rows + i], product(meaning, i, &x[long(row) * cols]).value, 0,
                    "extremes of " + kind.name);
  }
}

// Rows with nothing in them, with what no number is, with the smallest and the largest numbers.
void check_odd_rows(const Kind& kind) {
  const int panel = table->panel, cols = kind.columns(64), out_rows = 3 * panel, rows = 34;
  const Meaning meaning(kind, out_rows, cols);
  const Packed packed(meaning, panel, out_rows);
  Values x = numbers(long(rows) * cols, -1, 1);
  std::fill_n(x.begin(), cols, 0.0f);
  for (int col = 0; col < cols; ++col)
    x[3 * cols + col] *= 1e-39f, x[5 * cols + col] *= 1e30f, x[6 * cols + col] *= 1e35f;
  for (int at = 0; at < kGroup; at += 3) {  // at any place of a vector
    Values broken = x;
    broken[1 * cols + at] = NAN;
    const Values out = run(packed, broken.data(), rows), alone = run(packed, &broken[6L * cols], 1);
    for (int i = 0; i < out_rows; ++i) {
      if (!kind.is_float()) expect(std::isnan(alone[i]), "numbers too large for scales, alone, times " + kind.name);
      expect(out[i] == 0, "zeros times " + kind.name + " are not zeros");
      expect(std::isnan(out[long(out_rows) + i]), "a row of " + kind.name + " with NaN is a number");
      expect(std::fabs(out[3L * out_rows + i]) < 1e-30, "the smallest numbers times " + kind.name);
      if (!kind.is_float()) expect(std::isnan(out[6L * out_rows + i]), "numbers too large for scales times " + kind.name);
      for (int row : {2, 4, 5}) {
        const Sum sum = product(meaning, i, &x[long(row) * cols]);
        expect_near(out[long(row) * out_rows + i], sum.value, 1e-6 * sum.size, "beside odd rows of " + kind.name);
      }
    }
  }
}

// ---- Attention

struct Head {
  Attention how;
  std::vector<uint8_t> bytes;
  std::vector<int32_t> pages;

  // Everything is NaN where no token was kept: nothing may come of it.
  Head(const Attention& how, int tokens) : how(how) {
    const int count = (tokens + kPage - 1) / kPage, all = count + 2;
    bytes.assign(all * stride(), 0xFF);
    for (int i = 0; i < count; ++i) pages.push_back((i * 5 + 3) % all);
    std::vector<int32_t> sorted = pages;
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end())
      std::iota(pages.rbegin(), pages.rend(), 1);  // five was a divisor
  }

  HeadPages view() { return {bytes.data(), stride()}; }

  double key(int token, int d) const { return cell(token, long(d) * kPage + token % kPage, 0); }
  double value(int token, int d) const { return cell(token, long(kPage + token % kPage) * how.dim + d, kPage); }

 private:
  // Other layers and heads lie between this one's pages.
  long stride() const { return 3 * ostro::head_page_bytes(how.dim, how.cells); }
  double cell(int token, long at, int first_scale) const {
    const uint8_t* page = &bytes[pages[token / kPage] * stride()];
    float value;
    Half half;
    switch (how.cells) {
      case Cells::kFloat: return std::memcpy(&value, page + at * 4, 4), value;
      case Cells::kHalf: return std::memcpy(&half, page + at * 2, 2), to_float(half);
      default:
        std::memcpy(&value, page + 2L * kPage * how.dim + 4L * (first_scale + token % kPage), 4);
        return double(static_cast<int8_t>(page[at])) * value;
    }
  }
};

Values attended(const Head& head, int position, const float* q, const float* sink) {
  const Attention& how = head.how;
  const int first = how.window ? std::max(0, position + 1 - how.window) : 0;
  std::vector<double> weights, out(how.dim, 0.0);
  double top = -INFINITY, sum = 0;
  for (int token = first; token <= position; ++token) {
    double score = 0;
    for (int d = 0; d < how.dim; ++d) score += q[d] * head.key(token, d);
    score *= how.scale;
    if (how.cap > 0) score = how.cap * std::tanh(score / how.cap);
    weights.push_back(score);
    top = std::max(top, score);
  }
  if (sink) top = std::max<double>(top, *sink), sum = std::exp(*sink - top);
  for (double& weight : weights) sum += weight = std::exp(weight - top);
  for (int token = first; token <= position; ++token)
    for (int d = 0; d < how.dim; ++d) out[d] += weights[token - first] / sum * head.value(token, d);
  return Values(out.begin(), out.end());
}

void check_attention(Cells cells, int dim, int window, float cap, bool sunk = false) {
  const int tokens = 53;
  Values sinks = numbers(9, -4, 4);
  sinks[4] = 200.0f;  // takes everything
  Head head({dim, window, cells, 1.0f / std::sqrt(static_cast<float>(dim)), cap}, tokens);
  const std::string what = "cells " + std::to_string(static_cast<int>(cells)) + ", dim " + std::to_string(dim) +
                           ", window " + std::to_string(window) + ", cap " + std::to_string(cap) +
                           (sunk ? ", sinks" : "");
  for (int position = 0; position < tokens; ++position) {
    const Values key = numbers(dim, -2, 2), value = numbers(dim, -2, 2);
    table->keep(head.how, head.view(), head.pages.data(), position, key.data(), value.data());
    for (int d = 0; d < dim; ++d) {
      const double share = cells == Cells::kFloat ? 0 : cells == Cells::kHalf ? 0x1p-11 : 2.0 / 254 * 1.001;
      const double most = cells == Cells::kInt8 ? 1 : std::fabs(key[d]),
                   of = cells == Cells::kInt8 ? 1 : std::fabs(value[d]);
      expect_near(static_cast<float>(head.key(position, d)), key[d], share * most, "kept key, " + what);
      expect_near(static_cast<float>(head.value(position, d)), value[d], share * of, "kept value, " + what);
    }
    const bool edge = position % kPage == 0 || position % kPage == kPage - 1;
    if (!edge && position % 7 != 4) continue;
    const Values q = numbers(9L * dim, -3, 3);
    Values alone(9L * dim);
    for (int query = 0; query < 9; ++query) {
      float* out = &alone[long(query) * dim];
      const float* sink = sunk ? &sinks[query] : nullptr;
      table->attend(head.how, head.view(), head.pages.data(), position, 1, 1, sink, &q[long(query) * dim], 0, out, 0);
      if (query % 4) continue;
      const Values want = attended(head, position, &q[long(query) * dim], sink);
      // A score is a sum of `dim` products, and as far off as they are many.
      for (int d = 0; d < dim; ++d) expect_near(out[d], want[d], 3e-6 + 4e-8 * dim, "attention, " + what);
    }
    remember(alone);
    for (int count : {2, 3, 4, 5, 6, 7, 9}) {
      Values out(long(count) * dim + 1, kUntouched);
      table->attend(head.how, head.view(), head.pages.data(), position, 1, count, sunk ? sinks.data() : nullptr, q.data(),
                    0, out.data(), 0);
      expect(same_bits(out.data(), alone.data(), long(count) * dim), "queries beside others, " + what);
      expect(out.back() == kUntouched, "attention wrote beyond its queries, " + what);
    }
  }
  // More than are computed together.
  for (const int count : {25, 50}) {
    const Values q = numbers(count * dim, -3, 3), sinks = numbers(count, -4, 4);
    Values out(long(count) * dim), alone(dim);
    table->attend(head.how, head.view(), head.pages.data(), 40, 1, count, sunk ? sinks.data() : nullptr, q.data(), 0,
                  out.data(), 0);
    for (int query = 0; query < count; ++query) {
      table->attend(head.how, head.view(), head.pages.data(), 40, 1, 1, sunk ? &sinks[query] : nullptr,
                    &q[long(query) * dim], 0, alone.data(), 0);
      expect(same_bits(&out[long(query) * dim], alone.data(), dim), "queries beside many others, " + what);
    }
  }
  struct Stretch {
    int tokens, count;
  };
  for (const auto [together, count] : {Stretch{2, 9}, {3, 8}, {4, 5}, {5, 4}, {8, 3}, {12, 2}, {2, 1}, {16, 1}})
    for (int position : {0, 1, 4, 16, 29, 32, 37, 45}) {
      if (position % kPage + together > kPage || position + together > tokens) continue;
      const long width = long(count) * dim, stride = width + 3, out_stride = width + 5;
      const Values q = numbers(stride * together, -3, 3);
      Values alone(width), out(out_stride * together, kUntouched);
      const float* sink = sunk ? sinks.data() : nullptr;
      table->attend(head.how, head.view(), head.pages.data(), position, together, count, sink, q.data(), stride,
                    out.data(), out_stride);
      for (int token = 0; token < together; ++token) {
        const float* got = &out[token * out_stride];
        table->attend(head.how, head.view(), head.pages.data(), position + token, 1, count, sink, &q[token * stride], 0,
                      alone.data(), 0);
        expect(same_bits(got, alone.data(), width), "tokens beside others, " + what);
        expect(std::count(got + width, got + out_stride, kUntouched) == 5, "attention wrote beyond a token, " + what);
      }
    }
}

// ---- Rows

void check_text_attention(int dim, int length, int window) {
  const std::string what =
      "text of " + std::to_string(length) + ", dim " + std::to_string(dim) + ", window " + std::to_string(window);
  const long stride = 3L * dim + 5, width = dim + 3L;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const Values qkv = numbers(static_cast<int>(stride * length), -2, 2);
  const long size = TextHead::floats(dim, length, table->panel);
  Values room(size + 1, kUntouched), out(width * length, kUntouched);
  const TextHead head(room.data(), dim, length, table->panel);
  table->pack_head(dim, length, &qkv[dim], &qkv[2L * dim], stride, head);
  // In two parts, of which one is no whole number of tiles.
  const int half = length / 2;
  for (const auto& [begin, end] : {std::pair{0, half}, std::pair{half, length}})
    table->attend_text({dim, length, window, scale}, head, begin, end, qkv.data(), stride, out.data(), width);
  remember(out);
  for (int token = 0; token < length; ++token) {
    const float *q = &qkv[token * stride], *got = &out[token * width];
    std::vector<double> weights(length, 0.0), want(dim, 0.0);
    double sum = 0;
    for (int other = 0; other < length; ++other) {
      if (window && std::abs(token - other) >= window) continue;
      double score = 0;
      for (int d = 0; d < dim; ++d) score += double(q[d]) * qkv[other * stride + dim + d];
      sum += weights[other] = std::exp(score * scale);
    }
    for (int other = 0; other < length; ++other)
      for (int d = 0; d < dim; ++d) want[d] += weights[other] / sum * qkv[other * stride + 2L * dim + d];
    for (int d = 0; d < dim; ++d) expect_near(got[d], want[d], 1e-5, "attention, " + what);
    for (long d = dim; d < width; ++d) expect(got[d] == kUntouched, "attention wrote beyond its head, " + what);
  }
  expect(room[size] == kUntouched, "attention wrote beyond its room, " + what);
}

void check_norm(int cols) {
  for (const bool adds : {false, true}) {
    const Values x = numbers(cols, -5, 5), weight = numbers(cols, -2, 2), before = numbers(cols + 1, -1, 1);
    Values out = before;
    table->norm(x.data(), cols, weight.data(), 1e-5f, adds, out.data());
    remember(out);
    double squares = 0;
    for (float value : x) squares += double(value) * value;
    const double scale = 1 / std::sqrt(squares / cols + 1e-5f);
    for (int i = 0; i < cols; ++i)
      expect_near(out[i], (adds ? before[i] : 0.0) + x[i] * scale * weight[i], 4e-6, "norm of " + std::to_string(cols));
    expect(out[cols] == before[cols], "norm wrote beyond its row");
  }
}

void check_rotate(int dim, int rotated) {
  const int heads = 3, half = rotated / 2;
  Values cosines(half), sines(half);
  for (int i = 0; i < half; ++i) {
    const double angle = 37 * std::pow(10000.0, -double(i) / half);
    cosines[i] = static_cast<float>(std::cos(angle)), sines[i] = static_cast<float>(std::sin(angle));
  }
  const Values before = numbers(heads * dim, -4, 4);
  Values x = before;
  table->rotate(x.data(), heads, dim, rotated, cosines.data(), sines.data());
  remember(x);
  for (int head = 0; head < heads; ++head)
    for (int d = 0; d < dim; ++d) {
      const float* from = &before[head * dim];
      double want = from[d];
      if (d < half) want = double(from[d]) * cosines[d] - double(from[d + half]) * sines[d];
      else if (d < rotated) want = double(from[d]) * cosines[d - half] + double(from[d - half]) * sines[d - half];
      expect_near(x[head * dim + d], want, d < rotated ? 1e-6 : 0, "rotate " + std::to_string(rotated));
    }
}

void check_softcap_and_weigh() {
  const float cap = 30;
  const Values before = numbers(96, -200, 200);
  Values x = before;
  table->softcap(x.data(), 96, cap);
  remember(x);
  for (int i = 0; i < 96; ++i) expect_near(x[i], cap * std::tanh(double(before[i]) / cap), 5e-5, "softcap");
  for (int count : {1, 7, 16, 33, 96}) {
    const float top = *std::max_element(before.begin(), before.begin() + count), temperature = 7;
    Values out(count + 1, kUntouched);
    table->weigh(before.data(), count, top, temperature, out.data());
    remember(out);
    for (int i = 0; i < count; ++i) {
      const double exponent = (double(before[i]) - top) / temperature, want = std::exp(exponent);
      expect_near(out[i], want, (1e-6 - 3e-7 * exponent) * want, "weigh");
    }
    expect(out[count] == kUntouched, "weigh wrote beyond its row");
  }
}

void check_dot_and_add_scaled(int count) {
  const Values a = numbers(count, -2, 2), b = numbers(count, -2, 2);
  const float sum = table->dot(a.data(), b.data(), count);
  remember({sum});
  double want = 0;
  for (int i = 0; i < count; ++i) want += double(a[i]) * b[i];
  expect_near(sum, want, 1e-5 * std::sqrt(count), "dot of " + std::to_string(count));
  const int whole = count / table->panel * table->panel;
  const Values before = numbers(count + 1, -1, 1);
  Values out = before;
  table->add_scaled(a.data(), 0.3f, whole, out.data());
  remember(out);
  for (int i = 0; i < whole; ++i) expect_near(out[i], before[i] + 0.3f * double(a[i]), 1e-6, "add_scaled");
  for (int i = whole; i <= count; ++i) expect(out[i] == before[i], "add_scaled wrote beyond its row");
}

// Gates and ups, a panel of each by turns.
void check_activate() {
  const int panel = table->panel, count = 6 * panel;
  const Values x = numbers(2 * count, -9, 9);
  for (const After after : {After::kSilu, After::kGelu, After::kClampedSilu}) {
    Values out(count + 1, kUntouched);
    table->activate(x.data(), count, after, out.data());
    remember(out);
    for (int i = 0; i < count; ++i) {
      const double gate = x[i / panel * 2 * panel + i % panel], up = x[(i / panel * 2 + 1) * panel + i % panel];
      const double inner = 0.7978845608 * (gate + 0.044715 * gate * gate * gate);
      const double activated = after == After::kSilu ? gate / (1 + std::exp(-gate)) : gate / (1 + std::exp(-2 * inner));
      const double want = after == After::kClampedSilu ? clamped_silu(gate, up) : activated * up;
      expect_near(out[i], want, 2e-5 * (1 + std::fabs(want)), "activate");
    }
    expect(out[count] == kUntouched, "activate wrote beyond its row");
  }
}

void check_layer_norm(int cols) {
  const Values x = numbers(cols, -3, 5), weight = numbers(cols, 0, 2), bias = numbers(cols, -1, 1);
  Values out(cols + 1, kUntouched);
  table->layer_norm(x.data(), cols, weight.data(), bias.data(), 1e-5f, out.data());
  remember(out);
  double mean = 0, variance = 0;
  for (int i = 0; i < cols; ++i) mean += x[i] / double(cols);
  for (int i = 0; i < cols; ++i) variance += (x[i] - mean) * (x[i] - mean) / cols;
  for (int i = 0; i < cols; ++i)
    expect_near(out[i], (x[i] - mean) / std::sqrt(variance + 1e-5) * weight[i] + bias[i], 1e-5, "layer_norm");
  expect(out[cols] == kUntouched, "layer_norm wrote beyond its row");
}

// Not zeros, which would pass for a sound row.
void check_norms_that_overflow(int cols) {
  Values x = numbers(cols, -3, 5), out(cols);
  const Values weight = numbers(cols, 1, 2), bias = numbers(cols, -1, 1);
  x[cols / 2] = 1e20f;
  table->layer_norm(x.data(), cols, weight.data(), bias.data(), 1e-5f, out.data());
  for (const float value : out) expect(std::isnan(value), "layer_norm of squares that overflow");
  table->norm(x.data(), cols, weight.data(), 1e-5f, false, out.data());
  for (const float value : out) expect(std::isnan(value), "norm of squares that overflow");
}

void check_scale_and_apply() {
  const int count = 40 * table->panel;
  const Values x = numbers(count, -9, 9);
  Values out(count + 1, kUntouched);
  table->scale(x.data(), count, 0.3f, out.data());
  remember(out);
  for (int i = 0; i < count; ++i) expect(out[i] == 0.3f * x[i], "scale");
  expect(out[count] == kUntouched, "scale wrote beyond its row");
  for (const After after :
       {After::kSilu, After::kGelu, After::kExactGelu, After::kRelu, After::kRelu2, After::kSigmoid}) {
    out = x, out.push_back(kUntouched);
    table->apply(out.data(), count, after);
    remember(out);
    for (int i = 0; i < count; ++i) {
      const double value = x[i], inner = 0.7978845608 * (value + 0.044715 * value * value * value);
      const double want = after == After::kSilu   ? value / (1 + std::exp(-value))
                          : after == After::kGelu ? value / (1 + std::exp(-2 * inner))
                          : after == After::kRelu ? std::max(value, 0.0)
                          : after == After::kRelu2 ? std::max(value, 0.0) * std::max(value, 0.0)
                          : after == After::kSigmoid ? 1 / (1 + std::exp(-value))
                                                  : value * std::erfc(-value / std::sqrt(2.0)) / 2;
      expect_near(out[i], want, 2e-6 * (1 + std::fabs(want)), "apply");
    }
    expect(out[count] == kUntouched, "apply wrote beyond its row");
  }
}

// ---- Mixers that keep a state

void check_multiply() {
  const int count = 6 * table->panel;
  const Values gates = numbers(count, -9, 9), before = numbers(count, -2, 2);
  for (const After after : {After::kStore, After::kSilu, After::kSigmoid}) {
    Values x = before;
    x.push_back(kUntouched);
    table->multiply(gates.data(), count, after, x.data());
    remember(x);
    for (int i = 0; i < count; ++i) {
      const double gate = gates[i], sigmoid = 1 / (1 + std::exp(-gate));
      const double factor = after == After::kStore ? gate : after == After::kSilu ? gate * sigmoid : sigmoid;
      expect_near(x[i], before[i] * factor, 4e-6 * (1 + std::fabs(before[i] * factor)), "multiply");
    }
    expect(x[count] == kUntouched, "multiply wrote beyond its row");
  }
}

void check_filter(int taps, bool biased) {
  const int count = 3 * table->panel, stride = count + 5;
  const Values x = numbers(taps * count, -2, 2), weights = numbers(taps * stride, -1, 1), bias = numbers(count, -1, 1);
  std::vector<const float*> inputs(taps);
  for (int tap = 0; tap < taps; ++tap) inputs[tap] = &x[tap * count];
  for (const After after : {After::kStore, After::kSilu}) {
    Values out(count + 1, kUntouched);
    table->filter(taps, inputs.data(), weights.data(), stride, biased ? bias.data() : nullptr, after, count, out.data());
    remember(out);
    for (int i = 0; i < count; ++i) {
      double want = biased ? bias[i] : 0;
      for (int tap = 0; tap < taps; ++tap) want += double(x[tap * count + i]) * weights[tap * stride + i];
      if (after == After::kSilu) want = silu(want);
      expect_near(out[i], want, 3e-6, "filter of " + std::to_string(taps));
    }
    expect(out[count] == kUntouched, "filter wrote beyond its row");
    // One token whose earlier inputs are kept.
    Values kept(taps * stride, kUntouched), one(count + 1, kUntouched);
    for (int tap = 0; tap + 1 < taps; ++tap) std::copy_n(inputs[tap], count, &kept[tap * stride]);
    table->filter_one(taps, kept.data(), inputs[taps - 1], weights.data(), stride, biased ? bias.data() : nullptr,
                      after, count, one.data());
    expect(one == out, "filter of one token is not the same bits");
    for (int tap = 0; tap + 1 < taps; ++tap)
      expect(std::equal(inputs[tap + 1], inputs[tap + 1] + count, &kept[tap * stride]), "inputs do not move on");
    for (int tap = 0; tap < taps; ++tap)
      for (int i = tap + 1 < taps ? count : 0; i < stride; ++i)
        expect(kept[tap * stride + i] == kUntouched, "filter wrote beyond what is kept");
  }
}

void check_unit(int count) {
  const Values x = numbers(count, -3, 3);
  const float scale = 0.25f, eps = 1e-6f;
  Values out(count + 1, kUntouched);
  table->unit(x.data(), count, scale, eps, out.data());
  remember(out);
  double squares = eps;
  for (const float each : x) squares += double(each) * each;
  for (int i = 0; i < count; ++i) expect_near(out[i], scale * x[i] / std::sqrt(squares), 1e-6, "unit");
  expect(out[count] == kUntouched, "unit wrote beyond its row");
}

// From where softplus is nearly zero to where it is its argument.
void check_decay() {
  const int count = 40 * table->panel;
  const float bias = 0.5f, decay = -0.3f;
  const Values x = numbers(count, -30, 30);
  Values steps = x, kept(count + 1, kUntouched);
  steps.push_back(kUntouched);
  table->decay(count, bias, decay, steps.data(), kept.data());
  remember(steps), remember(kept);
  for (int i = 0; i < count; ++i) {
    const float sum = x[i] + bias;
    const double want = std::log1p(std::exp(double(sum))), left = std::exp(decay * want);
    expect_near(steps[i], want, 1e-6 * want, "softplus");
    expect_near(kept[i], left, 2e-6 * left, "decay");
  }
  expect(steps[count] == kUntouched && kept[count] == kUntouched, "decay wrote beyond its row");
}

// A tile against the recurrence as models.architecture has it, and all tokens at once against one at a time.
void check_delta(int rows) {
  const int count = 7;
  const Values q = numbers(count * rows, -0.3f, 0.3f), k = numbers(count * rows, -0.3f, 0.3f);
  const Values v = numbers(count * kStateLanes, -2, 2), kept = numbers(count, 0.5f, 1), strength = numbers(count, 0, 1);
  Values likeness(count), tile = numbers(rows * kStateLanes, -1, 1);
  for (int t = 0; t < count; ++t)
    for (int i = 0; i < rows; ++i) likeness[t] += q[t * rows + i] * k[t * rows + i];
  std::vector<double> want(tile.begin(), tile.end());
  Values out = v, apart = v, single = tile;
  table->delta(rows, {count, q.data(), k.data(), out.data(), kept.data(), strength.data(), likeness.data()}, tile.data());
  for (int t = 0; t < count; ++t) {
    const int at = t * rows;
    float* own = &apart[t * kStateLanes];
    table->delta(rows, {1, &q[at], &k[at], own, &kept[t], &strength[t], &likeness[t]}, single.data());
    for (int lane = 0; lane < kStateLanes; ++lane) {
      double read = 0, seen = 0;
      for (int i = 0; i < rows; ++i) read += (want[i * kStateLanes + lane] *= kept[t]) * k[at + i];
      const double written = (v[t * kStateLanes + lane] - read) * strength[t];
      for (int i = 0; i < rows; ++i) seen += (want[i * kStateLanes + lane] += k[at + i] * written) * q[at + i];
      expect_near(out[t * kStateLanes + lane], seen, 1e-5, "what a delta net of " + std::to_string(rows) + " reads");
    }
  }
  for (size_t i = 0; i < want.size(); ++i) expect_near(tile[i], want[i], 1e-5, "a delta net's state");
  expect(out == apart && tile == single, "a delta net's tokens are not the same bits one at a time");
  remember(out), remember(tile);
}

void check_ssm(int rows) {
  const int count = 7;
  const Values b = numbers(count * rows, -1, 1), c = numbers(count * rows, -1, 1);
  const Values u = numbers(count * kStateLanes, -2, 2);
  const Values kept = numbers(count, 0.5f, 1), step = numbers(count, 0, 1);
  const float skip = 0.7f;
  Values tile = numbers(rows * kStateLanes, -1, 1), out = u, apart = u;
  std::vector<double> want(tile.begin(), tile.end());
  Values single = tile;
  table->ssm(rows, {count, b.data(), c.data(), out.data(), kept.data(), step.data(), skip}, tile.data());
  for (int t = 0; t < count; ++t) {
    const int at = t * rows;
    float* own = &apart[t * kStateLanes];
    table->ssm(rows, {1, &b[at], &c[at], own, &kept[t], &step[t], skip}, single.data());
    for (int lane = 0; lane < kStateLanes; ++lane) {
      const double input = u[t * kStateLanes + lane];
      double seen = skip * input;
      for (int i = 0; i < rows; ++i) {
        double& s = want[i * kStateLanes + lane];
        s = kept[t] * s + step[t] * input * b[at + i];
        seen += s * c[at + i];
      }
      expect_near(out[t * kStateLanes + lane], seen, 3e-5, "what Mamba2 of " + std::to_string(rows) + " reads");
    }
  }
  for (size_t i = 0; i < want.size(); ++i) expect_near(tile[i], want[i], 1e-5, "Mamba2's state");
  expect(out == apart && tile == single, "Mamba2's tokens are not the same bits one at a time");
  remember(out), remember(tile);
}

// ---- All of it

Values check(const Kernels* kernels) {
  Values results;
  table = kernels, seen = &results;
  bits.seed(1);
  for (const Kind& kind : all_kinds()) {
    check_products(kind);
    check_rows_are_alone(kind);
    check_blocks(kind);
    check_many_rows(kind);
    check_after(kind);
    check_odd_rows(kind);
    if (!kind.is_float()) check_extremes(kind);
  }
  for (const Cells cells : {Cells::kFloat, Cells::kHalf, Cells::kInt8})
    for (int dim : {16, 64, 80, 256})
      for (int window : {0, 1, 7, 16, 20})
        for (float cap : {0.0f, 5.0f})
          if (dim <= 64 || (window % 7 == 0 && cap == 0.0f)) check_attention(cells, dim, window, cap);
  for (const Cells cells : {Cells::kFloat, Cells::kHalf, Cells::kInt8})
    for (int window : {0, 20}) check_attention(cells, 64, window, 0.0f, true);
  for (int cols : {16, 48, 64, 80, 576}) check_norm(cols);
  for (int dim : {16, 64, 80, 96, 128})
    for (int rotated : {dim, dim / 2}) check_rotate(dim, rotated);
  check_softcap_and_weigh();
  for (int count : {4, 16, 48, 70, 96, 576, 577}) check_dot_and_add_scaled(count);
  check_activate();
  for (int dim : {16, 48, 64})
    for (int length : {1, 2, 15, 16, 17, 53})
      for (int window : {0, 1, 4, 60}) check_text_attention(dim, length, window);
  for (int cols : {16, 48, 96, 576}) check_layer_norm(cols);
  for (int cols : {16, 48, 96, 576}) check_norms_that_overflow(cols);
  check_scale_and_apply();
  check_multiply();
  for (int taps : {1, 2, 3, 4, kMostTaps})
    for (bool biased : {false, true}) check_filter(taps, biased);
  for (int count : {4, 12, 36, 128}) check_unit(count);
  check_decay();
  for (int rows : {1, 12, 33, 128}) check_delta(rows), check_ssm(rows);
  return results;
}

}  // namespace

// Names of tables may be given; without, it is all of them.
int main(int count, char** names) {
  const std::vector<const Kernels*> twins = {find_kernels("plain"), &kPlain8Kernels, &kPlain16Kernels};
  std::vector<Values> expected(twins.size());
  if (count == 1) std::transform(twins.begin(), twins.end(), expected.begin(), check);
  std::vector<const Kernels*> tables(kernels_begin(), kernels_begin() + kernels_count());
  tables.push_back(&kTiles16Kernels);
  for (const Kernels* kernels : tables) {
    const bool named =
        std::any_of(names + 1, names + count, [&](const char* name) { return !std::strcmp(name, kernels->name); });
    if (count > 1 && !named) continue;
    if (!kernels->runs_here()) {
      std::printf("%s: does not run here\n", kernels->name);
      expect(count == 1, "was asked for");
      continue;
    }
    const Values results = check(kernels);
    const auto twin =
        std::find_if(twins.begin(), twins.end(), [&](auto each) { return each->panel == kernels->panel; });
    Values& want = expected[twin - twins.begin()];
    if (want.empty()) want = check(*twin);
    long differ = 0;
    for (std::size_t at = 0; at < std::min(want.size(), results.size()); ++at)
      differ += !same_bits(&results[at], &want[at], 1);
    table = kernels;
    expect(results.size() == want.size() && !differ,
           std::to_string(differ) + " results are not the bits of " + (*twin)->name);
    std::printf("%s: checked; of %zu results %ld are not the bits of %s\n", kernels->name, want.size(), differ,
                (*twin)->name);
    std::fflush(stdout);
  }
  table = twins[0];
  expect(find_kernels(nullptr) && find_kernels(nullptr)->runs_here(), "no kernels run here");
  expect(!find_kernels("none of that name"), "kernels of no name are found");
  std::printf(failures ? "%d expectations failed\n" : "all as expected\n", failures);
  return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
