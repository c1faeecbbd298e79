// Per-channel coefficients of norms, tiles of pixels, and sums over tiles.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "thread_buffer.h"
#include "types.h"

namespace preact_kernels {

struct Norm;
struct AffineStep;

// The coefficients of a norm for an image: p = (x - mean) * scale + bias. Subtracting the mean
// first avoids cancellation where it is large compared with the deviation.
template <class A>
struct NormRow {
  const A *mean, *scale, *bias;
  Activation activation;
};

// The coefficients of a norm: one row, or a row for each image.
template <class A>
class Normalisation {
 public:
  const bool has_rows;

  Normalisation(const Norm& norm, int64_t channels);

  NormRow<A> row(int64_t image) const {
    return {mean_ + image * mean_stride_, scale_.data() + image * scale_stride_,
            bias_ + image * bias_stride_, activation_};
  }
  const double* rstd(int64_t image) const { return rstd_.data() + image * scale_stride_; }

 private:
  const A *mean_, *bias_;
  int64_t mean_stride_, bias_stride_, scale_stride_;  // distances between rows; 0 for one row
  Activation activation_;
  std::vector<A> scale_;
  std::vector<double> rstd_;
};

// The coefficients of an affine step for an image: A*g + B*(x - mean) + C. In evaluation mode B and
// C are 0, and x is not read: NaN does not spread.
template <class A>
struct GradientRow {
  const A *a, *b, *c, *mean;
  bool in_training;
};

// The coefficients of an affine step: one row, or a row for each image.
template <class A>
class InputGradient {
 public:
  InputGradient(const AffineStep& step, int64_t channels);

  bool has_rows() const { return stride_ != 0; }

  GradientRow<A> row(int64_t image) const {
    const int64_t at = image * stride_;
    return {a_.data() + at, b_.data() + at, c_.data() + at, mean_ + image * mean_stride_,
            in_training_};
  }

 private:
  const A* mean_;
  int64_t mean_stride_, stride_;
  bool in_training_;
  std::vector<A> a_, b_, c_;
};

// The tensors of a deferred affine gradient, and its result.
template <class T>
struct GradientPointers {
  const T *skip, *g, *x;
  T* dx;

  GradientPointers from(int64_t offset) const {
    return {skip == nullptr ? nullptr : skip + offset, g + offset, x + offset, dx + offset};
  }
};

// Tiles of pixels with all channels: they fit in the first-level cache, and are much larger than
// their sums.
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

// The tiles of a batch. If the norm has rows, a tile is a part of one image.
struct BatchTiles {
  int64_t images, of_image, count;
  PixelTiles tiles;  // tiles of an image if the norm has rows, else of the batch

  BatchTiles(const ImageSizes& size, bool has_rows)
      : images(has_rows ? size.images : 1), tiles(size.pixels() / images, size.channels) {
    of_image = tiles.count;
    count = images * of_image;
  }
  int64_t image(int64_t tile) const { return tile / of_image; }
  int64_t first(int64_t tile) const {
    return image(tile) * tiles.pixels + tiles.first(tile % of_image);
  }
  int64_t length(int64_t tile) const { return tiles.length(tile % of_image); }
};

// The sum of squares around `mean` of the n values x of a tile, from sum(d) and sum(d^2) for
// d = x - pivot. from_pivot is sum(d) / n.
template <class A>
double squares_around(double mean, A pivot, A sum, A square, double from_pivot, double n) {
  const double d = pivot + from_pivot - mean;
  return (square - sum * from_pivot) + n * d * d;
}

// Not std::max: NaN must stay NaN.
inline double variance_of(double squares, double count) {
  return squares < 0 ? 0 : squares / count;
}

// Sums per channel over tiles of pixels, for mean and variance. A tile sums d = x - pivot, where
// the pivot is the mean of its first k pixels. The correction sum(d)^2 / n, which the end
// subtracts, is usually 1 / k of the result, and never more than n / k times the result.
template <class A>
struct TileStatistics {
  int64_t channels;
  std::vector<int64_t> pixels;  // pixels of each tile
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
        squares[c] += squares_around(mean[c], pivot[c], sum[c], square[c], sum[c] * inv_n, n);
      }
    }
    for (int64_t c = 0; c < channels; ++c) {
      mean_out[c] = static_cast<A>(mean[c]);
      var_out[c] = static_cast<A>(variance_of(squares[c], count));
    }
  }
};

// Merges the TileStatistics of an image, in order and in float64, over tiles and over the channels
// of each group. The sums are relative to a pivot: the mean of equal values is exact.
template <class A>
void merge_groups(const A* tiles, const PixelTiles& sizes, int64_t channels, int64_t groups,
                  A* mean_out, A* var_out);

// Sums of g and of g * (x - mean) over tiles, [tiles, 2, channels]; in float64, as rounding them
// would round the result.
template <class A>
struct TileSums {
  int64_t tiles, channels;
  double* partials;

  TileSums(int64_t tiles, int64_t channels)
      : tiles(tiles),
        channels(channels),
        partials(thread_buffer<double, Use::kPartials>(tiles * 2 * channels)) {}

  double* tile(int64_t index) { return partials + index * 2 * channels; }

  // out = [sum(g), sum(g * xhat)]: [2, channels], or [2, images, channels] if the norm has rows,
  // where all images have as many tiles. Adds the tiles in order, in float64.
  void merge(const Normalisation<A>& norm, int64_t images, A* out);
};

// Adds the sums of some tiles: out = sum(g), products = sum(g * xhat).
template <class A>
void merge_sums(const double* tiles, int64_t count, int64_t channels, const double* rstd, A* out,
                A* products);

}  // namespace preact_kernels
