#include "digest.h"

#include <bit>
#include <cstring>

namespace ostro {
namespace {

// Enough independent lanes to fill vectors and to hide the latency of multiplication.
constexpr int kLanes = 32;
constexpr int64_t kBlockBytes = kLanes * 4;

// Bijective in `word` for any previous state: damage to a single word always changes the result.
uint32_t mixed(uint32_t lane, uint32_t word) { return std::rotl((lane ^ word) * 0x9E3779B1u, 13); }
uint64_t folded(uint64_t total, uint64_t word) {
  total = (total ^ word) * 0x9E3779B97F4A7C15u;
  return total ^ total >> 29;
}

void take_block(uint32_t* lanes, const uint8_t* data) {
  uint32_t words[kLanes];
  std::memcpy(words, data, sizeof words);
  static_assert(std::endian::native == std::endian::little, "words are read as they lie");
  for (int i = 0; i < kLanes; ++i) lanes[i] = mixed(lanes[i], words[i]);
}

}  // namespace

uint64_t digest(const uint8_t* data, int64_t size, uint64_t before) {
  uint32_t lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<uint32_t>(i + 1) * 0x85EBCA6Bu;
  const int64_t whole = size / kBlockBytes * kBlockBytes;
  for (int64_t at = 0; at < whole; at += kBlockBytes) take_block(lanes, data + at);
  if (whole < size) {
    uint8_t rest[kBlockBytes] = {};
    std::memcpy(rest, data + whole, static_cast<size_t>(size - whole));
    take_block(lanes, rest);
  }
  // The size distinguishes a padded block from a full one.
  uint64_t total = folded(before, static_cast<uint64_t>(size));
  for (const uint32_t lane : lanes) total = folded(total, lane);
  return total;
}

}  // namespace ostro
