// Runs the loops of the library on threads that ThreadSanitizer knows: libgomp, in which PyTorch's
// threads wait, is not instrumented. The linker sends the calls here (--wrap).
//
// Threads take the tiles of `for_tiles` in turns. Otherwise the first thread could finish a small
// loop before the next one starts, and nothing would run at the same time. This file is not
// instrumented: ThreadSanitizer does not see the turns, and tiles of two threads are never ordered.

#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <atomic>
#include <thread>

namespace {

constexpr int kThreads = 4;

// The threads of a loop.
struct Turns {
  int threads;
  std::atomic<int> next{0};  // the thread whose turn it is
  bool has_ended[kThreads] = {};

  void wait(int self) {
    for (int other = next; other != self; other = next) next.wait(other);
  }
  void pass(int self) {
    int other = self;
    do {
      other = (other + 1) % threads;
    } while (has_ended[other] && other != self);
    next = other;
    next.notify_all();
  }
};

thread_local Turns* turns = nullptr;  // turns of the loop that this thread runs
thread_local int self = 0;

}  // namespace

extern "C" {

int64_t __real___tsan_atomic64_fetch_add(volatile int64_t*, int64_t, int);

// `for_tiles` takes a tile.
int64_t __wrap___tsan_atomic64_fetch_add(volatile int64_t* value, int64_t added, int order) {
  if (turns == nullptr) return __real___tsan_atomic64_fetch_add(value, added, order);
  turns->wait(self);
  const int64_t before = __real___tsan_atomic64_fetch_add(value, added, order);
  turns->pass(self);
  return before;
}

AOTITorchError __wrap_torch_get_num_threads(uint32_t* out) {
  *out = kThreads;
  return AOTI_TORCH_SUCCESS;
}

// at::parallel_for with a grain size of 1. An exception ends the process.
AOTITorchError __wrap_torch_parallel_for(int64_t begin, int64_t end, int64_t, ParallelFunc func,
                                         void* context) noexcept {
  const int64_t count = end - begin;
  if (count <= 0) return AOTI_TORCH_SUCCESS;
  if (count == 1 || turns != nullptr) {  // a loop within a loop
    func(begin, end, context);
    return AOTI_TORCH_SUCCESS;
  }
  Turns own{static_cast<int>(std::min<int64_t>(count, kThreads))};
  const auto run = [&](int index) {
    turns = &own;
    self = index;
    func(begin + count * index / own.threads, begin + count * (index + 1) / own.threads, context);
    own.wait(index);
    own.has_ended[index] = true;
    own.pass(index);
    turns = nullptr;
  };
  std::thread started[kThreads];
  for (int i = 1; i < own.threads; ++i) started[i] = std::thread(run, i);
  run(0);
  for (int i = 1; i < own.threads; ++i) started[i].join();
  return AOTI_TORCH_SUCCESS;
}

}  // extern "C"
