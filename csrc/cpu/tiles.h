// Cutting pixels into tiles, and tiles over threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>

#include "../tensors.h"
#include "types.h"

namespace preact_kernels {

// Rows of `channels` values cut into tiles that stay in the first-level cache, but of so many
// pixels that a tile's sums are little beside the tile.
struct PixelTiles {
  int64_t pixels, size, count;

  PixelTiles(int64_t pixels, int64_t channels) : pixels(pixels) {
    constexpr int64_t kTileValues = 4096;
    size = std::clamp<int64_t>(kTileValues / channels, 64, 512);
    count = (pixels + size - 1) / size;
  }
  int64_t first(int64_t tile) const { return tile * size; }
  int64_t length(int64_t tile) const { return std::min(size, pixels - first(tile)); }
};

// Runs body(tile) for every tile, spread over the threads of PyTorch. Each takes the tiles of its
// own range in order, so that what it wrote last is near, and then helps with the ranges of others:
// on a shared machine no two threads are equally fast.
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
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
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

// Runs body(row) for every row of `values`, spread over the threads where that is worth it.
template <class Body>
void for_rows(int64_t rows, int64_t values, const Body& body) {
  constexpr int64_t kLeastValues = 8 * 1024;
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kLeastValues / values),
                              [&](int64_t begin, int64_t end) {
                                for (int64_t row = begin; row < end; ++row) body(row);
                              });
}

}  // namespace preact_kernels
