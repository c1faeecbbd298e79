// Per-channel sums over the pixels of a convolution's output, which thread blocks add to exact
// sums: for mean and variance, and for the gradients of a batch norm.
#pragma once

#include "conv_params.cuh"
#include "exact_sums.cuh"

namespace preact_kernels::cuda {

// Mean and M2, the sum of squares around the mean, of a thread's channels, merged tile by tile
// (Chan, Golub and LeVeque, 1979). A mean is stored as its distance from the thread's first value,
// which avoids rounding where the mean is large compared with the deviation. A tile sums distances
// from its own first value: a constant is exact, and at most a few times M2 cancels.
template <int kWidth>
struct ThreadStatistics {
  float count = 0, pivot[kWidth] = {}, mean[kWidth] = {}, m2[kWidth] = {};
  float tile_count = 0, tile_pivot[kWidth], sum[kWidth] = {}, square[kWidth] = {};

  __device__ void add(const float (&values)[kWidth]) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (tile_count == 0) tile_pivot[j] = isfinite(values[j]) ? values[j] : 0;
      const float d = values[j] - tile_pivot[j];
      sum[j] += d;
      square[j] += d * d;
    }
    tile_count += 1;
  }

  // Ends a tile if the next, of at most `vectors`, would make its sums long.
  __device__ void end_tiles(int vectors) {
    constexpr int kMost = 32;
    if (tile_count + vectors > kMost) end_tile();
  }

  __device__ void end_tile() {
    if (tile_count == 0) return;
    const float total = count + tile_count, inv_count = 1 / tile_count, share = tile_count / total;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (count == 0) pivot[j] = tile_pivot[j];
      const float tile_mean = tile_pivot[j] - pivot[j] + sum[j] * inv_count;
      const float delta = tile_mean - mean[j];
      m2[j] += square[j] - sum[j] * (sum[j] * inv_count) + delta * delta * (count * share);
      // An infinite mean stays infinite, as in a sum.
      mean[j] = isfinite(delta) ? mean[j] + delta * share : mean[j] + tile_mean;
      sum[j] = square[j] = 0;
    }
    count = total;
    tile_count = 0;
  }
};

// Bytes of shared memory that `add_statistics` uses.
template <int kWidth>
constexpr int kStatisticsBytes = 2 * 8 * kThreads + (3 * kWidth + 1) * 4 * kThreads;

// Adds the values of a thread block to `sums`. Every thread must call this. Overwrites `shared`.
template <int kWidth>
__device__ void add_statistics(const ThreadStatistics<kWidth>& own, const ThreadColumn& column,
                               int channels, const Accumulators& sums, unsigned char* shared) {
  double* scratch = reinterpret_cast<double*>(shared);  // 2 a thread
  float* counts = reinterpret_cast<float*>(scratch + 2 * kThreads);
  float* means = counts + kThreads;
  float* pivots = means + kWidth * kThreads;
  float* squares = pivots + kWidth * kThreads;
  __syncthreads();
  if (column.is_active) {
    if (column.channel == 0) counts[column.lane] = own.count;
    const int at = column.lane * channels + column.channel;
    store_floats(means + at, own.mean);
    store_floats(pivots + at, own.pivot);
    store_floats(squares + at, own.m2);
  }
  __syncthreads();
  // A slice of the threads merges every `slices`-th lane.
  const int slices = kThreads / channels;
  const int c = threadIdx.x % channels, slice = threadIdx.x / channels;
  double sum = 0, square_sum = 0;
  if (slice < slices) {
#pragma unroll 4
    for (int lane = slice; lane < column.lanes; lane += slices) {
      const int at = lane * channels + c;
      const double n = counts[lane], mean = double(pivots[at]) + means[at];
      sum += n * mean;
      square_sum += n * mean * mean + squares[at];
    }
  }
  scratch[2 * threadIdx.x] = sum, scratch[2 * threadIdx.x + 1] = square_sum;
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * channels; i += kThreads) {
    double total = 0;
    for (int s = 0; s < slices; ++s) total += scratch[2 * s * channels + i];
    add_exact(sums, i / 2, i % 2, total);
  }
}

// Adds the two sums of a thread block's threads to `sums`. `shared` has room for all of them.
template <int kWidth>
__device__ void add_sums(const ThreadColumn& column, int channels, float (&first)[kWidth],
                         float (&second)[kWidth], const Accumulators& sums, float* shared) {
  // A warp with whole pixels adds them up and stores one row. Else every lane of the column stores
  // one.
  const int lane = threadIdx.x % 32, vectors = channels / kWidth;
  const bool has_whole_pixels = 32 % vectors == 0;
  if (has_whole_pixels) {
    for (int offset = 16; offset >= vectors; offset /= 2) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        first[j] += __shfl_xor_sync(0xffffffffu, first[j], offset);
        second[j] += __shfl_xor_sync(0xffffffffu, second[j], offset);
      }
    }
  }
  const int rows = has_whole_pixels ? kWarps : column.lanes;
  if (has_whole_pixels ? lane < vectors : column.is_active) {
    const int row = has_whole_pixels ? threadIdx.x / 32 : column.lane;
    float* to = shared + row * 2 * channels + column.channel;
    store_floats(to, first);
    store_floats(to + channels, second);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * channels; i += kThreads) {
    float sum = 0;
#pragma unroll 8
    for (int row = 0; row < rows; ++row) sum += shared[row * 2 * channels + i];
    add_exact(sums, i % channels, i / channels, sum);
  }
}

}  // namespace preact_kernels::cuda
