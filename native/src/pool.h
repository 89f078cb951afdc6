// The thread pool: threads that run one function together, step by step. Knows nothing about what they compute.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace ostro {

using Clock = std::chrono::steady_clock;

inline void pause() {
#if defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#elif defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Whether `ready` became true within a few pauses: of 5 ns on some CPUs and 50 on others, so patience goes by the clock.
template <typename Ready>
bool poll(const Ready& ready) {
  for (int i = 0; i < 16; ++i) {
    if (ready()) return true;
    pause();
  }
  return false;
}

// A barrier. Threads poll, because steps are a few microseconds long; one that has polled for a while yields its CPU, so
// that a neighbour who takes one slows the others and never stops them.
class Barrier {
 public:
  explicit Barrier(int size) : size_(size) {}

  void wait(Clock::duration patience) {
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    const auto passed = [&] { return round_.load(std::memory_order_acquire) != round; };
    for (const auto end = Clock::now() + patience; !poll(passed);)
      if (Clock::now() >= end) std::this_thread::yield();
  }

 private:
  const int size_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
};

// The caller is one of the threads.
class Pool {
 public:
  explicit Pool(int size);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return size_; }

  // Whether each thread has a CPU of its own, so that it may keep it while it waits. Not so at first.
  void set_polling(bool polling) { polling_.store(polling, std::memory_order_relaxed); }

  // Waits in `work` until all threads have come as far.
  void meet() { barrier_.wait(may_poll() ? kMeeting : Clock::duration::zero()); }

  // Calls work(0) to work(size - 1), each on its own thread, and returns when all are done.
  void run(const std::function<void(int)>& work);

 private:
  using Work = const std::function<void(int)>*;

  void serve(int index);
  // Null ends the threads.
  void call(Work work);
  // Wait for another call than the last one seen: awake, which may fail, or asleep. `rests` is the calling thread's.
  bool await_awake(uint64_t seen, int& rests) const;
  void await(uint64_t seen);
  void stop();
  bool may_poll() const { return polling_.load(std::memory_order_relaxed); }

  // Most threads come to a barrier within this of each other.
  static constexpr Clock::duration kMeeting = std::chrono::microseconds(10);
  // Between two steps a thread stays awake for as long as the engine usually takes from one to the next, unless another
  // program wants its CPU: asleep, it is woken ahead of programs that have had their share of time. It then rests, for a
  // number of steps.
  static constexpr Clock::duration kAwake = std::chrono::microseconds(400), kTaken = std::chrono::microseconds(50);
  static constexpr int kRests = 100;

  const int size_;
  Barrier barrier_;
  std::atomic<bool> polling_{false};
  Work work_ = nullptr;  // written before a call is counted, and read after
  alignas(64) std::atomic<uint64_t> calls_{0};
  std::mutex mutex_;
  std::condition_variable called_;
  int asleep_ = 0;  // guarded by the mutex
  std::vector<std::thread> threads_;
};

// The part [begin, end) of `count` items that belongs to `index` of `size`, in whole units of so many items.
struct Share {
  int begin, end;
  Share(int count, int index, int size, int unit = 1) {
    const int64_t units = (static_cast<int64_t>(count) + unit - 1) / unit;
    begin = static_cast<int>(std::min<int64_t>(count, units * index / size * unit));
    end = static_cast<int>(std::min<int64_t>(count, units * (index + 1) / size * unit));
  }
};

}  // namespace ostro
