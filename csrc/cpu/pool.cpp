// Threads for callers whose runtime offers none. Made when first used, and kept.

#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "attnplat_cpu.h"

namespace attnplat_cpu {
namespace {

class Pool {
 public:
  explicit Pool(int64_t threads) : owner(getpid()) {
    for (int64_t n = 1; n < threads; n++) {
      threads_.emplace_back([this] { serve(); });
      threads_.back().detach();  // they sleep until the process ends
    }
  }

  int64_t threads() const { return int64_t(threads_.size()) + 1; }

  void run(int64_t begin, int64_t end, attnplat_cpu_body body, void *context) {
    std::lock_guard<std::mutex> one_call_at_a_time(calls_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      body_ = body;
      context_ = context;
      next_ = begin;
      end_ = end;
      left_ = end - begin;
    }
    wake_.notify_all();
    help();
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this] { return left_ == 0; });
  }

  const pid_t owner;

 private:
  void serve() {
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return next_ < end_; });
      }
      help();
    }
  }

  void help() {
    for (;;) {
      int64_t mine;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        if (next_ >= end_) return;
        mine = next_++;
      }
      body_(mine, mine + 1, context_);
      std::lock_guard<std::mutex> lock(mutex_);
      if (--left_ == 0) finished_.notify_all();
    }
  }

  std::mutex calls_, mutex_;
  std::condition_variable wake_, finished_;
  std::vector<std::thread> threads_;
  attnplat_cpu_body body_ = nullptr;
  void *context_ = nullptr;
  int64_t next_ = 0, end_ = 0, left_ = 0;
};

// The process's pool. After a fork the child has none of its parent's threads, and makes its own;
// neither is ever destroyed, since a sleeping thread would wait on what was.
Pool *the_pool() {
  static std::mutex making;
  static Pool *pool = nullptr;
  std::lock_guard<std::mutex> lock(making);
  if (!pool || pool->owner != getpid()) {
    unsigned found = std::thread::hardware_concurrency();
    pool = new Pool(found ? found : 1);
  }
  return pool;
}

thread_local bool inside = false;

void run_inside(int64_t begin, int64_t end, attnplat_cpu_body body, void *context) {
  bool before = inside;
  inside = true;
  body(begin, end, context);
  inside = before;
}

struct Nested {
  attnplat_cpu_body body;
  void *context;
};

void nested(int64_t begin, int64_t end, void *context) {
  Nested *n = static_cast<Nested *>(context);
  run_inside(begin, end, n->body, n->context);
}

}  // namespace
}  // namespace attnplat_cpu

extern "C" int32_t attnplat_cpu_pool_for(int64_t begin, int64_t end, int64_t /*grain*/,
                                         attnplat_cpu_body body, void *context) {
  using namespace attnplat_cpu;
  if (begin >= end) return 0;
  if (inside || end - begin == 1) {
    run_inside(begin, end, body, context);
    return 0;
  }
  try {
    Nested n{body, context};
    the_pool()->run(begin, end, nested, &n);
  } catch (...) {
    return 1;
  }
  return 0;
}

extern "C" int64_t attnplat_cpu_pool_threads(void) {
  try {
    return attnplat_cpu::the_pool()->threads();
  } catch (...) {
    return 1;
  }
}
