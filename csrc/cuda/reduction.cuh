// Sums over all pixels, in float64. The order depends only on the shape and the device.
//
// Each thread adds its pixels, and each thread block its threads, through shared memory: a part of
// the sums. An integer counter tells which thread block of a column of the grid finishes last: that
// thread block adds the parts in order. No sum is atomic, so two runs give the same bits.
//
// The counters are zeroed before each launch. Counters that the last thread block resets could not
// be kept between calls: two streams, or a stream and the replay of a CUDA graph that was captured
// on it, may run the kernel at the same time.
#pragma once

#include "pixel_rows.cuh"

namespace preact_kernels::cuda {

// Memory that the thread blocks of a grid share.
struct GridSums {
  double* partials;   // [parts, 2, channels]
  unsigned* counter;  // [thread blocks in y], zeros before the kernel
};

// Whether this thread block is the last of `thread_blocks` that count. It then sees all writes of
// the others. Every thread must call it.
__device__ inline bool is_last_of(unsigned thread_blocks, unsigned* counter) {
  __threadfence();  // writes of this thread come before the count
  __syncthreads();
  const bool is_last = threadIdx.x == 0 && atomicAdd(counter, 1u) == thread_blocks - 1;
  if (!__syncthreads_or(is_last)) return false;
  __threadfence();
  return true;
}

// `is_last_of` for the thread blocks of a column of the grid.
__device__ inline bool is_last_thread_block(unsigned* counter) {
  return is_last_of(gridDim.x, counter + blockIdx.y);
}

// Bytes of shared memory that `sum_over_thread_block` uses for each value.
constexpr size_t kThreadBlockSumBytes = kThreads * sizeof(double);

// Adds `values` over the threads of a thread block with the same column. `row` is the thread's. Row
// 0 gets the sums.
template <int kValues>
__device__ inline void sum_over_thread_block(double (&values)[kValues], int row,
                                             const PixelRows& rows) {
  double* shared = reinterpret_cast<double*>(dynamic_shared());  // [kValues, kThreads]
  const int thread = threadIdx.x;
  sum_over_rows(values, row, rows, shared);
#pragma unroll
  for (int i = 0; i < kValues; ++i) values[i] = shared[i * kThreads + thread];
}

// Stores a part of the sums of two numbers of each channel: values[i] and values[kWidth + i] for
// channel i of the thread.
template <int kWidth, int kSteps>
__device__ inline void store_part(double (&values)[2 * kWidth],
                                  const ThreadRows<kWidth, kSteps>& thread, const GridSums& memory,
                                  unsigned part) {
  sum_over_thread_block(values, thread.row, thread.of);
  if (!thread.is_used || thread.row != 0) return;
  double* to = memory.partials + 2 * int64_t(part) * thread.of.channels + thread.channel;
#pragma unroll
  for (int i = 0; i < 2 * kWidth; ++i) to[i / kWidth * thread.of.channels + i % kWidth] = values[i];
}

// Adds the parts that the grid has stored. Returns true in the threads that get the sums: one per
// column, in the last thread block.
template <int kWidth, int kSteps>
__device__ inline bool sum_over_parts(double (&values)[2 * kWidth],
                                      const ThreadRows<kWidth, kSteps>& thread,
                                      const GridSums& memory, unsigned parts) {
  if (!is_last_thread_block(memory.counter)) return false;
  const int channels = thread.of.channels;
  const double* partials = memory.partials + thread.channel;
#pragma unroll
  for (int i = 0; i < 2 * kWidth; ++i) values[i] = 0;
  if (thread.is_used) {
    for (int64_t part = thread.row; part < parts; part += thread.of.thread_block_pixels) {
#pragma unroll
      for (int i = 0; i < 2 * kWidth; ++i) {
        values[i] += __ldcg(partials + (2 * part + i / kWidth) * channels + i % kWidth);
      }
    }
  }
  sum_over_thread_block(values, thread.row, thread.of);
  return thread.is_used && thread.row == 0;
}

// Adds two numbers of each channel over the grid: a thread block has one part.
template <int kWidth, int kSteps>
__device__ inline bool sum_over_grid(double (&values)[2 * kWidth],
                                     const ThreadRows<kWidth, kSteps>& thread,
                                     const GridSums& memory) {
  store_part(values, thread, memory, blockIdx.x);
  return sum_over_parts(values, thread, memory, gridDim.x);
}

}  // namespace preact_kernels::cuda
