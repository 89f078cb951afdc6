// How fast tables of kernels multiply, on one thread: billions of multiply-adds a second for each form and number of rows,
// and what each table does beside the last. They take turns; the best of all rounds counts.
//
//     cmake -S native -B build/native -DOSTRO_TESTS=ON && cmake --build build/native --target ostro_linear_bench
//     build/native/ostro_linear_bench 2048 512 16,32,128 amx avx512      # columns, outputs, rows, tables
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "kernels.h"

using namespace ostro;

namespace {

constexpr int kRounds = 12;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Aligned as a plan's memory is.
struct Bytes {
  std::vector<uint8_t> room;
  uint8_t* at;

  explicit Bytes(long size) : room(size + 64) {
    at = room.data() + (64 - reinterpret_cast<uintptr_t>(room.data()) % 64) % 64;
  }
};

// The shortest time that each table takes for a matmul.
std::vector<double> times(const std::vector<const Kernels*>& tables, const Matrix& matrix, const std::vector<float>& x,
                          int rows) {
  std::vector<float> out(static_cast<long>(rows) * matrix.rows);
  std::vector<double> best(tables.size(), 1e9);
  for (int round = 0; round < kRounds; ++round)
    for (std::size_t i = 0; i < tables.size(); ++i) {
      const Kernels& table = *tables[i];
      const Bytes codes(rows * table.row_bytes(matrix.cols)), scratch(scratch_bytes(table.panel, matrix.cols));
      for (int row = 0; row < rows; ++row)
        table.quantize(&x[static_cast<long>(row) * matrix.cols], row, rows, matrix.cols, codes.at);
      const double began = now();
      table.linear(matrix, codes.at, 0, rows, 0, matrix.rows / table.panel, After::kStore, nullptr, out.data(),
                   matrix.rows, scratch.at);
      best[i] = std::min(best[i], now() - began);
    }
  return best;
}

}  // namespace

int main(int count, char** words) {
  if (count < 5) return std::puts("COLUMNS OUTPUTS ROWS,… TABLE…"), EXIT_FAILURE;
  const int cols = std::atoi(words[1]), outputs = std::atoi(words[2]);
  std::vector<const Kernels*> tables;
  for (int i = 4; i < count; ++i)
    if (const Kernels* table = find_kernels(words[i])) tables.push_back(table);
    else return std::printf("%s does not run here\n", words[i]), EXIT_FAILURE;
  std::mt19937 bits(7);
  for (const Form& form : kForms) {
    if (form.is_float() || cols % form.unit()) continue;
    Matrix matrix{outputs, cols, form.codes, form.scales, form.has_minima, 0, nullptr, nullptr, nullptr};
    const Layout layout(matrix);
    const Bytes packed(layout.total());
    // Six bits a byte: so halves are small numbers.
    for (long i = 0; i < layout.total(); ++i) packed.at[i] = bits() & 63;
    matrix.data = packed.at;
    matrix.scale_data = packed.at + layout.scales_at(), matrix.minimum_data = packed.at + layout.minima_at();
    std::printf("codes %d scales %d, %d x %d:", form.codes, form.scales, outputs, cols);
    std::istringstream all(words[3]);
    for (std::string rows; std::getline(all, rows, ',');) {
      const int number = std::stoi(rows);
      std::vector<float> x(static_cast<long>(number) * cols);
      for (float& value : x) value = static_cast<float>(static_cast<int>(bits() % 2001) - 1000) / 313.0f;
      const std::vector<double> best = times(tables, matrix, x, number);
      std::printf("  %d rows", number);
      for (const double time : best)
        std::printf(" %.0f (%.2f)", 1e-9 * number * cols * outputs / time, best.back() / time);
    }
    std::puts("");
  }
}
