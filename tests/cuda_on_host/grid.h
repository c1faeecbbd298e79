// Runs a grid on the CPU: several blocks at once, the threads of a block as fibers.
//
// A thread runs until it waits for others (at a barrier, in a warp collective), reaches an atomic
// operation, or returns. Which thread is next, and which block, a seeded generator draws. So a
// kernel that lacks a barrier, or whose blocks meet without an atomic operation, has schedules in
// which it shows, and a barrier of the grid can spin while the other blocks arrive. Shared memory
// is a heap block of the size that was launched with, new for each block and full of NaN.
//
// Errors, thrown by `run_grid`: a barrier that some threads of the block do not reach, or reach at
// another line; a warp collective that some lanes do not reach; a loop that waits for what no
// running block does; copies and matrix loads that miss shared memory; accesses that are not
// aligned (alignment.cpp); launches that no GPU takes.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fiber.h"

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  size_t count() const { return size_t(x) * y * z; }
};

namespace cuda_on_host {

constexpr unsigned kLanes = 32;

// Where a kernel calls something that threads must reach together.
struct Site {
  const char* file;
  int line;
  bool operator==(const Site& other) const {
    return line == other.line && std::strcmp(file, other.file) == 0;
  }
  std::string text() const { return std::string(file) + ":" + std::to_string(line); }
};

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

// What a launch is given, or a fill: `params` is then the address of the pointer to the memory.
struct Launch {
  const char* name;
  dim3 blocks, threads;
  size_t shared_bytes;
  const void* params;
  size_t params_bytes;
  size_t filled_bytes = 0;    // of a fill
  bool is_dependent = false;  // may begin before the launch ahead of it has ended
  const void* kernel = nullptr;
};

// What tests set: see `control.cpp`.
struct Settings {
  uint64_t seed = 0;
  int multiprocessors = 2;
  int resident_blocks = 4;                    // that run at once
  size_t most_shared_bytes = 227 * 1024;      // of a block, as on sm_90 and sm_100
  void (*listener)(const Launch*) = nullptr;  // called in place of every launch and fill
};
inline Settings settings;

// An asynchronous copy of 16 bytes that has not landed.
struct Copy {
  void* to;
  const void* from;  // null: zeros
};

struct Thread {
  Fiber fiber;
  dim3 index;
  unsigned linear = 0;
  int vote = 0;  // what a barrier with a vote found
  std::vector<Copy> uncommitted;
  std::deque<std::vector<Copy>> groups;
};

struct Warp {
  void* operands[kLanes] = {};
  unsigned arrived = 0;
  const char* name = nullptr;
  Site site{};
};

class Block {
 public:
  // `slot` numbers the blocks that run at once.
  Block(dim3 grid, dim3 threads, size_t shared_bytes, size_t slot)
      : grid(grid), dim(threads), shared_bytes(shared_bytes) {
    static thread_local std::vector<std::unique_ptr<Thread>> pool;  // stacks are used again
    const size_t first = slot * dim.count();
    while (pool.size() < first + dim.count()) pool.push_back(std::make_unique<Thread>());
    for (size_t i = 0; i < dim.count(); ++i) threads_.push_back(pool[first + i].get());
  }

  // Makes the next calls of `step` run the block of that index.
  void start(dim3 block_index, const std::function<void()>& kernel) {
    index = block_index;
    kernel_ = &kernel;
    void* memory = nullptr;
    if (posix_memalign(&memory, 128, shared_bytes) != 0) throw std::bad_alloc();
    shared_owner_.reset(memory);
    std::memset(memory, 0xff, shared_bytes);
    shared = static_cast<unsigned char*>(memory);
    warps_.assign((threads_.size() + kLanes - 1) / kLanes, Warp());
    finished_ = 0;
    for (unsigned i = 0; i < threads_.size(); ++i) {
      Thread& thread = *threads_[i];
      thread.linear = i;
      thread.index = dim3(i % dim.x, i / dim.x % dim.y, i / dim.x / dim.y);
      thread.uncommitted.clear();
      thread.groups.clear();
      thread.fiber.start([](void* block) { (*static_cast<Block*>(block)->kernel_)(); }, this);
      ready_.push_back(&thread);
    }
  }

  // Runs one thread until it suspends; whether there is more to run.
  bool step(Generator& generator) {
    if (ready_.empty()) {
      error_ = "threads wait for others that never come";
      for (const Warp& warp : warps_) {
        if (warp.arrived) error_ += std::string(": ") + warp.name + " at " + warp.site.text();
      }
      throw std::runtime_error(error_);
    }
    std::swap(ready_[generator.below(ready_.size())], ready_.back());
    current = ready_.back();
    ready_.pop_back();
    running = this;
    has_yielded = false;
    current->fiber.resume();
    running = nullptr;
    if (error_.empty() && current->fiber.is_done()) {
      ++finished_;
      yields_ = 0;
      if (!at_barrier_.empty()) {
        error_ = "a barrier that some threads do not reach, at " + barrier_site_.text();
      }
    }
    if (!error_.empty()) throw std::runtime_error(error_);
    return finished_ != threads_.size();
  }

  // Lets other threads and other blocks run before the current thread goes on.
  void yield() {
    if (++yields_ > kMostYields) fail("a loop that waits for what no running block does");
    has_yielded = true;
    ready_.push_back(current);
    current->fiber.suspend();
  }

