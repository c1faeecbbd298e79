// Tiles of pixels.
#pragma once

#include <algorithm>
#include <cstdint>

namespace preact_kernels {

// Tiles of pixels, `channels` values each. A tile fits in the first-level cache and is much larger
// than its sums.
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

}  // namespace preact_kernels
