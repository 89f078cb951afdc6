#include "pool.h"

namespace ostro {

Pool::Pool(int size) : size_(size), barrier_(size) {
  try {
    for (int index = 1; index < size; ++index) threads_.emplace_back([this, index] { serve(index); });
  } catch (...) {
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  call(nullptr);
  for (auto& thread : threads_) thread.join();
}

void Pool::run(const std::function<void(int)>& work) {
  if (size_ > 1) call(&work);
  work(0);
  meet();
}

void Pool::call(Work work) {
  bool asleep;
  {
    // Under the lock, so that no thread falls asleep between its last look at the count and this.
    std::lock_guard lock(mutex_);
    work_ = work;
    calls_.fetch_add(1, std::memory_order_release);
    asleep = asleep_ > 0;
  }
  if (asleep) called_.notify_all();
}

void Pool::serve(int index) {
  int rests = 0;
  for (uint64_t seen = 0;; ++seen) {
    if (!await_awake(seen, rests)) await(seen);
    const Work work = work_;
    if (!work) return;
    (*work)(index);
    meet();
  }
}

bool Pool::await_awake(uint64_t seen, int& rests) const {
  if (!may_poll() || (rests > 0 && rests-- > 0)) return false;
  auto last = Clock::now();
  for (const auto end = last + kAwake; last < end;) {
    if (poll([&] { return calls_.load(std::memory_order_acquire) != seen; })) return true;
    std::this_thread::yield();
    const auto now = Clock::now();
    if (now - last > kTaken) rests = kRests;
    if (rests > 0) return false;
    last = now;
  }
  return false;
}

void Pool::await(uint64_t seen) {
  std::unique_lock lock(mutex_);
  ++asleep_;
  called_.wait(lock, [&] { return calls_.load(std::memory_order_relaxed) != seen; });
  --asleep_;
}

}  // namespace ostro
