// The weight gradient of a strip on tile registers: a product over pixels.
//
// With stride 1, the operands of a strip have the same halo, and a tap is a distance: pixel q of dy
// meets pixel q + distance of act(p), counting pixels through the rows of an operand, halo
// included. One operand is transposed. The other is copied in pairs of pixels, once from its first
// and once from its second pixel, for even and for odd distances.
#pragma once

#include "amx_tiles.h"
#include "register_tiles.h"
#include "weight_gradient.h"

PK_BEGIN_ISA

#ifdef PK_HAS_TILES

// `count` is a multiple of 16.
PK_INLINE bool are_finite(const BFloat16* values, int64_t count) {
  constexpr uint16_t kInfinity = 0x7f80;
  using Found = decltype(FullHalves{} < FullHalves{});
  Found found = {};
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) found |= (load_32(values + i) & kInfinity) == kInfinity;
  if (i < count) {
    FullHalves rest = {};
    std::memcpy(&rest, values + i, sizeof rest / 2);
    found |= (rest & kInfinity) == kInfinity;
  }
  FullBits any;
  std::memcpy(&any, &found, sizeof any);
  uint32_t total = 0;
  for (int lane = 0; lane < kLanes<float>; ++lane) total |= any[lane];
  return total == 0;
}

// The pixels of one image of a strip that a weight gradient adds, in whole steps of the reduction.
struct AmxPixels {
  int64_t line;          // pixels of a row
  int64_t count, depth;  // pixels of the output; padded to whole steps
  int64_t read, pairs;   // pixels of the wide operand; pairs of a padded copy

  AmxPixels(const ConvSizes& conv, const Strip& strip) {
    line = strip.out.width + 2 * conv.halo_w();
    count = (strip.out.rows - 1) * line + strip.out.width;
    depth = (count + kTileDepth - 1) / kTileDepth * kTileDepth;
    const int64_t most_distance = 2 * (conv.halo_h() * line + conv.halo_w());
    read = count + most_distance;
    pairs = (depth + most_distance) / 2 + 1;
  }
};

// out[channel][pixel] = in[pixel][channel] for 32 pixels, `step` values apart, and 16 channels.
PK_INLINE void transpose_tile(const BFloat16* in, int64_t step, BFloat16* out) {
  FullBits square[kMostTileRows];
#pragma GCC unroll 16
  for (int i = 0; i < kMostTileRows; ++i) {
    square[i] = paired<0>(load_16(in), load_16(in + step));
    in += 2 * step;
  }
  transpose(square);
  std::memcpy(out, square, sizeof square);
}

// out[tile of 16 channels][tile of 32 pixels][channel][pixel] = in[pixel][channel], with zeros
// after the last pixel.
PK_INLINE void fill_transposed(const BFloat16* in, int64_t channels, const AmxPixels& pixels,
                               BFloat16* out) {
  const int64_t rest = pixels.count % kTileDepth, whole = pixels.count - rest;
  for (int64_t c = 0; c < channels; c += kMostTileRows) {
    for (int64_t p = 0; p < whole; p += kTileDepth, out += kMostTileRows * kTileDepth) {
      transpose_tile(in + p * channels + c, channels, out);
    }
    if (rest == 0) continue;
    BFloat16 last[kTileDepth][kMostTileRows] = {};
    for (int64_t p = 0; p < rest; ++p) {
      std::memcpy(last[p], in + (whole + p) * channels + c, sizeof last[p]);
    }
    transpose_tile(last[0], kMostTileRows, out);
    out += kMostTileRows * kTileDepth;
  }
}

// out[p][c][i] = in[2 * p + i][c], with zeros after the last pixel.
PK_INLINE void fill_pairs_of_line(const BFloat16* in, int64_t channels, int64_t pixels,
                                  int64_t pairs, BFloat16* out) {
  const PixelRows<BFloat16> line(in, Haloed{1, pixels, channels});
  fill_pairs(line, {1, 1, pixels}, out);
  const int64_t filled = (pixels + 1) / 2;
  std::fill(out + filled * 2 * channels, out + pairs * 2 * channels, BFloat16{});
}

// The factor B of some products, a tile of channels for one tap, and the first of their sums.
struct AmxColumn {
  const BFloat16* pairs;
  float* sums;
};

// Adds the products of kA tiles of the transposed operand and kB columns, over `steps` steps.
// Tiles are `tile_values` values apart, rows of pairs `pair_bytes`, rows of sums `row_bytes`.
template <int kA, int kB>
PK_OUTLINE void add_columns(const BFloat16* transposed, int64_t tile_values,
                            const AmxColumn* columns, int64_t pair_bytes, int64_t steps,
                            int64_t row_bytes) {
  const BFloat16 *a[kA], *b[kB];
  for (int g = 0; g < kA; ++g) a[g] = transposed + g * tile_values;
  for (int v = 0; v < kB; ++v) b[v] = columns[v].pairs;
  const auto sums_at = [&](int index) PK_LAMBDA {
    char* first = reinterpret_cast<char*>(columns[index % kB].sums);
    return first + index / kB * kMostTileRows * row_bytes;
  };
  unrolled<kA * kB>(
      [&](auto index) PK_LAMBDA { load_tile<decltype(index)::value>(sums_at(index), row_bytes); });
  for (int64_t step = 0; step < steps; ++step) {
    add_tile_products<kA, kB, -1>(a, kTileBytes, b, pair_bytes);
    for (int g = 0; g < kA; ++g) a[g] += kMostTileRows * kTileDepth;
    for (int v = 0; v < kB; ++v) b[v] += pair_bytes / 2 / sizeof(BFloat16) * kTileDepth;
  }
  unrolled<kA * kB>(
      [&](auto index) PK_LAMBDA { store_tile<decltype(index)::value>(sums_at(index), row_bytes); });
}

