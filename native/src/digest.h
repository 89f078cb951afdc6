// A fast checksum of packed data. It detects damage; it is no defence against forgery.
#pragma once

#include <cstdint>

namespace ostro {

// The checksum of `size` bytes following those that gave `before`; 0 starts a new one. Depends on how data is split.
uint64_t digest(const uint8_t* data, int64_t size, uint64_t before);

}  // namespace ostro
