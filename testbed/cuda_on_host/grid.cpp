// Runs a grid on the CPU: several thread blocks at once, the threads of a thread block as fibers.
//
// A thread runs until it waits for others (at a barrier, in a warp collective), reaches an atomic
// operation, or returns. A seeded generator draws the next thread and the next thread block, so a
// kernel that lacks a barrier, or communicates between thread blocks without an atomic operation,
// fails with some seeds. Shared memory is new on the heap for each thread block, of the size in the
// launch and full of NaN.
//
// The first thread block of a dependent launch runs up to `wait_for_predecessors` before the launch
// ahead begins: until that call a kernel reads old values.
//
// Errors, thrown by `Grid`: a barrier that some threads of the thread block do not reach, or reach
// at another line; a warp collective that some lanes do not reach; threads of a dependent launch
// that do not wait for the launches ahead, or let the next one start before that; copies and matrix
// loads that miss shared memory; accesses that are not aligned; launches that no GPU takes.
#include "grid.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <utility>
#include <vector>

#include "fiber.h"

#define PK_EXPORT extern "C" __attribute__((visibility("default")))

namespace cuda_on_host {

thread_local const Position* position = nullptr;
Settings settings;

namespace {

// SplitMix64.
class Generator {
 public:
  explicit Generator(uint64_t seed) : state_(seed) {}
  size_t below(size_t count) {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return (z ^ (z >> 31)) % count;
  }

 private:
  uint64_t state_;
};

bool operator==(const Site& a, const Site& b) {
  return a.line == b.line && std::strcmp(a.file, b.file) == 0;
}
std::string text(const Site& site) {
  return std::string(site.file) + ":" + std::to_string(site.line);
}

// An asynchronous copy of 16 bytes that has not landed.
struct Copy {
  void* to;
  const void* from;  // null: zeros
};

struct Thread {
  Fiber fiber;
  Position position{};
  int vote = 0;             // result of a barrier with a vote
  bool has_waited = false;  // whether it has called wait_for_predecessors
  std::vector<Copy> uncommitted;
  std::deque<std::vector<Copy>> groups;
  std::deque<std::array<unsigned char, 16>> read_early;  // values for copies that read too early
};

struct Warp {
  void* operands[kLanes] = {};
  unsigned arrived = 0;
  const char* name = nullptr;
  Site site{};
};

enum class State { kRuns, kWaits, kHasEnded };

class ThreadBlock {
 public:
  ThreadBlock(dim3 grid, dim3 threads, size_t shared_bytes, bool is_dependent)
      : grid_(grid), dim_(threads), shared_bytes_(shared_bytes), is_dependent_(is_dependent) {
    while (threads_.size() < threads.count()) {
      if (pool_.empty()) pool_.push_back(std::make_unique<Thread>());
      threads_.push_back(std::move(pool_.back()));
      pool_.pop_back();
    }
  }
  ~ThreadBlock() {
    for (std::unique_ptr<Thread>& thread : threads_) pool_.push_back(std::move(thread));
  }
  ThreadBlock(const ThreadBlock&) = delete;
  ThreadBlock& operator=(const ThreadBlock&) = delete;

  // Makes the next calls of `step` run the thread block of that index. If `is_early`, it stops at
  // `wait_for_predecessors` until `end_wait`.
  void start(dim3 thread_block_index, const std::function<void()>& kernel, bool is_early) {
    kernel_ = &kernel;
    is_early_ = is_early;
    void* memory = nullptr;
    if (posix_memalign(&memory, 128, shared_bytes_) != 0) throw std::bad_alloc();
    shared_owner_.reset(memory);
    std::memset(memory, 0xff, shared_bytes_);
    warps_.assign((threads_.size() + kLanes - 1) / kLanes, Warp());
    finished_ = 0;
    for (unsigned i = 0; i < threads_.size(); ++i) {
      Thread& thread = *threads_[i];
      const dim3 index(i % dim_.x, i / dim_.x % dim_.y, i / dim_.x / dim_.y);
      thread.position = {
          index, thread_block_index, dim_, grid_, i, static_cast<unsigned char*>(memory)};
      thread.has_waited = false;
      thread.uncommitted.clear();
      thread.groups.clear();
      thread.read_early.clear();
      thread.fiber.start(
          [](void* thread_block) { (*static_cast<ThreadBlock*>(thread_block)->kernel_)(); }, this);
      ready_.push_back(&thread);
    }
  }

