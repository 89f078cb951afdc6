// AVX-512's kernels, but matmuls of many quantized rows on AMX. Linux only: others do not ask for a permission, but have
// not been tried.
#define OSTRO_ISA amx
#include "isa_avx512.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cpuid.h>

#include <cstdlib>
#include <cstring>

namespace OSTRO_ISA {

// GCC's intrinsics are macros that paste a tile's number as text, so that it cannot be a template's argument. Tiles 0
// and 1 are of sums, 2 is of activations, 4 and 5 are of weights.
struct Tiles {
  static void configure(int rows, int columns) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 2; ++i) {
      config.rows[i] = static_cast<uint8_t>(rows);
      config.rows[4 + i] = static_cast<uint8_t>(columns / 4);
      config.bytes[i] = config.bytes[4 + i] = 4 * kPanel;
    }
    config.rows[2] = static_cast<uint8_t>(rows);
    config.bytes[2] = static_cast<uint16_t>(columns);
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  // Until then each context switch would save all tiles.
  static void release() { asm volatile("tilerelease"); }
  template <int tile>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
  }
  template <int tile>
  static void load(const void* from, long stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
  }
  template <int tile>
  static void store(void* to, long stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
  }
  template <int sums, int a, int b>
  static void dot() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(a), "i"(b));
  }
  // A row of sums times a scale, rounded once, as elsewhere.
  static Floats scaled(const int32_t* sums, float scale) {
    return _mm512_cvtepi32_ps(_mm512_load_si512(sums)) * all(scale);
  }
};

}  // namespace OSTRO_ISA

#include "tiles.inl"

namespace ostro {

extern const Kernels kAvx512Kernels;
extern const TiledMatmuls kAmxMatmuls;

namespace {

bool has_tiles() {
  constexpr unsigned kTiles = 1u << 24, kBytes = 1u << 25;
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kTiles) && (edx & kBytes);
}

// Linux saves the state of tiles only for processes that asked for it; threads started later inherit the permission.
bool ask_for_tiles() {
  constexpr long kRequest = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

// The permission is the whole process's: it is not asked for where the user wants other kernels.
bool is_wanted() {
  const char* most = std::getenv("OSTRO_NATIVE_ISA");
  return !most || !*most || !std::strcmp(most, "amx");
}

bool runs_here() {
  if (!is_wanted()) return false;
  static const bool runs = kAvx512Kernels.runs_here() && has_tiles() && ask_for_tiles();
  return runs;
}

}  // namespace

constinit const TiledMatmuls kAmxMatmuls = amx::tiled_matmuls<kAvx512Kernels>("amx", runs_here);

}  // namespace ostro
