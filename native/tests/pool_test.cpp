// Pools of threads that poll and that sleep, alone and with more threads than CPUs: what the sanitizers for threads watch.
// No call is lost, none is served twice, and at a barrier each thread sees what the others did before.
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "pool.h"

using namespace ostro;

namespace {

constexpr int kCalls = 300, kMeetings = 3;

// The number of things that went wrong.
int misses(int threads, bool polling) {
  std::vector<int> counts(threads), wrong(threads);
  Pool pool(threads);
  for (int call = 0; call < kCalls; ++call) {
    // Whoever polls may be told not to, and the other way round.
    pool.set_polling(call % 100 < 50 ? polling : !polling);
    // Some calls come at once, some while threads poll, and some find them asleep.
    if (call % 10 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100 * (call % 30)));
    pool.run([&](int thread) {
      for (int meeting = 1; meeting <= kMeetings; ++meeting) {
        ++counts[thread];
        pool.meet();
        for (int count : counts) wrong[thread] += count != call * kMeetings + meeting;
        pool.meet();
      }
    });
  }
  int found = 0;
  for (int each : wrong) found += each;
  for (int count : counts) found += count != kCalls * kMeetings;
  return found;
}

}  // namespace

int main() {
  int found = 0;
  for (bool polling : {false, true})
    for (int threads : {1, 2, 5}) found += misses(threads, polling);
  // Pools that take each other's CPUs.
  std::vector<int> beside(4);
  std::vector<std::thread> callers;
  for (size_t i = 0; i < beside.size(); ++i)
    callers.emplace_back([&, i] { beside[i] = misses(static_cast<int>(i) + 2, i % 2 == 0); });
  for (std::thread& caller : callers) caller.join();
  for (int each : beside) found += each;
  // Pools that end at once, and while their threads poll.
  for (int i = 0; i < 50; ++i) {
    Pool pool(3);
    pool.set_polling(true);
    for (int call = 0; call < i % 3; ++call) pool.run([](int) {});
  }
  std::printf("%d calls or meetings missed\n", found);
  return found != 0;
}
