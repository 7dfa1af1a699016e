#include "csrc/cpu/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

namespace mlx_paged::cpu {

namespace {

constexpr int kMaxThreads = 1024;

// More threads than this do not spin: a quota of processor time may be far below their number.
constexpr int kMostSpinning = 16;

// Looks at a condition for 20 microseconds, in which a sleeping thread would hardly wake up.
template <typename Condition>
void spin_until(Condition is_true) {
  using Clock = std::chrono::steady_clock;
  if (num_threads() > kMostSpinning) {
    return;
  }
  const Clock::time_point end = Clock::now() + std::chrono::microseconds(20);
  for (int i = 1; !is_true() && (i % 16 != 0 || Clock::now() < end); ++i) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
  }
}

int parse_num_threads(std::string_view text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1 ||
      value > kMaxThreads) {
    throw std::invalid_argument("[mlx_paged] MLX_PAGED_NUM_THREADS is '" + std::string(text) +
                                "': expected an integer from 1 to " + std::to_string(kMaxThreads));
  }
  return value;
}

class ThreadPool {
 public:
  explicit ThreadPool(int num_workers) {
    for (int i = 0; i < num_workers; ++i) {
      std::thread([this] { work(); }).detach();
    }
  }

  void run(int64_t count, const std::function<void(int64_t)>& body) {
    // One job at a time: callers on other streams wait here.
    std::lock_guard one_job(job_mutex_);
    {
      std::lock_guard lock(mutex_);
      body_ = &body;
      count_ = count;
      next_.store(0, std::memory_order_relaxed);
      open_ = true;
      ++generation_;
    }
    wake_.notify_all();
    drain(count, body);
    // Waits only for workers inside the job: a worker that wakes up later finds the job closed.
    std::unique_lock lock(mutex_);
    open_ = false;
    lock.unlock();
    spin_until([this] { return num_inside_ == 0; });
    lock.lock();
    idle_.wait(lock, [this] { return num_inside_ == 0; });
  }

 private:
  void drain(int64_t count, const std::function<void(int64_t)>& body) {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count;) {
      body(i);
    }
  }

  void work() {
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      lock.unlock();
      spin_until([&] { return generation_ != seen; });
      lock.lock();
      wake_.wait(lock, [&] { return open_ && generation_ != seen; });
      seen = generation_;
      const auto* body = body_;
      const int64_t count = count_;
      ++num_inside_;
      lock.unlock();
      drain(count, *body);
      lock.lock();
      if (--num_inside_ == 0) {
        idle_.notify_one();
      }
    }
  }

  std::mutex job_mutex_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  const std::function<void(int64_t)>* body_ = nullptr;
  int64_t count_ = 0;
  std::atomic<int64_t> next_{0};
  std::atomic<uint64_t> generation_ = 0;
  std::atomic<int> num_inside_ = 0;
  bool open_ = false;
};

// Never destroyed: a stream's thread may still run a kernel while the process exits.
ThreadPool& pool() {
  static auto* instance = new ThreadPool(num_threads() - 1);
  return *instance;
}

}  // namespace

int num_threads() {
  static const int value = [] {
    const char* text = std::getenv("MLX_PAGED_NUM_THREADS");
    return text ? parse_num_threads(text)
                : std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kMaxThreads);
  }();
  return value;
}

void parallel_for(int64_t count, const std::function<void(int64_t)>& body, bool pays) {
  if (!pays || count <= 1 || num_threads() == 1) {
    for (int64_t i = 0; i < count; ++i) {
      body(i);
    }
    return;
  }
  pool().run(count, body);
}

}  // namespace mlx_paged::cpu
