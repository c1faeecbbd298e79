// Memory that a thread keeps between calls.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "asan.h"

namespace preact_kernels {

[[noreturn]] void fail_to_allocate(int64_t bytes);  // memory.cpp

// The purpose of a buffer. A thread uses one buffer of each purpose at a time.
enum class Use { kScratch, kWeights, kWeightGradients, kPartials, kOperands };

// Returns `values` uninitialised values that belong to this thread. The buffer only grows, as calls
// are many and short.
template <class A, Use kUse>
A* thread_buffer(int64_t values) {
  struct Buffer {
    void* memory = nullptr;
    int64_t bytes = 0;
    ~Buffer() { std::free(memory); }
  };
  thread_local Buffer buffer;
  const int64_t used = values * static_cast<int64_t>(sizeof(A));
  const int64_t bytes = (used + 127) / 64 * 64;
  if (bytes > buffer.bytes) {
    std::free(buffer.memory);
    buffer.memory = std::aligned_alloc(64, bytes);
    buffer.bytes = buffer.memory == nullptr ? 0 : bytes;
    if (buffer.memory == nullptr) fail_to_allocate(bytes);
  }
  ASAN_UNPOISON_MEMORY_REGION(buffer.memory, used);
  ASAN_POISON_MEMORY_REGION(static_cast<char*>(buffer.memory) + used, buffer.bytes - used);
  return static_cast<A*>(buffer.memory);
}

}  // namespace preact_kernels
