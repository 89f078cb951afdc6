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
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  called_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Pool::run(const std::function<void(int)>& work) {
  if (size_ > 1) {
    {
      std::lock_guard lock(mutex_);
      work_ = &work;
      ++call_;
    }
    called_.notify_all();
  }
  work(0);
  barrier_.wait();
}

void Pool::serve(int index) {
  for (uint64_t seen = 0;;) {
    const std::function<void(int)>* work;
    {
      std::unique_lock lock(mutex_);
      called_.wait(lock, [&] { return stopping_ || call_ != seen; });
      if (stopping_) return;
      seen = call_;
      work = work_;
    }
    (*work)(index);
    barrier_.wait();
  }
}

}  // namespace ostro
