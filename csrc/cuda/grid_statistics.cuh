// Mean and biased variance of each channel, in one pass.
//
// A tile is the few pixels that a thread holds at a time. Its mean and M2, the sum of squares
// around the mean, are computed in two passes over registers. Tiles are merged in float64, as sums
// of n*d and of M2 + n*d*d for d = (mean of the tile) - pivot. The pivot of a channel is the mean
// of some distant pixels: a large mean causes no cancellation, and an outlier among them has little
// effect. Convolutions use channel_statistics.cuh: their threads have no registers for float64
// sums.
#pragma once

#include "reduction.cuh"

namespace preact_kernels::cuda {

constexpr int kStatisticsSteps = 4;         // pixels of a tile
constexpr int kStatisticsThreadBlocks = 2;  // per multiprocessor

// A thread block has few channels: the last thread block adds few partial sums.
inline Grid grid_of_statistics(const ImageSizes& size, int width) {
  return grid_for(size, width, kStatisticsSteps, 8, kStatisticsThreadBlocks);
}

// The statistics that a kernel writes, and the memory that its thread blocks share.
struct StatisticsMemory {
  GridSums sums;
  float* mean;  // [channels]; null if statistics are not wanted
  float* var;   // [channels], biased
};

template <int kWidth>
struct GridStatistics {
  float pivot[kWidth];
  double sums[2 * kWidth];

  // value(to, at) reads the thread's channels of the pixel that begins at element `at`.
  template <class Thread, class Value>
  __device__ GridStatistics(const Thread& thread, const Value& value) {
    constexpr int kSamples = 8;
    const int64_t step = thread.of.pixels / kSamples * thread.of.channels;
    float total[kWidth] = {}, largest[kWidth] = {}, sample[kWidth];
    if (thread.is_used) {
#pragma unroll
      for (int k = 0; k < kSamples; ++k) {
        value(sample, k * step + thread.channel);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          total[i] += sample[i];
          largest[i] = fmaxf(largest[i], fabsf(sample[i]));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      // Clears the last bits of the pivot relative to the samples: differences from it are exact,
      // or are not all rounded in one direction. For large samples it keeps all bits: squares of
      // differences might not be finite.
      const float grid = largest[i] < 0x1p40f ? 256 * largest[i] : 0.0f;
      const float rounded = (total[i] * (1.0f / kSamples) + grid) - grid;
      pivot[i] = isfinite(rounded) ? rounded : 0.0f;
    }
    clear();
  }

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < 2 * kWidth; ++i) sums[i] = 0;
  }

  // Adds a tile of `count` > 0 pixels.
  template <class T, int kSteps>
  __device__ void add(const Vector<T, kWidth> (&tile)[kSteps], int count) {
    count == kSteps ? add_pixels<true>(tile, kSteps) : add_pixels<false>(tile, count);
  }

  // Every thread of the grid must call this. The last thread block writes mean and variance.
  template <int kSteps>
  __device__ void finish(const ThreadRows<kWidth, kSteps>& thread, const StatisticsMemory& memory) {
    if (!sum_over_grid(sums, thread, memory.sums)) return;
    const double inv_count = 1.0 / static_cast<double>(thread.of.pixels);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const double d = sums[i] * inv_count;
      const double var = sums[kWidth + i] * inv_count - d * d;
      memory.mean[thread.channel + i] = static_cast<float>(pivot[i] + d);
      memory.var[thread.channel + i] = static_cast<float>(var < 0 ? 0 : var);  // NaN stays NaN
    }
  }

 private:
  template <bool kIsWhole, class T, int kSteps>
  __device__ void add_pixels(const Vector<T, kWidth> (&tile)[kSteps], int count) {
    const float n = static_cast<float>(count), inv_n = 1.0f / n;
    float x[kSteps][kWidth];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) tile[s].unpack(x[s]);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      float sum = 0;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) sum += kIsWhole || s < count ? x[s][i] : 0.0f;
      const float mean = sum * inv_n;
      float rest = 0, squares = 0;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const float centred = kIsWhole || s < count ? x[s][i] - mean : 0.0f;
        rest += centred;
        squares += centred * centred;
      }
      // The rounding error of the mean; 0 for an infinite mean, which would give NaN.
      const float correction = isinf(mean) ? 0.0f : rest * inv_n;
      const float d = (mean - pivot[i]) + correction;
      sums[i] += n * d;
      sums[kWidth + i] += n * d * d + (squares - rest * correction);
    }
  }
};

}  // namespace preact_kernels::cuda
