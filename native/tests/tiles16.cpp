// The kernels for AMX without AMX: the plain ones sixteen wide, and the unit's operations in plain C++ as its manual has
// them, so that any machine can hold their arithmetic against the plain kernels'.
#define OSTRO_ISA tiles16
#define OSTRO_PLAIN_PANEL 16
#include "isa_plain.h"

#include <cstdlib>

#include "twins.h"

namespace OSTRO_ISA {

struct Tiles {
  struct Tile {
    int rows, bytes;
    uint8_t at[16][64];
  };
  static inline thread_local Tile tiles[6];

  static void require(bool holds) {
    if (!holds) std::abort();
  }
  static void configure(int rows, int columns) {
    require(rows <= 16 && columns <= 64 && columns % 4 == 0);
    for (int i = 0; i < 2; ++i) tiles[i] = {rows, 64, {}}, tiles[4 + i] = {columns / 4, 64, {}};
    tiles[2] = {rows, columns, {}};
  }
  static void release() {
    for (Tile& tile : tiles) tile = {};
  }
  template <int tile>
  static void zero() {
    require(tiles[tile].rows);
    std::memset(tiles[tile].at, 0, sizeof tiles[tile].at);
  }
  template <int tile>
  static void load(const void* from, long stride) {
    zero<tile>();
    for (int row = 0; row < tiles[tile].rows; ++row)
      std::memcpy(tiles[tile].at[row], static_cast<const char*>(from) + row * stride, tiles[tile].bytes);
  }
  template <int tile>
  static void store(void* to, long stride) {
    require(tiles[tile].rows);
    for (int row = 0; row < tiles[tile].rows; ++row)
      std::memcpy(static_cast<char*>(to) + row * stride, tiles[tile].at[row], tiles[tile].bytes);
  }
  template <int sums, int a, int b>
  static void dot() {
    require(tiles[a].rows == tiles[sums].rows && tiles[b].rows * 4 == tiles[a].bytes);
    for (int row = 0; row < tiles[sums].rows; ++row)
      for (int column = 0; column < 16; ++column) {
        int32_t sum;
        std::memcpy(&sum, &tiles[sums].at[row][4 * column], 4);
        for (int i = 0; i < tiles[a].bytes; ++i)
          sum += static_cast<int8_t>(tiles[a].at[row][i]) * static_cast<int8_t>(tiles[b].at[i / 4][4 * column + i % 4]);
        std::memcpy(&tiles[sums].at[row][4 * column], &sum, 4);
      }
  }
  static Floats scaled(const int32_t* sums, float scale) {
    Floats floats;
    for (int i = 0; i < kPanel; ++i) floats.at[i] = static_cast<float>(sums[i]) * scale;
    return floats;
  }
};

}  // namespace OSTRO_ISA

#include "tiles.inl"

namespace ostro {

const Kernels kTiles16Kernels =
    with_tiles(kPlain16Kernels, tiles16::tiled_matmuls<kPlain16Kernels>("tiles16", [] { return true; }));

}  // namespace ostro
