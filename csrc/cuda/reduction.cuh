// Sums over all pixels, in float64 and in an order that the shape and the device alone decide.
//
// Each thread adds up its pixels, each block its threads, by way of shared memory; the last block
// of a column of the grid to finish, which an integer counter tells, adds up the blocks in order.
// Nothing is added atomically: two runs give the same bits.
#pragma once

#include "pixel_rows.cuh"

namespace preact_kernels::cuda {

// Memory that the blocks of a grid share.
struct GridSums {
  double* partials;   // [blocks in x, 2, channels]
  unsigned* counter;  // [blocks in y], zeros before the kernel
};

// Whether this block is the last of its column of the grid to get here, and so sees what the
// others have written. Every thread of the block must ask.
__device__ inline bool is_last_block(unsigned* counter) {
  __threadfence();  // what this thread has written comes before the count
  __syncthreads();
  const bool is_last = threadIdx.x == 0 && atomicAdd(counter + blockIdx.y, 1u) == gridDim.x - 1;
  if (!__syncthreads_or(is_last)) return false;
  __threadfence();
  return true;
}

// Bytes of shared memory that `sum_over_block` takes.
template <int kValues>
constexpr size_t kBlockSumBytes = kValues * kThreads * sizeof(double);

// Adds up `values` over the threads of a block that have the same column; row 0 gets the sums.
template <int kValues>
__device__ inline void sum_over_block(double (&values)[kValues], const PixelRows& rows) {
  double* shared = reinterpret_cast<double*>(dynamic_shared());  // [kValues, kThreads]
  const int thread = threadIdx.x, row = thread / rows.columns;
  __syncthreads();  // an earlier sum has been read
#pragma unroll
  for (int i = 0; i < kValues; ++i) shared[i * kThreads + thread] = values[i];
  for (int left = rows.block_pixels; left > 1;) {
    const int half = (left + 1) / 2;
    __syncthreads();
    if (row + half < left) {  // and so row < half
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        shared[i * kThreads + thread] += shared[i * kThreads + thread + half * rows.columns];
      }
    }
    left = half;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kValues; ++i) values[i] = shared[i * kThreads + thread];
}

// Adds up two numbers a channel over the whole grid: values[i] and values[kWidth + i] for channel
// i of the thread's. True in the threads that get the sums, one a column, of the last block.
template <int kWidth, int kSteps>
__device__ inline bool sum_over_grid(double (&values)[2 * kWidth],
                                     const ThreadRows<kWidth, kSteps>& thread,
                                     const GridSums& memory) {
  const int channels = thread.of.channels;
  double* partials = memory.partials + thread.channel;
  sum_over_block(values, thread.of);
  if (thread.is_used && thread.row == 0) {
#pragma unroll
    for (int i = 0; i < 2 * kWidth; ++i) {
      partials[(2 * int64_t(blockIdx.x) + i / kWidth) * channels + i % kWidth] = values[i];
    }
  }
  if (!is_last_block(memory.counter)) return false;
#pragma unroll
  for (int i = 0; i < 2 * kWidth; ++i) values[i] = 0;
  if (thread.is_used) {
    for (int64_t block = thread.row; block < gridDim.x; block += thread.of.block_pixels) {
#pragma unroll
      for (int i = 0; i < 2 * kWidth; ++i) {
        values[i] += __ldcg(partials + (2 * block + i / kWidth) * channels + i % kWidth);
      }
    }
  }
  sum_over_block(values, thread.of);
  return thread.is_used && thread.row == 0;
}

}  // namespace preact_kernels::cuda
