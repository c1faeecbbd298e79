// The residual addition, with the statistics of the sum.
#pragma once

#include "statistics.cuh"

namespace preact_kernels::cuda {

template <class T>
struct ResidualAddParams {
  PixelRows rows;
  const T* x;
  const T* branch;
  T* y;
  StatisticsMemory statistics;  // of y as stored
};

// y = x + branch; with kStats the mean and variance of y.
template <class T, int kWidth, bool kStats>
__global__ void __launch_bounds__(kThreads, kStatisticsBlocks)
    residual_add_forward_kernel(ResidualAddParams<T> p) {
  constexpr int kSteps = kStatisticsSteps;
  const ThreadRows<kWidth, kSteps> thread(p.rows);
  const auto add = [](Vector<T, kWidth>& x, const Vector<T, kWidth>& branch) {
    float sum[kWidth], added[kWidth];
    x.unpack(sum);
    branch.unpack(added);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum[i] += added[i];
    x.pack(sum);
  };
  const auto sum_at = [&](float (&to)[kWidth], int64_t at) {
    Vector<T, kWidth> x, branch;
    x.load(p.x + at);
    branch.load(p.branch + at);
    add(x, branch);
    x.unpack(to);
  };
  Statistics<kWidth> statistics(thread, sum_at);
  thread.for_each([&](int64_t at, int64_t stride, int steps) {
    Vector<T, kWidth> y[kSteps], branch[kSteps];
    load_rows(y, p.x + at, stride, steps);
    load_rows(branch, p.branch + at, stride, steps);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (s < steps) {
        add(y[s], branch[s]);
        y[s].store(p.y + at + s * stride);
      }
    }
    if (kStats) statistics.add(y, steps);
  });
  if (kStats) statistics.finish(thread, p.statistics);
}

// A block owns some channels and every gridDim.x-th tile of pixels: see `grid_of_statistics`.
template <class T, bool kStats>
void launch_residual_add_forward(const ResidualAddParams<T>& params, dim3 blocks, bool vectors,
                                 cudaStream_t stream) {
  constexpr int kWidth = kFullWidth<T>;
  if (vectors) {
    launch("residual_add_forward", residual_add_forward_kernel<T, kWidth, kStats>, blocks, kThreads,
           kStats ? kBlockSumBytes<2 * kWidth> : 0, stream, params);
  } else {
    launch("residual_add_forward", residual_add_forward_kernel<T, 1, kStats>, blocks, kThreads,
           kStats ? kBlockSumBytes<2> : 0, stream, params);
  }
}

}  // namespace preact_kernels::cuda