// add_columns for `count` columns, from 1 to 4 / kA.
template <int kA, int kB = kSumTiles / kA, class... Arguments>
PK_INLINE void add_most_columns(int count, const Arguments&... arguments) {
  if constexpr (kB > 0) {
    if (count == kB) return add_columns<kA, kB>(arguments...);
    add_most_columns<kA, kB - 1>(count, arguments...);
  }
}

// partial[tap][n][w] += the products of all taps with kA tiles of the transposed operand. The
// copies of the other operand are `copy_values` apart.
template <int kA>
PK_INLINE void add_taps(const BFloat16* transposed, const BFloat16* copies, int64_t copy_values,
                        const AmxPixels& pixels, const ConvSizes& conv, int64_t wide_channels,
                        int64_t weights, float* partial) {
  constexpr int kMost = kSumTiles / kA;
  AmxColumn columns[kMost];
  int count = 0;
  const auto run = [&]() PK_LAMBDA {
    add_most_columns<kA>(count, transposed, pixels.depth * kMostTileRows, columns,
                         2 * wide_channels * int64_t(sizeof(BFloat16)), pixels.depth / kTileDepth,
                         wide_channels * int64_t(sizeof(float)));
    count = 0;
  };
  for (int64_t tap = 0; tap < conv.taps(); ++tap) {
    const int64_t distance = tap / conv.kernel_w * pixels.line + tap % conv.kernel_w;
    const BFloat16* pairs = copies + distance % 2 * copy_values + distance / 2 * 2 * wide_channels;
    for (int64_t w = 0; w < wide_channels; w += kLanes<float>) {
      columns[count++] = {pairs + 2 * w, partial + tap * weights + w};
      if (count == kMost) run();
    }
  }
  if (count > 0) run();
}

// Like strip_weight_gradient, for operands with a halo. Returns false, and adds nothing, for a
// stride, and where a value that is not finite would meet the zeros of a halo:
// strip_weight_gradient serves these.
PK_INLINE bool amx_weight_gradient(const BFloat16* activated, const Haloed& a_operand,
                                   const BFloat16* gradient, const Haloed& dy_operand,
                                   const Strip& strip, const ConvSizes& conv, bool input_last,
                                   BFloat16* memory, float* dweight) {
  if (conv.stride.h != 1 || conv.stride.w != 1) return false;
  if (conv.taps() > 1 && !(are_finite(activated, strip.images * a_operand.values()) &&
                           are_finite(gradient, strip.images * dy_operand.values()))) {
    return false;
  }
  const AmxPixels pixels(conv, strip);
  const int64_t narrow_channels = input_last ? conv.out_channels : conv.in_channels;
  const int64_t wide_channels = input_last ? conv.in_channels : conv.out_channels;
  const int64_t weights = narrow_channels * wide_channels;
  const int64_t copy_values = pixels.pairs * 2 * wide_channels;
  BFloat16* transposed = reinterpret_cast<BFloat16*>(
      (reinterpret_cast<uintptr_t>(memory) + kTileBytes - 1) / kTileBytes * kTileBytes);
  BFloat16* copies = transposed + narrow_channels * pixels.depth;
  TileShapes shapes;
  for (int tile = 0; tile < kTiles; ++tile) shapes.set(tile, kMostTileRows, kTileBytes);
  const ConfiguredTiles configured(shapes);
  for (int64_t image = 0; image < strip.images; ++image) {
    const BFloat16* a = activated + image * a_operand.values();
    const BFloat16* dy =
        gradient + image * dy_operand.values() + dy_operand.offset(conv.halo_h(), conv.halo_w());
    fill_transposed(input_last ? dy : a, narrow_channels, pixels, transposed);
    const BFloat16* wide = input_last ? a : dy;
    for (int64_t odd = 0; odd < (conv.taps() > 1 ? 2 : 1); ++odd) {
      fill_pairs_of_line(wide + odd * wide_channels, wide_channels, pixels.read - odd, pixels.pairs,
                         copies + odd * copy_values);
    }
    int64_t n = 0;
    const auto add = [&](auto tiles) PK_LAMBDA {
      constexpr int kA = decltype(tiles)::value;
      add_taps<kA>(transposed + n * pixels.depth, copies, copy_values, pixels, conv, wide_channels,
                   weights, dweight + n * wide_channels);
      n += kA * kMostTileRows;
    };
    while (n + 2 * kMostTileRows <= narrow_channels) add(std::integral_constant<int, 2>{});
    while (n < narrow_channels) add(std::integral_constant<int, 1>{});
  }
  return true;
}

#endif

PK_END_ISA