  // Runs one thread until it suspends.
  State step(Generator& generator) {
    if (ready_.empty()) {
      error_ = "threads wait for others that never come";
      for (const Warp& warp : warps_) {
        if (warp.arrived) error_ += std::string(": ") + warp.name + " at " + text(warp.site);
      }
      throw std::runtime_error(error_);
    }
    // With every fourth seed, one of the last ready threads runs: a warp goes far ahead of the
    // others.
    const bool goes_ahead = settings.seed % 4 == 3;
    const size_t choices = goes_ahead ? std::min<size_t>(kLanes, ready_.size()) : ready_.size();
    std::swap(ready_[ready_.size() - 1 - generator.below(choices)], ready_.back());
    current = ready_.back();
    ready_.pop_back();
    running = this;
    position = &current->position;
    has_yielded = false;
    current->fiber.resume();
    running = nullptr;
    position = nullptr;
    if (error_.empty() && current->fiber.is_done()) {
      ++finished_;
      if (!at_barrier_.empty()) {
        error_ = "a barrier that some threads do not reach, at " + text(barrier_site_);
      }
      if (is_dependent_ && !current->has_waited) {
        error_ = "a dependent launch with a thread that does not call wait_for_predecessors";
      }
    }
    if (!error_.empty()) throw std::runtime_error(error_);
    if (finished_ == threads_.size()) return State::kHasEnded;
    return ready_.empty() && !at_wait_.empty() ? State::kWaits : State::kRuns;
  }

  // The launches ahead have ended.
  void end_wait() {
    is_early_ = false;
    ready_.insert(ready_.end(), at_wait_.begin(), at_wait_.end());
    at_wait_.clear();
  }

  void wait_for_predecessors() {
    current->has_waited = true;
    if (!is_early_) return;
    // Copies in flight may have read the old values.
    for (std::vector<Copy>& group : current->groups) read_early(group);
    read_early(current->uncommitted);
    at_wait_.push_back(current);
    current->fiber.suspend();
  }

  void let_dependents_start() {
    if (is_dependent_ && !current->has_waited) {
      fail("let_dependents_start before wait_for_predecessors");
    }
  }

  void yield() {
    has_yielded = true;
    ready_.push_back(current);
    current->fiber.suspend();
  }

  int barrier(int vote, Site site) {
    if (finished_) fail("a barrier that some threads do not reach, at " + text(site));
    if (at_barrier_.empty()) {
      barrier_site_ = site;
      vote_ = 0;
    } else if (!(site == barrier_site_)) {
      fail("threads at different barriers, at " + text(barrier_site_) + " and " + text(site));
    }
    vote_ |= vote;
    at_barrier_.push_back(current);
    if (at_barrier_.size() == threads_.size()) {
      for (Thread* thread : at_barrier_) {
        thread->vote = vote_;
        ready_.push_back(thread);
      }
      at_barrier_.clear();
    }
    Thread* self = current;
    self->fiber.suspend();
    return self->vote;
  }

  void collective(const char* name, Site site, void* own, void (*body)(void**, const void*),
                  const void* context) {
    Warp& warp = warps_[current->position.linear / kLanes];
    const unsigned lane = current->position.linear % kLanes;
    if (threads_.size() % kLanes) {
      fail("a warp collective in a thread block with an incomplete warp");
    }
    if (warp.arrived == 0) {
      warp.name = name;
      warp.site = site;
    } else if (std::strcmp(warp.name, name) != 0 || !(warp.site == site)) {
      fail(std::string("lanes of a warp apart, in ") + warp.name + " at " + text(warp.site) +
           " and in " + name + " at " + text(site));
    }
    warp.operands[lane] = own;
    if (++warp.arrived == kLanes) {
      body(warp.operands, context);
      warp.arrived = 0;
      const unsigned first = current->position.linear - lane;
      for (unsigned i = 0; i < kLanes; ++i) ready_.push_back(threads_[first + i].get());
    }
    current->fiber.suspend();
  }

  // Ends the run: `step` throws the message, on a stack that can be unwound.
  void fail(const std::string& message) {
    if (error_.empty())
      error_ = message + " (thread " + std::to_string(current->position.linear) + ")";
    current->fiber.suspend();  // forever
    std::abort();
  }

  void check_shared(const void* pointer, size_t bytes, const char* what) {
    const auto at = static_cast<const unsigned char*>(pointer);
    const unsigned char* shared = current->position.shared;
    if (reinterpret_cast<uintptr_t>(at) % bytes) fail(std::string(what) + ": not aligned");
    if (at < shared || at + bytes > shared + shared_bytes_) {
      fail(std::string(what) + ": outside shared memory");
    }
  }

  Thread* current = nullptr;
  bool has_yielded = false;  // whether the thread that ran last has yielded

  static inline thread_local ThreadBlock* running = nullptr;

 private:
  static inline thread_local std::vector<std::unique_ptr<Thread>> pool_;  // reused for the stacks

  void read_early(std::vector<Copy>& group) {
    for (Copy& copy : group) {
      if (copy.from == nullptr) continue;
      std::memcpy(current->read_early.emplace_back().data(), copy.from, 16);
      copy.from = current->read_early.back().data();
    }
  }

