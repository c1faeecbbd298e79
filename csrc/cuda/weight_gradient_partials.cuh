// The partial weight gradients of the thread blocks of a grid, which a later kernel adds in a fixed
// order.
#pragma once

#include "pixel_rows.cuh"

namespace preact_kernels::cuda {

struct WeightGradientPartials {
  const float* partials;  // [rows][taps][K][C]; null where there are none
  int rows;
  void* dconv_weight;  // [K, C, R, S] of any strides
  bool is_float32;     // else it has the dtype of the operands
  int out_channels, channels, side;
  int64_t stride_k, stride_c, stride_r, stride_s;

  __host__ __device__ int values() const { return side * side * out_channels * channels; }
};

constexpr int kPartialsBytes = kThreads * 4 * sizeof(double);  // shared memory that `add_up` uses

// Adjacent threads of a thread block in a row of sums of `width` columns, four columns each: for
// about 32 thread blocks, each with 32 bytes or more of a row.
__host__ __device__ inline int lanes_of_sums(int width) {
  const int lanes = width / 4 / 32;
  return lanes < 2 ? 2 : lanes < kThreads ? lanes : kThreads;
}

// Stores the sum over rows. All threads of a grid of kThreads must call this. A thread block owns
// neighbouring columns, a thread four of them in every `slices`-th row. The order of additions does
// not depend on the grid.
template <class T>
__device__ void add_up(const WeightGradientPartials& p, double* shared) {
  if (p.partials == nullptr) return;
  constexpr int kVector = 4;
  const int width = p.values();
  const int lanes = lanes_of_sums(width), slices = kThreads / lanes;
  const int lane = threadIdx.x % lanes, slice = threadIdx.x / lanes;
  PixelRows threads{};
  threads.thread_block_pixels = slices, threads.columns = lanes;
  for (int first = blockIdx.x * lanes * kVector; first < width;
       first += gridDim.x * lanes * kVector) {
    const int column = first + lane * kVector;
    double sums[kVector] = {};
    if (slice < slices && column < width) {
#pragma unroll 4
      for (int row = slice; row < p.rows; row += slices) {
        Vector<float, kVector> values;
        float part[kVector];
        values.load(p.partials + int64_t(row) * width + column);
        values.unpack(part);
#pragma unroll
        for (int i = 0; i < kVector; ++i) sums[i] += part[i];
      }
    }
    sum_over_rows(sums, slice, threads, shared);
    if (slice != 0 || column >= width) continue;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const int c = (column + i) % p.channels, k = (column + i) / p.channels % p.out_channels;
      const int tap = (column + i) / (p.channels * p.out_channels);
      const int64_t at =
          k * p.stride_k + c * p.stride_c + tap / p.side * p.stride_r + tap % p.side * p.stride_s;
      const float sum = static_cast<float>(shared[i * kThreads + threadIdx.x]);
      if (p.is_float32) {
        static_cast<float*>(p.dconv_weight)[at] = sum;
      } else {
        static_cast<T*>(p.dconv_weight)[at] = from_float<T>(sum);
      }
    }
  }
}

}  // namespace preact_kernels::cuda