  // Waits for all threads of the block; whether any of them voted.
  int barrier(int vote, Site site) {
    if (finished_) fail("a barrier that some threads do not reach, at " + site.text());
    if (at_barrier_.empty()) {
      barrier_site_ = site;
      vote_ = 0;
    } else if (!(site == barrier_site_)) {
      fail("threads at different barriers, at " + barrier_site_.text() + " and " + site.text());
    }
    vote_ |= vote;
    at_barrier_.push_back(current);
    if (at_barrier_.size() == threads_.size()) {
      for (Thread* thread : at_barrier_) {
        thread->vote = vote_;
        ready_.push_back(thread);
      }
      at_barrier_.clear();
      yields_ = 0;
    }
    Thread* self = current;
    self->fiber.suspend();
    return self->vote;
  }

  // Waits for the lanes of a warp, whose last calls `body` with the operands of all.
  template <class Operands, class Body>
  void collective(const char* name, Site site, Operands& own, const Body& body) {
    Warp& warp = warps_[current->linear / kLanes];
    const unsigned lane = current->linear % kLanes;
    if (threads_.size() % kLanes) fail("a warp collective in a block with an incomplete warp");
    if (warp.arrived == 0) {
      warp.name = name;
      warp.site = site;
    } else if (std::strcmp(warp.name, name) != 0 || !(warp.site == site)) {
      fail(std::string("lanes of a warp apart, in ") + warp.name + " at " + warp.site.text() +
           " and in " + name + " at " + site.text());
    }
    warp.operands[lane] = &own;
    if (++warp.arrived == kLanes) {
      Operands* lanes[kLanes];
      for (unsigned i = 0; i < kLanes; ++i) lanes[i] = static_cast<Operands*>(warp.operands[i]);
      body(lanes);
      warp.arrived = 0;
      yields_ = 0;
      const unsigned first = current->linear - lane;
      for (unsigned i = 0; i < kLanes; ++i) ready_.push_back(threads_[first + i]);
    }
    current->fiber.suspend();
  }

  // Ends the run: the message is thrown by `run`, on the stack that can be unwound.
  void fail(const std::string& message) {
    if (error_.empty()) error_ = message + " (thread " + std::to_string(current->linear) + ")";
    current->fiber.suspend();  // for good
    std::abort();
  }

  // A pointer to `bytes` of shared memory, so aligned.
  void check_shared(const void* pointer, size_t bytes, const char* what) {
    const auto at = static_cast<const unsigned char*>(pointer);
    if (reinterpret_cast<uintptr_t>(at) % bytes) fail(std::string(what) + ": not aligned");
    if (at < shared || at + bytes > shared + shared_bytes) {
      fail(std::string(what) + ": outside shared memory");
    }
  }

  dim3 grid, dim, index;
  size_t shared_bytes;
  unsigned char* shared = nullptr;
  Thread* current = nullptr;
  bool has_yielded = false;  // the thread that ran last

  static inline thread_local Block* running = nullptr;

 private:
  static constexpr size_t kMostYields = size_t(1) << 24;

  static inline thread_local size_t yields_ = 0;  // of all blocks, since threads last went on

  std::vector<Thread*> threads_, ready_, at_barrier_;
  std::vector<Warp> warps_;
  std::unique_ptr<void, void (*)(void*)> shared_owner_{nullptr, std::free};
  const std::function<void()>* kernel_ = nullptr;
  Site barrier_site_{};
  int vote_ = 0;
  size_t finished_ = 0;
  std::string error_;
};

inline void run_grid(dim3 grid, dim3 threads, size_t shared_bytes,
                     const std::function<void()>& kernel) {
  if (threads.count() == 0 || threads.count() > 1024 || threads.z > 64) {
    throw std::runtime_error("invalid configuration: threads of a block");
  }
  if (grid.count() == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    throw std::runtime_error("invalid configuration: blocks of a grid");
  }
  if (shared_bytes > settings.most_shared_bytes)
    throw std::runtime_error("invalid configuration: shared memory");
  Generator generator(settings.seed);
  std::vector<size_t> order(grid.count());
  for (size_t i = 0; i < order.size(); ++i) {
    order[i] = i;
    std::swap(order[i], order[generator.below(i + 1)]);
  }
  const auto block_index = [&](size_t i) {
    return dim3(i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y);
  };
  size_t next = 0;
  std::vector<std::unique_ptr<Block>> running;
  for (; next < std::min<size_t>(order.size(), settings.resident_blocks); ++next) {
    running.push_back(std::make_unique<Block>(grid, threads, shared_bytes, next));
    running.back()->start(block_index(order[next]), kernel);
  }
  // From a step of each block in turn to most of a block before the next. Where blocks may meet,
  // others often run, or wrong orders that take many steps of others would never be seen.
  const size_t steps = size_t(1) << 4 * generator.below(4);
  for (size_t at = 0; !running.empty();) {
    const bool meets = running[at]->has_yielded;
    if (generator.below(meets ? 2 : steps) == 0) at = generator.below(running.size());
    if (running[at]->step(generator)) continue;
    if (next < order.size()) {
      running[at]->start(block_index(order[next++]), kernel);
    } else {
      running.erase(running.begin() + at);
      at = 0;
    }
  }
}

}  // namespace cuda_on_host
