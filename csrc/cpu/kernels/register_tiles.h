// Tiles of accumulators in registers: rows of one operand by vectors of the other.
#pragma once

#include <iterator>

#include "../conv_strips.h"
#include "simd.h"

PK_BEGIN_ISA

constexpr int kMaxVectors = kRegisters >= 32 ? 4 : 2;
// The most rows of accumulators that fit in registers with `vectors` vectors of the other operand
// and a broadcast value.
constexpr int max_tile_rows(int vectors) { return (kRegisters - vectors - 1) / vectors; }

// The numbers of rows of compiled tiles, largest first.
template <int kCount>
struct TileRows;
template <>
struct TileRows<16> {
  static constexpr int values[] = {8, 6, 5, 4, 3, 2, 1};
};
template <>
struct TileRows<32> {
  static constexpr int values[] = {16, 14, 8, 7, 6, 4, 2, 1};
};
static constexpr auto& kTileRows = TileRows<kRegisters>::values;

static_assert(kTileRows[std::size(kTileRows) - 1] == 1, "any number of rows must be reached");

// The largest number of rows of a compiled tile, at most kMost.
template <int kMost, int kIndex = 0>
constexpr int largest_tile() {
  if constexpr (kTileRows[kIndex] > kMost) return largest_tile<kMost, kIndex + 1>();
  return kTileRows[kIndex];
}

// Rows of the next tile if `left` rows are left: equal parts, as near as kTileRows allows.
template <int kMost>
PK_INLINE int64_t next_rows(int64_t left) {
  constexpr int kLargest = largest_tile<kMost>();
  const int64_t parts = (left + kLargest - 1) / kLargest;
  const int64_t part = (left + parts - 1) / parts;
  for (const int rows : kTileRows) {
    if (rows <= part) return rows;
  }
  return 1;
}

// Calls body(rows) with `rows`, one of kTileRows up to kMost, as a constant.
template <int kMost, int kIndex = 0, class Body>
PK_INLINE void with_rows(int64_t rows, const Body& body) {
  if constexpr (kIndex < std::size(kTileRows)) {
    if constexpr (kTileRows[kIndex] <= kMost) {
      if (rows == kTileRows[kIndex]) {
        body(std::integral_constant<int, kTileRows[kIndex]>{});
        return;
      }
    }
    with_rows<kMost, kIndex + 1>(rows, body);
  }
}

// Calls body(vectors, first channel) for tiles of at most `most` vectors that cover `channels`.
template <class A, class Body>
PK_INLINE void for_channel_tiles(int64_t channels, int most, const Body& body) {
  int64_t c = 0;
  while (c < channels) {
    const int64_t left = (channels - c) / kLanes<A>;
    if constexpr (kMaxVectors >= 4) {
      if (left >= 4 && most >= 4) {
        body(std::integral_constant<int, 4>{}, c);
        c += 4 * kLanes<A>;
        continue;
      }
    }
    if (left >= 2) {
      body(std::integral_constant<int, 2>{}, c);
      c += 2 * kLanes<A>;
    } else {
      body(std::integral_constant<int, 1>{}, c);
      c += kLanes<A>;
    }
  }
}

// Vectors of output channels in a tile: only two for kernels larger than 1x1, as every tile reads
// all their weights through the first-level cache.
PK_INLINE int tile_vectors(const ConvSizes& conv) { return conv.taps() == 1 ? kMaxVectors : 2; }

PK_END_ISA
