// Coefficients of a batch norm for each channel, tiles of pixels, and sums over tiles.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "thread_buffer.h"
#include "types.h"

namespace preact_kernels {

struct Norm;
struct AffineStep;

// p = (x - mean) * scale + bias. Subtracting the mean first avoids cancellation where it is large
// compared with the deviation.
template <class A>
struct Normalisation {
  const A* mean;
  const A* bias;
  std::vector<A> scale;
  std::vector<double> rstd;

  Normalisation(const Norm& norm, int64_t channels);
};

// The coefficients of an affine step: A*g + B*(x - mean) + C. In evaluation mode it is A*g, and x
// is not read: NaN does not spread.
template <class A>
struct InputGradient {
  std::vector<A> a, b, c;
  const A* mean;
  bool in_training;

  InputGradient(const AffineStep& step, int64_t channels);
};

// The tensors of a deferred gradient and its result.
template <class T>
struct GradientPointers {
  const T *skip, *g, *x;
  T* dx;

  GradientPointers from(int64_t offset) const {
    return {skip == nullptr ? nullptr : skip + offset, g + offset, x + offset, dx + offset};
  }
};

// Tiles of pixels, `channels` values each: they fit in the first-level cache and are much larger
// than their sums.
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

// Sums per channel over tiles of pixels, for mean and variance. A tile sums d = x - pivot, where
// the pivot is the mean of its first k pixels. Usually sum(d)^2 / n, which is subtracted at the
// end, is 1 / k of the difference, and never more than n / k times the difference.
template <class A>
struct TileStatistics {
  int64_t channels;
  std::vector<int64_t> pixels;  // of each tile
  A* partials;                  // [tiles, 3, channels]: pivot, sum(d), sum(d^2)

  TileStatistics(int64_t tiles, int64_t channels)
      : channels(channels),
        pixels(tiles),
        partials(thread_buffer<A, Use::kPartials>(tiles * 3 * channels)) {}

  A* tile(int64_t index) { return partials + index * 3 * channels; }

  // Merges the tiles in order, in float64: mean = sum(n_i mean_i) / n and
  // var = (sum(M2_i) + sum(n_i (mean_i - mean)^2)) / n, biased.
  void merge(A* mean_out, A* var_out) {
    std::vector<double> mean(channels), squares(channels);
    double count = 0;
    for (size_t t = 0; t < pixels.size(); ++t) {
      const A* pivot = tile(t);
      const A* sum = pivot + channels;
      const double n = static_cast<double>(pixels[t]);
      for (int64_t c = 0; c < channels; ++c) mean[c] += n * pivot[c] + sum[c];
      count += n;
    }
    for (int64_t c = 0; c < channels; ++c) mean[c] /= count;
    for (size_t t = 0; t < pixels.size(); ++t) {
      const A* pivot = tile(t);
      const A* sum = pivot + channels;
      const A* square = sum + channels;
      const double n = static_cast<double>(pixels[t]), inv_n = 1 / n;
      for (int64_t c = 0; c < channels; ++c) {
        const double from_pivot = sum[c] * inv_n;
        const double d = pivot[c] + from_pivot - mean[c];
        squares[c] += (square[c] - sum[c] * from_pivot) + n * d * d;
      }
    }
    for (int64_t c = 0; c < channels; ++c) {
      mean_out[c] = static_cast<A>(mean[c]);
      // Not std::max: NaN must stay NaN.
      var_out[c] = static_cast<A>(squares[c] < 0 ? 0 : squares[c] / count);
    }
  }
};

// Sums of g and of g * (x - mean) over tiles, [tiles, 2, channels]. float64: rounding here would
// round the result.
template <class A>
struct TileSums {
  int64_t tiles, channels;
  double* partials;

  TileSums(int64_t tiles, int64_t channels)
      : tiles(tiles),
        channels(channels),
        partials(thread_buffer<double, Use::kPartials>(tiles * 2 * channels)) {}

  double* tile(int64_t index) { return partials + index * 2 * channels; }

  // out = [sum(g), sum(g * xhat)]. Adds the tiles in order, in float64.
  void merge(const Normalisation<A>& norm, A* out) {
    std::vector<double> total(2 * channels);
    for (int64_t t = 0; t < tiles; ++t) {
      const double* p = tile(t);
      for (int64_t i = 0; i < 2 * channels; ++i) total[i] += p[i];
    }
    for (int64_t c = 0; c < channels; ++c) {
      out[c] = static_cast<A>(total[c]);
      out[channels + c] = static_cast<A>(total[channels + c] * norm.rstd[c]);
    }
  }
};

}  // namespace preact_kernels
