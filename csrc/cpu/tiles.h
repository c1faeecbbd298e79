// Cutting pixels into tiles, tiles over threads, and allocating outputs.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>

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

// Runs body(tile) for every tile, spread over the threads of PyTorch.
template <class Body>
void for_tiles(int64_t count, const Body& body) {
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) body(tile);
  });
}

inline Tensor empty_nhwc(const Tensor& like, const Activation& size) {
  const int64_t sizes[] = {size.images, size.channels, size.height, size.width};
  return torch::stable::empty({sizes, 4}, like.scalar_type(), std::nullopt, like.device(),
                              std::nullopt, torch::headeronly::MemoryFormat::ChannelsLast);
}

inline Tensor empty_statistics(const Tensor& like, int64_t count) {
  return torch::stable::empty({&count, 1}, statistics_dtype(like.scalar_type()), std::nullopt,
                              like.device());
}

// In place of an output that is not wanted.
inline Tensor absent(const Tensor& like) {
  const int64_t none = 0;
  return torch::stable::empty({&none, 1}, like.scalar_type(), std::nullopt, like.device());
}

inline Tensor empty_sums(const Tensor& like, int64_t channels) {
  const int64_t sizes[] = {2, channels};
  return torch::stable::empty({sizes, 2}, statistics_dtype(like.scalar_type()), std::nullopt,
                              like.device());
}

}  // namespace preact_kernels
