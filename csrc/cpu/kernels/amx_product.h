// Products of strips on tile registers: see conv_product.h for what they compute.
//
// A tile has some pixels of an image row, read in place from the operand. The packed weights of
// product_tile already have the order of factors B: pairs of input channels.
#pragma once

#include "amx_tiles.h"
#include "register_tiles.h"

PK_BEGIN_ISA

#ifdef PK_HAS_TILES

// The reduction of a product, in runs of taps that are contiguous in the operand and in the
// weights, such as the taps of a kernel row.
struct TapRuns {
  int64_t count = 0;
  int64_t offset[Taps::kMost], place[Taps::kMost], values[Taps::kMost];
  bool has_rest = false;  // some run is not a multiple of kTileDepth

  TapRuns(const Taps& taps, int64_t channels) {
    for (int64_t t = 0; t < taps.count; ++t) {
      const bool continues = t > 0 && taps.offset[t] == taps.offset[t - 1] + channels &&
                             taps.place[t] == taps.place[t - 1] + 1;
      if (continues) {
        values[count - 1] += channels;
        continue;
      }
      offset[count] = taps.offset[t];
      place[count] = taps.place[t];
      values[count++] = channels;
    }
    for (int64_t i = 0; i < count; ++i) has_rest |= values[i] % kTileDepth != 0;
  }
};

// Splits the pixels of an image row into equal parts, each the rows of a tile. The last part may
// overlap the one before it.
struct AmxParts {
  int64_t parts, pixels;  // parts of a row, pixels of a part

  explicit AmxParts(int64_t width)
      : parts((width + kMostTileRows - 1) / kMostTileRows), pixels((width + parts - 1) / parts) {}
};

// If a run has a rest, the second registers of A and of B hold half a step of the reduction.
PK_INLINE TileShapes product_shapes(int64_t pixels, bool has_rest) {
  TileShapes shapes;
  for (int sums = 0; sums < kSumTiles; ++sums) shapes.set(sums, pixels, kTileBytes);
  for (int i = 0; i < 2; ++i) {
    const int64_t depth = i == 1 && has_rest ? kTileDepth / 2 : kTileDepth;
    shapes.set(kFirstA + i, pixels, depth * sizeof(BFloat16));
    shapes.set(kFirstB + i, depth / 2, kTileBytes);
  }
  return shapes;
}

// Computes the sums of kGroups parts of rows, which begin at `from`, for kVectors vectors of output
// channels.
template <int kGroups, int kVectors, bool kHasRest>
PK_INLINE void add_runs(const BFloat16* const (&from)[kGroups], int64_t pixel_step,
                        const TapRuns& runs, int64_t channels, const BFloat16* weights) {
  constexpr int64_t kWidth = kVectors * kLanes<float>;
  constexpr int64_t kPairBytes = 2 * kWidth * sizeof(BFloat16);
  constexpr int kWhole = kHasRest ? 0 : -1;
  const int64_t step = pixel_step * sizeof(BFloat16);
  unrolled<kGroups * kVectors>([&](auto sums) PK_LAMBDA { clear_tile<decltype(sums)::value>(); });
  for (int64_t run = 0; run < runs.count; ++run) {
    const BFloat16* a[kGroups];
    const BFloat16* b[kVectors];
    for (int g = 0; g < kGroups; ++g) a[g] = from[g] + runs.offset[run];
    for (int v = 0; v < kVectors; ++v) {
      b[v] = weights + runs.place[run] * channels * kWidth + v * kLanes<float> * 2;
    }
    int64_t left = runs.values[run];
    for (; left >= kTileDepth; left -= kTileDepth) {
      add_tile_products<kGroups, kVectors, kWhole>(a, step, b, kPairBytes);
      for (int g = 0; g < kGroups; ++g) a[g] += kTileDepth;
      for (int v = 0; v < kVectors; ++v) b[v] += kTileDepth * kWidth;
    }
    if constexpr (kHasRest) {
      if (left > 0) add_tile_products<kGroups, kVectors, 1>(a, step, b, kPairBytes);
    }
  }
}

