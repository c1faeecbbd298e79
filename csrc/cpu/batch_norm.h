// Per-channel numbers of a batch norm, and statistics from tile partials.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "thread_buffer.h"
#include "types.h"

namespace preact_kernels {

// The tensors of one batch norm, as the ops take them: all [C] in the statistics dtype.
template <class A>
struct BatchNorm {
  const A* mean;
  const A* var;
  const A* weight;
  const A* bias;
  double eps;
};

// The batch norm in front of `x`, once its tensors are seen to fit.
template <class T>
BatchNorm<Accumulate<T>> batch_norm(const Tensor& x, const Tensor& mean, const Tensor& var,
                                    const Tensor& weight, const Tensor& bias, double eps,
                                    int64_t channels) {
  using A = Accumulate<T>;
  check_statistics("mean", mean, channels, x);
  check_statistics("var", var, channels, x);
  check_statistics("bn_weight", weight, channels, x);
  check_statistics("bn_bias", bias, channels, x);
  return {data<A>(mean), data<A>(var), data<A>(weight), data<A>(bias), eps};
}

// p = (x - mean) * scale + bias. The mean is subtracted first, here and below, so that nothing
// cancels where it is large beside the deviation.
template <class A>
struct Normalisation {
  const A* mean;
  const A* bias;
  std::vector<A> scale;
  std::vector<double> rstd;

  Normalisation(const BatchNorm<A>& bn, int64_t channels)
      : mean(bn.mean), bias(bn.bias), scale(channels), rstd(channels) {
    for (int64_t c = 0; c < channels; ++c) {
      rstd[c] = 1 / std::sqrt(double(bn.var[c]) + bn.eps);
      scale[c] = static_cast<A>(bn.weight[c] * rstd[c]);
    }
  }
};

// dx = a*g + b*(x - mean) + c: the gradient of a batch norm's input. In evaluation mode it is a*g
// alone, and x is not read: what is not finite there must not spread.
template <class A>
struct InputGradient {
  std::vector<A> a, b, c;
  const A* mean;
  bool constant;  // mean and variance are

  // sums: [2, channels], sum(g) and sum(g * xhat).
  InputGradient(const BatchNorm<A>& bn, const A* sums, double inv_count, int64_t channels)
      : a(channels), b(channels), c(channels), mean(bn.mean), constant(inv_count == 0) {
    for (int64_t i = 0; i < channels; ++i) {
      const double rstd = 1 / std::sqrt(double(bn.var[i]) + bn.eps);
      const double scale = bn.weight[i] * rstd;
      a[i] = static_cast<A>(scale);
      if (constant) continue;
      b[i] = static_cast<A>(-scale * rstd * sums[channels + i] * inv_count);
      c[i] = static_cast<A>(-scale * sums[i] * inv_count);
    }
  }
};

// Sums of each channel over tiles of pixels, for mean and variance. They are taken around a pivot,
// the mean of the tile's first k pixels: it lies so near the mean of all n that sum(d)^2 / n, which
// is subtracted at the end, is usually 1 / k of what remains, and never more than n / k times that.
template <class A>
struct TileStatistics {
  int64_t channels;
  std::vector<int64_t> pixels;  // of each tile
  A* partials;                  // [tiles, 3, channels]: pivot, sum(d), sum(d^2) for d = x - pivot

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
      // Not std::max: a NaN must stay one.
      var_out[c] = static_cast<A>(squares[c] < 0 ? 0 : squares[c] / count);
    }
  }
};

// Sums over tiles of a masked gradient g: sum(g) and sum(g * (x - mean)), [tiles, 2, channels].
// Kept in float64, as a rounding here would be one of the result.
template <class A>
struct TileSums {
  int64_t tiles, channels;
  double* partials;

  TileSums(int64_t tiles, int64_t channels)
      : tiles(tiles),
        channels(channels),
        partials(thread_buffer<double, Use::kPartials>(tiles * 2 * channels)) {}

  double* tile(int64_t index) { return partials + index * 2 * channels; }

  // out = [sum(g), sum(g * xhat)], added up in order in float64.
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
