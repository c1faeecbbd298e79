// Mean and biased variance of each image and group of channels.

#include "grid_statistics.cuh"
#include "image_rows.cuh"
#include "on_device.h"

namespace preact_kernels {
namespace cuda {

template <class T>
struct GroupStatsParams {
  ImageRows images;
  const T* x;
  int groups, group_channels;
  int lanes;          // threads that merge a group; a power of two
  GridSums memory;    // [2 * parts + 2][channels] per image: sums, means, variances
  float* mean;        // [images, channels]
  float* var;         // [images, channels]
  const float* bias;  // [channels], or null
};

// The channels of a group, whose means and variances are `means` and `variances`, become one:
// var = sum(var_c + d_c^2) / n - (sum(d_c) / n)^2 for d_c = mean_c - mean of the first channel.
// With a bias, these are the statistics of x + bias, and the bias is subtracted from the mean.
template <class T>
__device__ void merge_channels(const GroupStatsParams<T>& p, const double* means,
                               const double* variances, int64_t image) {
  PixelRows threads{};  // a column for each group, a row for each lane
  threads.thread_block_pixels = p.lanes, threads.columns = kThreads / p.lanes;
  const int column = threadIdx.x % threads.columns, lane = threadIdx.x / threads.columns;
  const double* sums =
      reinterpret_cast<const double*>(dynamic_shared());  // left by sum_over_thread_block
  const double inv_channels = 1.0 / p.group_channels;
  const auto bias = [&](int c) { return p.bias == nullptr ? 0.0 : double(p.bias[c]); };
  for (int begin = 0; begin < p.groups; begin += threads.columns) {
    const int group = begin + column, first = group * p.group_channels;
    double values[2] = {}, pivot = 0;
    if (group < p.groups) {
      pivot = __ldcg(means + first) + bias(first);
      if (!isfinite(pivot)) pivot = 0;
      for (int c = first + lane; c < first + p.group_channels; c += p.lanes) {
        const double d = __ldcg(means + c) + bias(c) - pivot;
        values[0] += d;
        values[1] += __ldcg(variances + c) + d * d;
      }
    }
    sum_over_thread_block(values, lane, threads);
    if (group >= p.groups) continue;
    const double d = sums[column] * inv_channels;
    const double var = sums[kThreads + column] * inv_channels - d * d;
    float* to_mean = p.mean + image * p.images.rows.channels;
    float* to_var = p.var + image * p.images.rows.channels;
    for (int c = first + lane; c < first + p.group_channels; c += p.lanes) {
      to_mean[c] = static_cast<float>(pivot + d - bias(c));
      to_var[c] = static_cast<float>(var < 0 ? 0 : var);  // NaN stays NaN
    }
  }
}

// Statistics of each channel, as in `bn_stats`. The last thread block of an image merges the
// channels of groups.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, kStatisticsThreadBlocks)
    group_stats_kernel(GroupStatsParams<T> p) {
  wait_for_predecessors();
  let_dependents_start();
  const ThreadRows<kWidth, kStatisticsSteps> thread(p.images.rows);
  const T* from = p.x + p.images.begin();
  GridStatistics<kWidth> statistics(thread, [&](float (&to)[kWidth], int64_t at) {
    Vector<T, kWidth> x;
    x.load(from + at);
    x.unpack(to);
  });
  const unsigned parts = p.images.parts, lines = 2 * parts + 2;
  const GridSums memory = p.images.part_of(p.memory, lines, gridDim.y + 1);
  double* means = memory.partials + int64_t(lines - 2) * p.images.rows.channels;
  double* variances = means + p.images.rows.channels;
  p.images.for_each_part([&](unsigned part) {
    statistics.clear();
    thread.for_each(
        [&](int64_t at, int64_t stride, int steps) {
          Vector<T, kWidth> x[kStatisticsSteps];
          load_rows(x, from + at, stride, steps);
          statistics.add(x, steps);
        },
        part, parts);
    store_part(statistics.sums, thread, memory, part);
  });
  const bool has_sums = sum_over_parts(statistics.sums, thread, memory, parts);
  if (has_sums) {
    const double inv_count = 1.0 / static_cast<double>(thread.of.pixels);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const double d = statistics.sums[i] * inv_count;
      means[thread.channel + i] = statistics.pivot[i] + d;
      variances[thread.channel + i] = statistics.sums[kWidth + i] * inv_count - d * d;
    }
  }
  if (!__syncthreads_or(has_sums)) return;  // not the last thread block of these channels
  if (!is_last_of(gridDim.y, memory.counter + gridDim.y)) return;
  merge_channels(p, means, variances, p.images.image());
}

}  // namespace cuda

using namespace cuda;

namespace {

// A thread block owns some channels of one image, in a grid-stride loop over its tiles of pixels.
void launch_group_stats_of(const ImageSizes& size, const Tensor& x, int64_t groups,
                           const float* bias, const Statistics& of_x) {
  const OnDeviceOf on(x);
  for_dtype(x, [&](auto value) {
    using T = decltype(value);
    const T* from = data<T>(x);
    const int group_channels = static_cast<int>(size.channels / groups);
    int lanes = 1;
    while (lanes < group_channels && lanes < kThreads) lanes *= 2;
    const auto launch_with = [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const ImageGrid grid =
          grid_for_image_sums(size, true, kWidth, kStatisticsSteps, 8, kStatisticsThreadBlocks);
      const OwnedGridSums memory(x, grid.images, 2 * grid.parts + 2, grid.thread_blocks.y + 1,
                                 size.channels, on.stream);
      GroupStatsParams<T> params{
          {},    from,        static_cast<int>(groups),       group_channels,
          lanes, memory.sums, mutable_data<float>(of_x.mean), mutable_data<float>(of_x.var),
          bias};
      grid.for_each_launch([&](const ImageRows& images, dim3 thread_blocks) {
        params.images = images;
        launch("group_stats", group_stats_kernel<T, kWidth>, thread_blocks, kThreads,
               kThreadBlockSumBytes * 2 * kWidth, on.stream, params);
      });
    };
    with_width<T>(launch_with, size.channels, from);
  });
}

}  // namespace

void launch_group_stats(const ImageSizes& size, const Tensor& x, int64_t groups,
                        const Statistics& of_x) {
  launch_group_stats_of(size, x, groups, nullptr, of_x);
}

// `Kernels.group_stats` with a bias.
std::tuple<Tensor, Tensor> group_stats_with_bias(const Tensor& x, int64_t groups,
                                                 const Tensor& bias) {
  const ImageSizes size = check_images("x", x);
  PK_CHECK(groups > 0 && size.channels % groups == 0, "groups: expected a divisor of the channels ",
           size.channels, ", got ", groups);
  check_statistics("bias", bias, x);
  check_shape("bias", bias, {size.channels});
  const Statistics statistics = new_image_statistics(x, size);
  launch_group_stats_of(size, x, groups, data<float>(bias), statistics);
  return {statistics.mean, statistics.var};
}

}  // namespace preact_kernels