// strip_product for kVectors vectors of output channels from k on. The registers are configured.
template <int kVectors, bool kHasRest, class Finish>
PK_OUTLINE void amx_channels_product(const BFloat16* in, const ProductPixels<Haloed>& pixels,
                                     int64_t images, const PackedWeights& packed, int64_t taps,
                                     const TapRuns& runs, const AmxParts& rows, int64_t k,
                                     const Finish finish) {
  constexpr int kGroups = kSumTiles / kVectors, kMost = std::min(max_tile_rows(kVectors), 8);
  constexpr int64_t kWidth = kVectors * kLanes<float>;
  const int64_t channels = packed.in_channels, step = pixels.step.w * channels;
  const int64_t result_step = pixels.result_step.w;
  const BFloat16* weights = static_cast<const BFloat16*>(packed.values) + k * taps * channels;
  alignas(64) float sums[kGroups][kMostTileRows * kWidth];
  const BFloat16* from[kGroups] = {};
  int64_t images_of[kGroups], results[kGroups], skipped[kGroups];
  int groups = 0;
  const auto run = [&]() PK_LAMBDA {
    for (int g = groups; g < kGroups; ++g) from[g] = from[0];
    add_runs<kGroups, kVectors, kHasRest>(from, step, runs, channels, weights);
    unrolled<kGroups * kVectors>([&](auto index) PK_LAMBDA {
      constexpr int kGroup = decltype(index)::value / kVectors;
      constexpr int kVector = decltype(index)::value % kVectors;
      store_tile<decltype(index)::value>(sums[kGroup] + kVector * kLanes<float>,
                                         kWidth * sizeof(float));
    });
    for (int g = 0; g < groups; ++g) {
      for (int64_t i = skipped[g]; i < rows.pixels;) {
        const int64_t count = next_rows<kMost>(rows.pixels - i);
        with_rows<kMost>(count, [&](auto rows_of_part) PK_LAMBDA {
          constexpr int kRows = decltype(rows_of_part)::value;
          Vector<float> acc[kRows][kVectors];
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
              acc[r][v] = load(sums[g] + (i + r) * kWidth + v * kLanes<float>);
            }
          }
          finish(acc, images_of[g], results[g] + i * result_step, k);
        });
        i += count;
      }
    }
    groups = 0;
  };
  for (int64_t image = 0; image < images; ++image) {
    for (int64_t row = 0; row < pixels.rows; ++row) {
      const BFloat16* line =
          in + image * pixels.operand.values() + row * pixels.step.h * pixels.operand.pitch();
      const int64_t result = pixels.first + image * pixels.result_image +
                             row * pixels.result_step.h * pixels.result_width;
      for (int64_t part = 0; part < rows.parts; ++part) {
        const int64_t column = std::min(part * rows.pixels, pixels.width - rows.pixels);
        from[groups] = line + column * step;
        images_of[groups] = image;
        results[groups] = result + column * result_step;
        skipped[groups] = part * rows.pixels - column;
        if (++groups == kGroups) run();
      }
    }
  }
  if (groups > 0) run();
}

// strip_product for finite weights.
template <class Finish>
PK_INLINE void amx_strip_product(const BFloat16* in, const ProductPixels<Haloed>& pixels,
                                 int64_t images, const ConvSizes& conv, const PackedWeights& packed,
                                 const Finish& finish) {
  const TapRuns runs(pixels.taps, packed.in_channels);
  const AmxParts rows(pixels.width);
  const ConfiguredTiles configured(product_shapes(rows.pixels, runs.has_rest));
  for_channel_tiles<float>(packed.out_channels, tile_vectors(conv),
                           [&](auto vectors, int64_t k) PK_LAMBDA {
                             constexpr int kVectors = decltype(vectors)::value;
                             if (runs.has_rest) {
                               amx_channels_product<kVectors, true>(
                                   in, pixels, images, packed, conv.taps(), runs, rows, k, finish);
                             } else {
                               amx_channels_product<kVectors, false>(
                                   in, pixels, images, packed, conv.taps(), runs, rows, k, finish);
                             }
                           });
}

#endif

PK_END_ISA
