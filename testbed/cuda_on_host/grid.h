// What kernels and launches use of grid.cpp, which runs them on the CPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

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
};

// Of the thread that runs; null outside kernels.
struct Position {
  dim3 thread, block, threads, blocks;
  unsigned linear;        // index of the thread in its block
  unsigned char* shared;  // of the block
};
extern thread_local const Position* position;

// What a launch is given, or a fill: `params` is then the address of the pointer to the memory.
struct Launch {
  const char* name;
  dim3 blocks, threads;
  size_t shared_bytes;
  const void* params;
  size_t params_bytes;
  size_t filled_bytes;  // of a fill
  bool is_dependent;    // may begin before the launch ahead of it has ended
  const void* kernel;   // null: a fill
  int tiles;            // that the blocks share; 0: the kernel has no tiles
  bool is_cooperative;  // all blocks run at once
};

// What tests set.
struct Settings {
  uint64_t seed = 0;  // of the order of threads and blocks
  int multiprocessors = 2;
  int resident_blocks = 4;                    // that run at once
  size_t most_shared_bytes = 227 * 1024;      // of a block, as on sm_90 and sm_100
  void (*listener)(const Launch*) = nullptr;  // called in place of every launch and fill
  int64_t early_starts = 0;  // of dependent launches, counted: the one ahead had not begun
};
extern Settings settings;

// Ends the run of the grid, which throws the message.
void fail(const std::string& message);
// Lets other threads and other blocks run before the current thread goes on.
void yield();
// Waits for all threads of the block; whether any of them voted.
int barrier(int vote, Site site);
// Waits for the lanes of a warp, whose last calls `body(operands of all lanes, context)`.
void collective(const char* name, Site site, void* own, void (*body)(void**, const void*),
                const void* context);
// Fails unless `pointer` points to `bytes` of shared memory, so aligned.
void check_shared(const void* pointer, size_t bytes, const char* what);
void wait_for_predecessors();
void let_dependents_start();
void copy_async_16(void* smem, const void* global);  // zeros where `global` is null
void commit_copies();
void wait_for_copies(size_t groups);  // until no more than the newest groups are in flight

// Runs a kernel when the stream says; throws where the launch is refused, or the one ahead fails.
void launch(const Launch& launch, std::function<void()> kernel);

// What the thread of the host launches, in order.
void synchronize();    // runs all that was launched
void drop_launches();  // what has not run
bool is_idle();        // whether all has run
void keep(
    std::shared_ptr<void> owner);  // of memory that a GPU would free in the order of the stream

}  // namespace cuda_on_host