  dim3 grid_, dim_;
  size_t shared_bytes_;
  bool is_dependent_, is_early_ = false;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<Thread*> ready_, at_barrier_, at_wait_;
  std::vector<Warp> warps_;
  std::unique_ptr<void, void (*)(void*)> shared_owner_{nullptr, std::free};
  const std::function<void()>* kernel_ = nullptr;
  Site barrier_site_{};
  int vote_ = 0;
  size_t finished_ = 0;
  std::string error_;
};

// The thread blocks of a launch.
class Grid {
 public:
  // Throws if the launch is invalid.
  Grid(const Launch& launch, std::function<void()> kernel)
      : name_(launch.name),
        grid_(launch.thread_blocks),
        threads_(launch.threads),
        shared_bytes_(launch.shared_bytes),
        is_dependent_(launch.is_dependent),
        resident_thread_blocks_(settings.resident_thread_blocks),
        kernel_(std::move(kernel)) {
    const dim3 &grid = grid_, &threads = threads_;
    if (threads.count() == 0 || threads.count() > 1024 || threads.z > 64) {
      refuse("threads of a thread block");
    }
    if (grid.count() == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
      refuse("thread blocks of a grid");
    }
    if (shared_bytes_ > settings.most_shared_bytes) refuse("shared memory");
    if (launch.is_cooperative) {
      if (grid.count() > size_t(settings.multiprocessors)) {
        refuse("thread blocks that are not resident");
      }
      resident_thread_blocks_ = grid.count();
    }
    order_.resize(grid.count());
    for (size_t i = 0; i < order_.size(); ++i) {
      order_[i] = i;
      std::swap(order_[i], order_[generator_.below(i + 1)]);
    }
    steps_ = size_t(1) << 4 * generator_.below(4);
  }

  // Before the launch ahead begins: runs the first thread block of a dependent launch until it
  // waits. Returns whether there is one.
  bool start_early() {
    if (!is_dependent_) return false;
    start_thread_blocks(1, true);
    run();
    return true;
  }

  // After the launch ahead has ended: runs all thread blocks to their end.
  void finish() {
    running_.swap(waiting_);
    for (std::unique_ptr<ThreadBlock>& thread_block : running_) thread_block->end_wait();
    start_thread_blocks(resident_thread_blocks_, false);
    run();
  }

 private:
  [[noreturn]] void refuse(const char* what) const {
    throw std::runtime_error(name_ + ": invalid configuration: " + what);
  }

  void start(ThreadBlock& thread_block, bool is_early) {
    const size_t i = order_[next_++];
    thread_block.start(dim3(i % grid_.x, i / grid_.x % grid_.y, i / grid_.x / grid_.y), kernel_,
                       is_early);
  }

  // Starts thread blocks until `most` run at once.
  void start_thread_blocks(size_t most, bool are_early) {
    while (running_.size() < most && next_ < order_.size()) {
      running_.push_back(
          std::make_unique<ThreadBlock>(grid_, threads_, shared_bytes_, is_dependent_));
      start(*running_.back(), are_early);
    }
  }

  // Runs thread blocks until all have ended, or wait for the launch ahead.
  void run() {
    try {
      for (size_t at = 0; !running_.empty();) {
        const bool meets = running_[at]->has_yielded;
        if (generator_.below(meets ? 2 : steps_) == 0) at = generator_.below(running_.size());
        const State state = running_[at]->step(generator_);
        if (state == State::kRuns) continue;
        if (state == State::kHasEnded && next_ < order_.size()) {
          start(*running_[at], false);
          continue;
        }
        if (state == State::kWaits) waiting_.push_back(std::move(running_[at]));
        running_.erase(running_.begin() + at);
        at = 0;
      }
    } catch (const std::runtime_error& error) {
      throw std::runtime_error(name_ + ": " + error.what());
    }
  }

  std::string name_;
  dim3 grid_, threads_;
  size_t shared_bytes_;
  bool is_dependent_;
  size_t resident_thread_blocks_;  // thread blocks that run at once
  std::function<void()> kernel_;
  Generator generator_{settings.seed};
  std::vector<size_t> order_;
  size_t next_ = 0;
  // The mean number of steps before another thread block runs, from 1 to most of a thread block.
  // Where thread blocks may communicate, others run more often, or wrong orders that take many
  // steps of others would never occur.
  size_t steps_ = 1;
  std::vector<std::unique_ptr<ThreadBlock>> running_, waiting_;
};

// Runs the launches of a host thread in order, each at the worst moment that a GPU may choose.
//
// A launch is held back until the next one. If that is dependent, its first thread block runs up to
// `wait_for_predecessors` before the held launch begins: on a GPU it may start during the held
// launch, and need not see its writes. Then the held launch runs, and the next one is held, with
// its waiting thread block.
//
// The launch before the held one has ended by then, as kernels let the next one start only after
// they waited.
class Stream {
 public:
  void launch(std::unique_ptr<Grid> next) {
    const auto owners = std::move(owners_);  // the held launch may use their memory
    owners_.clear();
    const std::unique_ptr<Grid> ahead = std::move(held_);
    if (next && ahead) next->start_early();
    if (ahead) ahead->finish();
    held_ = std::move(next);
  }

