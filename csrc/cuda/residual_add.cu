// The residual addition, with the statistics of the sum.

#include "grid_statistics.cuh"
#include "on_device.h"

namespace preact_kernels {
namespace cuda {

template <class T>
struct ResidualAddParams {
  PixelRows rows;
  const T* x;
  const T* branch;
  const T* bias;  // [channels], or null
  T* y;
  StatisticsMemory statistics;  // statistics of y as stored
};

// y = x + (branch [+ bias]), and if kStats its mean and variance.
template <class T, int kWidth, bool kStats>
__global__ void __launch_bounds__(kThreads, kStatisticsThreadBlocks)
    residual_add_forward_kernel(ResidualAddParams<T> p) {
  constexpr int kSteps = kStatisticsSteps;
  wait_for_predecessors();
  let_dependents_start();
  const ThreadRows<kWidth, kSteps> thread(p.rows);
  float bias[kWidth];
  const bool has_bias = !kStats && p.bias != nullptr;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    bias[i] = has_bias && thread.is_used ? to_float(p.bias[thread.channel + i]) : 0.0f;
  }
  const auto add = [&](Vector<T, kWidth>& x, const Vector<T, kWidth>& branch) {
    float sum[kWidth], added[kWidth];
    x.unpack(sum);
    branch.unpack(added);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (has_bias) added[i] += bias[i];  // -0 stays -0 without a bias
      sum[i] += added[i];
    }
    x.pack(sum);
  };
  const auto sum_at = [&](float (&to)[kWidth], int64_t at) {
    Vector<T, kWidth> x, branch;
    x.load(p.x + at);
    branch.load(p.branch + at);
    add(x, branch);
    x.unpack(to);
  };
  GridStatistics<kWidth> statistics(thread, sum_at);
  thread.for_each([&](int64_t at, int64_t stride, int steps) {
    Vector<T, kWidth> y[kSteps], branch[kSteps];
    load_rows(y, p.x + at, stride, steps);
    load_rows(branch, p.branch + at, stride, steps);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (s < steps) {
        add(y[s], branch[s]);
        store_global(y[s], p.y + at + s * stride);
      }
    }
    if (kStats) statistics.add(y, steps);
  });
  if (kStats) statistics.finish(thread, p.statistics);
}

}  // namespace cuda

using namespace cuda;

// A thread block owns some channels, in a grid-stride loop over tiles of pixels.
void launch_residual_add_forward(const ImageSizes& size, const Tensor& x, const Tensor& branch,
                                 const Tensor* bias, const Output& output) {
  const Statistics& of_y = output.statistics;
  const OnDeviceOf on(x);
  const auto launch_as = [&](auto with_stats, auto value) {
    using T = decltype(value);
    constexpr bool kStats = decltype(with_stats)::value;
    const T* added = bias != nullptr ? data<T>(*bias) : nullptr;
    ResidualAddParams<T> params{{}, data<T>(x), data<T>(branch), added, mutable_data<T>(output.y),
                                {}};
    const auto launch_with = [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const Grid grid = grid_of_statistics(size, kWidth);
      params.rows = grid.rows;
      std::optional<OwnedGridSums> memory;
      if (kStats) {
        memory.emplace(x, grid.thread_blocks, size.channels, on.stream);
        params.statistics = {memory->sums, mutable_data<float>(of_y.mean),
                             mutable_data<float>(of_y.var)};
      }
      launch("residual_add_forward", residual_add_forward_kernel<T, kWidth, kStats>,
             grid.thread_blocks, kThreads, kStats ? kThreadBlockSumBytes * 2 * kWidth : 0,
             on.stream, params, kStats ? LaunchKind::kPlain : LaunchKind::kDependent);
    };
    with_width<T>(launch_with, size.channels, params.x, params.branch, params.y);
  };
  for_dtype(x, [&](auto value) {
    of_y.are_wanted ? launch_as(std::true_type{}, value) : launch_as(std::false_type{}, value);
  });
}

}  // namespace preact_kernels
