// The order in which kernels visit a tile of pixels.
#pragma once

#include <algorithm>

#include "simd.h"

PK_BEGIN_ISA

// Many channels are visited for groups of pixels, each pixel in its own part of the tile. Memory is
// read in order, from a few places, which processors prefetch; coefficients are loaded once for a
// group.
constexpr int64_t kGroupPixels = 4;

// The channels to visit in this way. Few channels are in order in any case, and loads of the last,
// partly filled vector are slow.
template <class A>
PK_INLINE int64_t grouped_channels(int64_t channels) {
  return channels > 4 * kLanes<A> ? channels / kLanes<A> * kLanes<A> : 0;
}

// The groups of at most `size` pixels, which is also the distance between the pixels of a group. An
// odd number: a cache holds few values that are a large power of two apart.
PK_INLINE int64_t count_groups(int64_t pixels, int64_t size = kGroupPixels) {
  return (pixels + size - 1) / size | 1;
}

// Calls body(vectors, first channel, lanes, first value, pixels, step) until all values of a tile
// are visited. A call visits some vectors of channels of pixels that are `step` values apart.
template <class A, int64_t kPixels = kGroupPixels, class Body>
PK_INLINE void for_tile_vectors(int64_t pixels, int64_t channels, const Body& body) {
  const int64_t grouped = grouped_channels<A>(channels);
  for (int64_t begin = 0, end; begin < channels; begin = end) {
    end = begin < grouped ? grouped : channels;
    const int64_t groups = begin < grouped ? count_groups(pixels, kPixels) : 1;
    for (int64_t group = 0; group < std::min(groups, pixels); ++group) {
      const int64_t count = (pixels - group + groups - 1) / groups;
      for_channel_vectors<A>(end - begin, [&](auto vectors, int64_t c, auto lanes) PK_LAMBDA {
        body(vectors, begin + c, lanes, group * channels + begin + c, count, groups * channels);
      });
    }
  }
}

PK_END_ISA
