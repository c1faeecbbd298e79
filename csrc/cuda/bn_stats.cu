// Mean and biased variance of each channel.

#include "grid_statistics.cuh"
#include "on_device.h"

namespace preact_kernels {
namespace cuda {

template <class T>
struct BnStatsParams {
  PixelRows rows;
  const T* x;
  StatisticsMemory statistics;
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, kStatisticsThreadBlocks)
    bn_stats_kernel(BnStatsParams<T> p) {
  wait_for_predecessors();
  let_dependents_start();
  const ThreadRows<kWidth, kStatisticsSteps> thread(p.rows);
  GridStatistics<kWidth> statistics(thread, [&](float (&to)[kWidth], int64_t at) {
    Vector<T, kWidth> x;
    x.load(p.x + at);
    x.unpack(to);
  });
  thread.for_each([&](int64_t at, int64_t stride, int steps) {
    Vector<T, kWidth> x[kStatisticsSteps];
    load_rows(x, p.x + at, stride, steps);
    statistics.add(x, steps);
  });
  statistics.finish(thread, p.statistics);
}

}  // namespace cuda

using namespace cuda;

// A thread block owns some channels, in a grid-stride loop over tiles of pixels.
void launch_bn_stats(const ImageSizes& size, const Tensor& x, const Statistics& of_x) {
  const OnDeviceOf on(x);
  for_dtype(x, [&](auto value) {
    using T = decltype(value);
    const T* from = data<T>(x);
    const auto launch_with = [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const Grid grid = grid_of_statistics(size, kWidth);
      const OwnedGridSums memory(x, grid.thread_blocks, size.channels, on.stream);
      const BnStatsParams<T> params{
          grid.rows,
          from,
          {memory.sums, mutable_data<float>(of_x.mean), mutable_data<float>(of_x.var)}};
      launch("bn_stats", bn_stats_kernel<T, kWidth>, grid.thread_blocks, kThreads,
             kThreadBlockSumBytes * 2 * kWidth, on.stream, params);
    };
    with_width<T>(launch_with, size.channels, from);
  });
}

}  // namespace preact_kernels
