// How threads share an operation's work. Knows nothing about what they compute.
#pragma once

#include <algorithm>
#include <atomic>

namespace ostro {

// Up to this many rows, each thread prepares all of them for itself: synchronising would take longer.
constexpr int kFewRows = 2;
// Rows of floats multiplied together, a multiple of every kernel's tile.
constexpr int kTile = 8;
// Panels are taken in multiples of this; an operation's work is split into this many pieces per thread.
constexpr int kPanels = 4;
constexpr int kPieces = 6;

// Takes pieces of `count` items, `size` at a time, until none are left.
template <typename Body>
void take(std::atomic<int>& taken, int count, int size, Body body) {
  for (;;) {
    const int begin = taken.fetch_add(size, std::memory_order_relaxed);
    if (begin >= count) return;
    body(begin, std::min(count, begin + size));
  }
}

inline int piece_size(int count, int threads, int multiple) {
  const int size = count / (threads * kPieces) / multiple * multiple;
  return std::max(size, multiple);
}

}  // namespace ostro
