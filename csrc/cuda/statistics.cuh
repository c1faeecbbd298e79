// Mean and biased variance of each channel, in one pass.
//
// The few pixels that a thread holds at a time are a tile: its mean and its M2, the sum of squares
// about that mean, come out of two passes over registers. Tiles are merged as sums of n*d and of
// M2 + n*d*d, in float64, for d = (mean of the tile) - pivot. The pivot of a channel, the mean of
// some pixels far apart, is the same for all tiles: means however far from zero cancel nothing, and
// one outlier among those pixels does little.
#pragma once

#include "reduction.cuh"

namespace preact_kernels::cuda {

constexpr int kStatisticsSteps = 4;   // pixels of a tile
constexpr int kStatisticsBlocks = 2;  // a multiprocessor

// A block has few channels, so that a last block has little to add up.
template <class T>
Grid grid_of_statistics(int64_t pixels, int64_t channels, bool vectors) {
  return grid_for(pixels, channels, vectors ? kFullWidth<T> : 1, kStatisticsSteps, 8,
                  kStatisticsBlocks);
}

// What a kernel that yields statistics of its output is given.
struct StatisticsMemory {
  GridSums sums;
  float* mean;  // [channels]; null where no statistics are wanted
  float* var;   // [channels], biased
};

template <int kWidth>
struct Statistics {
  float pivot[kWidth];
  double sums[2 * kWidth];

  // value(to, at): the values of the thread's channels of the pixel that begins at element `at`.
  template <class Thread, class Value>
  __device__ Statistics(const Thread& thread, const Value& value) {
    constexpr int kSamples = 8;
    const int64_t step = thread.of.pixels / kSamples * thread.of.channels;
    float total[kWidth] = {}, sample[kWidth];
    if (thread.is_used) {
#pragma unroll
      for (int k = 0; k < kSamples; ++k) {
        value(sample, k * step + thread.channel);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) total[i] += sample[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float mean = total[i] * (1.0f / kSamples);
      pivot[i] = isfinite(mean) ? mean : 0.0f;
      sums[i] = sums[kWidth + i] = 0;
    }
  }

  // One more tile: `count` > 0 pixels.
  template <class T, int kSteps>
  __device__ void add(const Vector<T, kWidth> (&tile)[kSteps], int count) {
    const float n = static_cast<float>(count), inv_n = 1.0f / n;
    float x[kSteps][kWidth];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) tile[s].unpack(x[s]);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      float sum = 0;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) sum += s < count ? x[s][i] : 0.0f;
      const float mean = sum * inv_n;
      float rest = 0, squares = 0;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const float centred = s < count ? x[s][i] - mean : 0.0f;
        rest += centred;
        squares += centred * centred;
      }
      // What rounding left in the mean. An infinite one leaves NaN, and must stay what it is.
      const float correction = isinf(mean) ? 0.0f : rest * inv_n;
      const float d = (mean - pivot[i]) + correction;
      sums[i] += n * d;
      sums[kWidth + i] += n * d * d + (squares - rest * correction);
    }
  }

  // Every thread of the grid must call it; the last block writes mean and variance.
  template <int kSteps>
  __device__ void finish(const ThreadRows<kWidth, kSteps>& thread, const StatisticsMemory& memory) {
    if (!sum_over_grid(sums, thread, memory.sums)) return;
    const double inv_count = 1.0 / static_cast<double>(thread.of.pixels);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const double d = sums[i] * inv_count;
      const double var = sums[kWidth + i] * inv_count - d * d;
      memory.mean[thread.channel + i] = static_cast<float>(pivot[i] + d);
      memory.var[thread.channel + i] = static_cast<float>(var < 0 ? 0 : var);  // NaN stays
    }
  }
};

}  // namespace preact_kernels::cuda
