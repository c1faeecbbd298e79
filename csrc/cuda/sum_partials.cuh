// Sums over the blocks of a backward, in a fixed order: the gradient of a weight and the sums of g.
#pragma once

#include "device.cuh"

namespace preact_kernels::cuda {

struct SumPartials {
  const float* partials;  // [rows, weight_values + sum_values]
  int rows, weight_values, sum_values;
  void* dconv_weight;  // [K, C, R, S] of any strides; in partials it is [R*S][K][C]
  int out_channels, channels, side;
  int64_t stride_k, stride_c, stride_r, stride_s;
  float* sums;  // [sum_values]
};

constexpr int kSumColumns = 32, kSumSlices = 8;  // threads of a block: along a row, and down

// Each block owns kSumColumns columns. A thread adds every kSumSlices-th row, in float64.
template <class T>
__global__ void __launch_bounds__(kSumColumns* kSumSlices)
    sum_partials_kernel(const SumPartials p) {
  double* shared = reinterpret_cast<double*>(dynamic_shared());
  const int width = p.weight_values + p.sum_values;
  const int lane = threadIdx.x % kSumColumns, slice = threadIdx.x / kSumColumns;
  const int column = blockIdx.x * kSumColumns + lane;
  double sum = 0;
  if (column < width) {
#pragma unroll 4
    for (int row = slice; row < p.rows; row += kSumSlices) {
      sum += p.partials[int64_t(row) * width + column];
    }
  }
  shared[threadIdx.x] = sum;
  __syncthreads();
  if (slice != 0 || column >= width) return;
  sum = 0;
  for (int i = 0; i < kSumSlices; ++i) sum += shared[i * kSumColumns + lane];
  if (column >= p.weight_values) {
    p.sums[column - p.weight_values] = float(sum);
    return;
  }
  const int c = column % p.channels, k = column / p.channels % p.out_channels;
  const int tap = column / (p.channels * p.out_channels);
  const int64_t at =
      k * p.stride_k + c * p.stride_c + tap / p.side * p.stride_r + tap % p.side * p.stride_s;
  static_cast<T*>(p.dconv_weight)[at] = from_float<T>(float(sum));
}

template <class T>
void launch_sum_partials(const SumPartials& p, cudaStream_t stream) {
  const int width = p.weight_values + p.sum_values;
  if (width == 0) return;
  launch("sum_partials", sum_partials_kernel<T>, dim3((width + kSumColumns - 1) / kSumColumns),
         dim3(kSumColumns * kSumSlices), kSumColumns * kSumSlices * sizeof(double), stream, p);
}

}  // namespace preact_kernels::cuda
