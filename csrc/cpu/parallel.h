// Loops on several threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <exception>

namespace preact_kernels {

// Calls body(begin, end) for parts of [0, count) on PyTorch's threads. Rethrows the first exception
// of a part; torch::stable::parallel_for would change its message.
template <class Body>
void parallel_for(int64_t count, int64_t grain_size, const Body& body) {
  std::atomic_flag has_failed = ATOMIC_FLAG_INIT;
  std::exception_ptr failure;
  torch::stable::parallel_for(0, count, grain_size, [&](int64_t begin, int64_t end) {
    try {
      body(begin, end);
    } catch (...) {
      if (!has_failed.test_and_set()) failure = std::current_exception();
    }
  });
  if (failure) std::rethrow_exception(failure);
}

// Calls body(tile) for every tile on PyTorch's threads. A thread takes the tiles of its own range
// in order, with the last results still in its cache, then tiles of other ranges: threads are not
// equally fast on a shared machine.
template <class Body>
void for_tiles(int64_t count, const Body& body) {
  constexpr int64_t kMostRanges = 64;
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), count);
  if (threads <= 1) {
    for (int64_t tile = 0; tile < count; ++tile) body(tile);
    return;
  }
  Range ranges[kMostRanges];
  const int64_t parts = std::min(threads, kMostRanges);
  for (int64_t r = 0; r < parts; ++r) {
    ranges[r].next.store(count * r / parts, std::memory_order_relaxed);
    ranges[r].end = count * (r + 1) / parts;
  }
  parallel_for(threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t self = begin; self < end; ++self) {
      for (int64_t r = 0; r < parts; ++r) {
        Range& range = ranges[(self + r) % parts];
        while (range.next.load(std::memory_order_relaxed) < range.end) {
          const int64_t tile = range.next.fetch_add(1, std::memory_order_relaxed);
          if (tile >= range.end) break;
          body(tile);
        }
      }
    }
  });
}

// Calls body(row) for every row of `values` values, on several threads if there are enough rows.
template <class Body>
void for_rows(int64_t rows, int64_t values, const Body& body) {
  constexpr int64_t kLeastValues = 8 * 1024;
  const int64_t least_rows = std::max<int64_t>(1, kLeastValues / values);
  parallel_for(rows, least_rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

}  // namespace preact_kernels
