// The thread pool: threads that run one function together, step by step. Knows nothing about what they compute.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace ostro {

// A barrier. Threads spin, because steps are a few microseconds long; one that has spun for a while yields its core, so
// that a machine with more threads than cores still makes progress.
class Barrier {
 public:
  explicit Barrier(int size) : size_(size) {}

  void wait() {
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      if (spins < kSpins) pause();
      else std::this_thread::yield();
    }
  }

 private:
  static constexpr int kSpins = 2000;

  static void pause() {
#if defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

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
  Barrier& barrier() { return barrier_; }

  // Calls work(0) to work(size - 1), each on its own thread, and returns when all are done.
  void run(const std::function<void(int)>& work);

 private:
  void serve(int index);
  void stop();

  const int size_;
  Barrier barrier_;
  std::mutex mutex_;
  std::condition_variable called_;
  const std::function<void(int)>* work_ = nullptr;
  uint64_t call_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

// The part [begin, end) of `count` items that belongs to `index` of `size`.
struct Share {
  int begin, end;
  Share(int count, int index, int size)
      : begin(static_cast<int>(static_cast<int64_t>(count) * index / size)),
        end(static_cast<int>(static_cast<int64_t>(count) * (index + 1) / size)) {}
};

}  // namespace ostro
