// The interface of grid.cpp, which runs kernels on the CPU.
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

// The place of a call that threads must reach together.
struct Site {
  const char* file;
  int line;
};

// The position of the running thread; null outside kernels.
struct Position {
  dim3 thread, thread_block, threads, thread_blocks;
  unsigned linear;        // index of the thread in its thread block
  unsigned char* shared;  // shared memory of the thread block
};
extern thread_local const Position* position;

// The arguments of a launch or a fill. The `params` of a fill are the address of the pointer to the
// memory.
struct Launch {
  const char* name;
  dim3 thread_blocks, threads;
  size_t shared_bytes;
  const void* params;
  size_t params_bytes;
  size_t filled_bytes;  // 0 for a launch
  bool is_dependent;    // may begin before the launch ahead has ended
  const void* kernel;   // null for a fill
  int tiles;            // tiles that the thread blocks share; 0 for a kernel without tiles
  bool is_cooperative;  // all thread blocks run at once
};

// Settings of tests.
struct Settings {
  uint64_t seed = 0;  // draws the order of threads and thread blocks
  int multiprocessors = 2;
  int resident_thread_blocks = 4;             // thread blocks that run at once
  size_t most_shared_bytes = 227 * 1024;      // per thread block, as on sm_90 and sm_100
  void (*listener)(const Launch*) = nullptr;  // called in place of every launch and fill
};
extern Settings settings;

// Ends the run of the grid, which then throws the message.
void fail(const std::string& message);
// Lets other threads and other thread blocks run before the current thread goes on.
void yield();
// Waits for all threads of the thread block, and returns whether any of them voted.
int barrier(int vote, Site site);
// Waits for the lanes of a warp. The last one calls `body(operands of all lanes, context)`.
void collective(const char* name, Site site, void* own, void (*body)(void**, const void*),
                const void* context);
// Fails unless `pointer` is aligned to `bytes`, and points to as many bytes of shared memory.
void check_shared(const void* pointer, size_t bytes, const char* what);
void wait_for_predecessors();
void let_dependents_start();
void copy_async_16(void* smem, const void* global);  // zeros where `global` is null
void commit_copies();
void wait_for_copies(size_t groups);  // until at most the newest groups are in flight

// Runs a kernel in the order of the stream. Throws if the launch is invalid, or if the one ahead
// fails.
void launch(const Launch& launch, std::function<void()> kernel);

// The stream of the host thread.
void synchronize();                      // runs all launches
void drop_launches();                    // drops launches that have not run
bool is_idle();                          // whether all launches have run
void keep(std::shared_ptr<void> owner);  // keeps memory that a GPU would free in stream order

}  // namespace cuda_on_host
