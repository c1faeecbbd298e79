#include "planes.h"

#include "dtypes.h"
#include "kernels.h"
#include "parallel.h"

namespace preact_kernels {

namespace {

// Runs of consecutive planes of an image, about as large as a tile of pixels.
struct PlaneRuns {
  const ImageSizes& size;
  int64_t pixels, length, of_image, count;

  explicit PlaneRuns(const ImageSizes& size)
      : size(size),
        pixels(size.height * size.width),
        length(std::clamp<int64_t>(kRunValues / pixels, 1, size.channels)),
        of_image((size.channels + length - 1) / length),
        count(size.images * of_image) {}

  // Calls body(image, first channel, planes, first value) for every run.
  template <class Body>
  void for_each(const Body& body) const {
    for_tiles(count, [&](int64_t run) {
      const int64_t image = run / of_image, channel = run % of_image * length;
      body(image, channel, std::min(length, size.channels - channel),
           (image * size.channels + channel) * pixels);
    });
  }

 private:
  static constexpr int64_t kRunValues = 8192;
};

template <class A>
NormRow<A> from_channel(const NormRow<A>& row, int64_t channel) {
  // An affine step has no bias.
  return {row.mean + channel, row.scale + channel,
          row.bias == nullptr ? nullptr : row.bias + channel, row.activation};
}

// TileStatistics of ranges of equal length: planes, or the planes of a group.
template <class A>
struct RangeStatistics {
  static constexpr int64_t kTileValues = 1024, kTaskTiles = 16;
  int64_t values, of_range;
  A* partials;  // [ranges, tiles, 3]

  template <class T>
  RangeStatistics(const T* x, int64_t ranges, int64_t values)
      : values(values), of_range((values + kTileValues - 1) / kTileValues) {
    const int64_t tiles = ranges * of_range;
    partials = thread_buffer<A, Use::kPartials>(tiles * 3);
    for_tiles((tiles + kTaskTiles - 1) / kTaskTiles, [&](int64_t task) {
      const int64_t end = std::min((task + 1) * kTaskTiles, tiles);
      for (int64_t tile = task * kTaskTiles; tile < end; ++tile) {
        const int64_t part = tile % of_range;
        PK_CALL(range_statistics, x + tile / of_range * values + part * kTileValues, length(part),
                partials + tile * 3);
      }
    });
  }

  int64_t length(int64_t tile) const { return std::min(kTileValues, values - tile * kTileValues); }

