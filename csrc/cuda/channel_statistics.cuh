// Mean and M2, the sum of squares around the mean, of each channel: first of the values that a
// thread stored, then of a block, then of the grid, merged in a fixed order.
#pragma once

#include "conv_tile.cuh"
#include "reduction.cuh"

namespace preact_kernels::cuda {

// Where the statistics of a tensor go, and the memory that the blocks of the grid share.
struct StatisticsOutput {
  float* partials;     // [blocks, 3 * channels + 1]: mean, its rounding error, M2, count; or null
  unsigned* finished;  // counts the blocks that wrote their partials; 0 before the kernel
  float *mean, *var;   // [channels]
};

// Statistics of the channels of one thread, merged tile by tile (Chan, Golub and LeVeque, 1979).
// A mean is stored as its distance from the thread's first value, which avoids rounding where the
// mean is large compared with the deviation. A tile sums distances from its own first value, so
// that a constant is exact and at most a few times M2 cancels.
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

  __device__ void end_tile() {
    if (tile_count == 0) return;
    const float total = count + tile_count, inv_count = 1 / tile_count, share = tile_count / total;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (count == 0) pivot[j] = tile_pivot[j];
      const float tile_mean = tile_pivot[j] - pivot[j] + sum[j] * inv_count;
      const float delta = tile_mean - mean[j];
      m2[j] += square[j] - sum[j] * sum[j] * inv_count + delta * delta * (count * share);
      // An infinite mean stays infinite, as in a sum.
      mean[j] = isfinite(delta) ? mean[j] + delta * share : mean[j] + tile_mean;
      sum[j] = square[j] = 0;
    }
    count = total;
    tile_count = 0;
  }
};

struct MergedStatistics {
  double count, mean, m2;
};

// Merges rows into statistics of channel threadIdx.x. row(index, c, mean, m2, count) reads channel
// c of a row. Every thread of the block must call this; `scratch` holds 4 doubles a thread.
template <class Row>
__device__ MergedStatistics merge_statistics(int rows, int channels, Row row, double* scratch) {
  const int slices = kThreads / channels;
  const int c = threadIdx.x % channels, slice = threadIdx.x / channels;
  double first_mean;
  float m2, count;
  row(0, c, first_mean, m2, count);
  const double pivot = isfinite(first_mean) ? first_mean : 0;
  double n = 0, sum = 0, from_pivot = 0, squares = 0;
  if (slice < slices) {
#pragma unroll 4
    for (int r = slice; r < rows; r += slices) {
      double mean;
      row(r, c, mean, m2, count);
      if (count == 0) continue;
      const double d = mean - pivot;
      n += count;
      sum += count * mean;
      from_pivot += count * d;
      squares += m2 + count * d * d;
    }
    double* own = scratch + 4 * threadIdx.x;
    own[0] = n, own[1] = sum, own[2] = from_pivot, own[3] = squares;
  }
  __syncthreads();
  MergedStatistics merged{0, 0, 0};
  if (slice == 0) {
    n = sum = from_pivot = squares = 0;
    for (int s = 0; s < slices; ++s) {
      const double* other = scratch + 4 * (s * channels + c);
      n += other[0], sum += other[1], from_pivot += other[2], squares += other[3];
    }
    const double left = squares - from_pivot * from_pivot / n;
    merged = {n, sum / n, left < 0 ? 0 : left};  // NaN stays NaN
  }
  __syncthreads();
  return merged;
}

// Bytes of shared memory that `finish_statistics` uses.
template <int kWidth>
constexpr int kStatisticsBytes = 4 * 8 * kThreads + (3 * kWidth + 1) * 4 * kThreads;

// Stores the statistics of a block; the last block stores those of the grid. Overwrites `shared`.
template <int kWidth>
__device__ void finish_statistics(const ThreadStatistics<kWidth>& own, const ThreadColumn& column,
                                  int channels, const StatisticsOutput& output,
                                  unsigned char* shared) {
  double* scratch = reinterpret_cast<double*>(shared);
  float* counts = reinterpret_cast<float*>(scratch + 4 * kThreads);
  float* means = counts + kThreads;
  float* pivots = means + kWidth * kThreads;
  float* squares = pivots + kWidth * kThreads;
  __syncthreads();
  if (column.is_active) {
    if (column.channel == 0) counts[column.lane] = own.count;
    const int at = column.lane * channels + column.channel;
    for (int j = 0; j < kWidth; ++j) {
      means[at + j] = own.mean[j], pivots[at + j] = own.pivot[j], squares[at + j] = own.m2[j];
    }
  }
  __syncthreads();
  const int c = threadIdx.x;
  const MergedStatistics of_block = merge_statistics(
      column.lanes, channels,
      [&](int row, int c, double& mean, float& m2, float& count) {
        const int at = row * channels + c;
        mean = double(pivots[at]) + means[at], m2 = squares[at], count = counts[row];
      },
      scratch);
  const int width = 3 * channels + 1;
  if (c < channels) {
    float* partial = output.partials + int64_t(blockIdx.x) * width;
    const float mean = float(of_block.mean);
    partial[c] = mean;
    partial[channels + c] = isfinite(mean) ? float(of_block.mean - mean) : 0;
    partial[2 * channels + c] = float(of_block.m2);
    if (c == 0) partial[3 * channels] = float(of_block.count);
  }
  if (!is_last_block(output.finished)) return;
  const MergedStatistics of_grid = merge_statistics(
      gridDim.x, channels,
      [&](int row, int c, double& mean, float& m2, float& count) {
        const float* partial = output.partials + int64_t(row) * width;
        mean = double(__ldcg(partial + c)) + __ldcg(partial + channels + c);
        m2 = __ldcg(partial + 2 * channels + c), count = __ldcg(partial + 3 * channels);
      },
      scratch);
  if (c < channels) {
    output.mean[c] = float(of_grid.mean);
    output.var[c] = float(of_grid.m2 / of_grid.count);
  }
}

}  // namespace preact_kernels::cuda