  void synchronize() { launch(nullptr); }

  void clear() { held_.reset(), owners_.clear(); }

  bool is_idle() const { return held_ == nullptr; }

  void keep(std::shared_ptr<void> owner) { owners_.push_back(std::move(owner)); }

 private:
  std::unique_ptr<Grid> held_;
  std::vector<std::shared_ptr<void>> owners_;
};
thread_local Stream stream;

}  // namespace

void fail(const std::string& message) { ThreadBlock::running->fail(message); }
void yield() { ThreadBlock::running->yield(); }
int barrier(int vote, Site site) { return ThreadBlock::running->barrier(vote, site); }
void collective(const char* name, Site site, void* own, void (*body)(void**, const void*),
                const void* context) {
  ThreadBlock::running->collective(name, site, own, body, context);
}
void check_shared(const void* pointer, size_t bytes, const char* what) {
  ThreadBlock::running->check_shared(pointer, bytes, what);
}
void wait_for_predecessors() { ThreadBlock::running->wait_for_predecessors(); }
void let_dependents_start() { ThreadBlock::running->let_dependents_start(); }

// With an even seed, a copy in flight leaves NaN at its destination, and lands when its thread
// waits for it: a read that is too early finds NaN. With an odd seed it lands at once: a read that
// the copy should have waited for finds the new value.
void copy_async_16(void* smem, const void* global) {
  check_shared(smem, 16, "cp_async_16");
  if (reinterpret_cast<uintptr_t>(global) % 16) fail("cp_async_16: not aligned");
  if (settings.seed % 2) {
    global ? std::memcpy(smem, global, 16) : std::memset(smem, 0, 16);
    return;
  }
  std::memset(smem, 0xff, 16);
  ThreadBlock::running->current->uncommitted.push_back({smem, global});
}
void commit_copies() {
  Thread& thread = *ThreadBlock::running->current;
  thread.groups.push_back(std::move(thread.uncommitted));
  thread.uncommitted.clear();
}
void wait_for_copies(size_t most) {
  auto& groups = ThreadBlock::running->current->groups;
  for (; groups.size() > most; groups.pop_front()) {
    for (const Copy& copy : groups.front()) {
      if (copy.from) {
        std::memcpy(copy.to, copy.from, 16);
      } else {
        std::memset(copy.to, 0, 16);
      }
    }
  }
}

void launch(const Launch& launch, std::function<void()> kernel) {
  if (settings.listener) return settings.listener(&launch);
  stream.launch(std::make_unique<Grid>(launch, std::move(kernel)));
}

void synchronize() { stream.synchronize(); }
void drop_launches() { stream.clear(); }
bool is_idle() { return stream.is_idle(); }
void keep(std::shared_ptr<void> owner) { stream.keep(std::move(owner)); }

}  // namespace cuda_on_host

// Called by tests in Python.

PK_EXPORT void cuda_on_host_set(uint64_t seed, int multiprocessors, int resident_thread_blocks) {
  cuda_on_host::settings.seed = seed;
  cuda_on_host::settings.multiprocessors = multiprocessors;
  cuda_on_host::settings.resident_thread_blocks = resident_thread_blocks;
}
PK_EXPORT void cuda_on_host_limit_shared(size_t bytes) {
  cuda_on_host::settings.most_shared_bytes = bytes;
}
// With null, launches run again.
PK_EXPORT void cuda_on_host_listen(void (*listener)(const cuda_on_host::Launch*)) {
  cuda_on_host::settings.listener = listener;
}

// Called by -fsanitize=alignment: a GPU faults where a CPU reads on.

namespace {

// As declared in the compilers' runtime libraries.
struct Location {
  const char* file;
  uint32_t line, column;
};
struct Type {
  uint16_t kind, info;
  char name[1];  // quoted
};
struct Mismatch {
  Location location;
  const Type* type;
  unsigned char log_alignment, kind;
};

}  // namespace

extern "C" void __ubsan_handle_type_mismatch_v1(const Mismatch* mismatch, const void*) {
  const Location& location = mismatch->location;
  const std::string message = std::string(location.file) + ":" + std::to_string(location.line) +
                              ": an access of " + mismatch->type->name +
                              " that is not aligned to " +
                              std::to_string(1 << mismatch->log_alignment) + " bytes";
  if (cuda_on_host::position != nullptr) cuda_on_host::fail(message);
  std::fprintf(stderr, "%s\n", message.c_str());  // outside kernels
  std::abort();
}
