// Mean and biased variance a channel.
#pragma once

#include "statistics.cuh"

namespace preact_kernels::cuda {

template <class T>
struct BnStatsParams {
  PixelRows rows;
  const T* x;
  StatisticsMemory statistics;
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, kStatisticsBlocks) bn_stats_kernel(BnStatsParams<T> p) {
  const ThreadRows<kWidth, kStatisticsSteps> thread(p.rows);
  Statistics<kWidth> statistics(thread, [&](float (&to)[kWidth], int64_t at) {
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

// A block owns some channels and every gridDim.x-th tile of pixels: see `grid_of_statistics`.
template <class T>
void launch_bn_stats(const BnStatsParams<T>& params, dim3 blocks, bool vectors,
                     cudaStream_t stream) {
  if (vectors) {
    launch("bn_stats", bn_stats_kernel<T, kFullWidth<T>>, blocks, kThreads,
           kBlockSumBytes<2 * kFullWidth<T>>, stream, params);
  } else {
    launch("bn_stats", bn_stats_kernel<T, 1>, blocks, kThreads, kBlockSumBytes<2>, stream, params);
  }
}

}  // namespace preact_kernels::cuda