  // Mean and variance of `count` ranges from `first` on, `step` apart, as in merge_groups.
  void merge(int64_t first, int64_t count, int64_t step, A* mean_out, A* var_out) const {
    const double origin = partials[first * of_range * 3],
                 total = static_cast<double>(count * values);
    double sum = 0, squares = 0;
    const auto for_each_tile = [&](const auto& body) {
      for (int64_t i = 0; i < count; ++i) {
        const A* tile = partials + (first + i * step) * of_range * 3;
        for (int64_t t = 0; t < of_range; ++t, tile += 3) body(tile, double(length(t)));
      }
    };
    for_each_tile([&](const A* tile, double n) { sum += n * (tile[0] - origin) + tile[1]; });
    const double mean = origin + sum / total;
    for_each_tile([&](const A* tile, double n) {
      squares += squares_around(mean, tile[0], tile[1], tile[2], tile[1] / n, n);
    });
    *mean_out = static_cast<A>(mean);
    *var_out = static_cast<A>(variance_of(squares, total));
  }
};

}  // namespace

void launch_planes_bn_stats(const ImageSizes& size, const Tensor& x, const Statistics& of_x) {
  for_dtype(x.scalar_type(), [&](auto value) {
    using T = decltype(value);
    using A = Accumulate<T>;
    A *mean = mutable_data<A>(of_x.mean), *var = mutable_data<A>(of_x.var);
    const int64_t channels = size.channels;
    const RangeStatistics<A> planes(data<T>(x), size.images * channels, size.height * size.width);
    for (int64_t c = 0; c < channels; ++c) {
      planes.merge(c, size.images, channels, mean + c, var + c);
    }
  });
}

void launch_planes_group_stats(const ImageSizes& size, const Tensor& x, int64_t groups,
                               const Statistics& of_x) {
  for_dtype(x.scalar_type(), [&](auto value) {
    using T = decltype(value);
    using A = Accumulate<T>;
    A *mean = mutable_data<A>(of_x.mean), *var = mutable_data<A>(of_x.var);
    const int64_t in_group = size.channels / groups, ranges = size.images * groups;
    const RangeStatistics<A> of_groups(data<T>(x), ranges, in_group * size.height * size.width);
    for (int64_t i = 0; i < ranges; ++i) {
      A *of_mean = mean + i * in_group, *of_var = var + i * in_group;
      of_groups.merge(i, 1, 0, of_mean, of_var);
      std::fill_n(of_mean, in_group, *of_mean);
      std::fill_n(of_var, in_group, *of_var);
    }
  });
}

void launch_planes_norm_act_forward(const ImageSizes& size, const Tensor& x, const Norm& norm,
                                    const Tensor* residual, const Tensor& y) {
  for_dtype(x.scalar_type(), [&](auto value) {
    using T = decltype(value);
    const Normalisation<Accumulate<T>> normalisation(norm, size.channels);
    const T* from = data<T>(x);
    const T* addend = residual != nullptr ? data<T>(*residual) : nullptr;
    T* to = mutable_data<T>(y);
    const PlaneRuns runs(size);
    runs.for_each([&](int64_t image, int64_t channel, int64_t planes, int64_t at) {
      const auto row = from_channel(normalisation.row(image), channel);
      if (addend != nullptr) {
        PK_CALL(planes_norm_add_act, from + at, addend + at, to + at, planes, runs.pixels, row);
      } else {
        PK_CALL(planes_norm_act, from + at, to + at, planes, runs.pixels, row);
      }
    });
  });
}

void launch_planes_norm_act_backward(const ImageSizes& size, const Tensor& dy, const Tensor& x,
                                     const Norm& norm, const Tensor* y, const Tensor* g,
                                     const Tensor* a, const Tensor& sums) {
  for_dtype(x.scalar_type(), [&](auto value) {
    using T = decltype(value);
    using A = Accumulate<T>;
    const Normalisation<A> normalisation(norm, size.channels);
    const T* gradient = data<T>(dy);
    const T* from = data<T>(x);
    const T* output = y != nullptr ? data<T>(*y) : nullptr;
    T* to = g != nullptr ? mutable_data<T>(*g) : nullptr;
    T* activated = a != nullptr ? mutable_data<T>(*a) : nullptr;
    TileSums<A> of_images(size.images, size.channels);
    const PlaneRuns runs(size);
    runs.for_each([&](int64_t image, int64_t channel, int64_t planes, int64_t at) {
      const auto row = from_channel(normalisation.row(image), channel);
      PK_CALL(planes_mask, gradient + at, from + at, output == nullptr ? output : output + at,
              to == nullptr ? to : to + at, planes, runs.pixels, row,
              of_images.tile(image) + channel, size.channels);
      if (activated != nullptr) {
        PK_CALL(planes_norm_act, from + at, activated + at, planes, runs.pixels, row);
      }
    });
    of_images.merge(normalisation, size.images, mutable_data<A>(sums));
  });
}

void launch_planes_input_gradient(const ImageSizes& size, const Gradient& gradient, bool activated,
                                  const Tensor& dx) {
  const AffineStep& step = *gradient.step;
  for_dtype(step.x.scalar_type(), [&](auto value) {
    using T = decltype(value);
    using A = Accumulate<T>;
    const Normalisation<A> normalisation(step.norm, size.channels);
    const InputGradient<A> coefficients(step, size.channels);
    const GradientPointers<T> all{data<T>(step.skip), data<T>(gradient.g), data<T>(step.x),
                                  mutable_data<T>(dx)};
    const PlaneRuns runs(size);
    runs.for_each([&](int64_t image, int64_t channel, int64_t planes, int64_t at) {
      const GradientRow<A> row = coefficients.row(image);
      PK_CALL(planes_input_gradient, all.from(at), activated, planes, runs.pixels,
              from_channel(normalisation.row(image), channel),
              GradientRow<A>{row.a + channel, row.b + channel, row.c + channel, row.mean + channel,
                             row.in_training});
    });
  });
}

}  // namespace preact_kernels
