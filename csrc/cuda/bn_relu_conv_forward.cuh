// BN-ReLU-Conv of narrow channels, forward: y = conv(relu(p)) [+ residual] and y's statistics.
#pragma once

#include "channel_statistics.cuh"

namespace preact_kernels::cuda {

// Activations are dense in NHWC order and aligned to 16 bytes, statistics [channels].
struct BnReluConvForward {
  const void* x;
  NormPointers norm;
  const void* weight;    // [K][taps][C]
  const void* residual;  // of the shape of y, or null
  void* y;
  Accumulators statistics;  // of y: sums of the values and of their squares; or none
  int in_channels, out_channels;
  TileGrid grid;
  bool is_dependent;  // as `launch` says
};

template <class T, int C>
int forward_shared_bytes(const TileGrid& grid, int in_channels, int out_channels) {
  const int operands = (Tile<C>::kTaps * out_channels + Tile<C>::halo_pixels(grid)) *
                       (in_channels * int(sizeof(T)) + 16);
  const int sums = Tile<C>::pixels(grid) * (out_channels + kSumsPadding) * 4;
  const int norm = Normalisation<kFullWidth<T>>::kRows * in_channels * 4;
  const int bytes = operands + sums + norm, least = kStatisticsBytes<kFullWidth<T>>;
  return bytes > least ? bytes : least;
}

// Blocks of a multiprocessor. Shared memory is the limit for 64 channels, registers for others.
template <int C>
constexpr int kForwardBlocks = C == 64 ? 1 : 2;

// y[p][k] = the sum over taps and c of relu(p)[p at tap][c] * weight[k][c][tap] [+ residual[p][k]].
// A block owns every gridDim.x-th tile of pixels with all channels. The weight stays in shared
// memory.
template <class T, int C>
__global__ void __launch_bounds__(kThreads, kForwardBlocks<C>)
    bn_relu_conv_forward_kernel(const BnReluConvForward conv) {
  constexpr int kWidth = kFullWidth<T>;
  constexpr int kTaps = Tile<C>::kTaps;
  const int channels = C ? C : conv.in_channels, out_channels = C ? C : conv.out_channels;
  const int pixels = Tile<C>::pixels(conv.grid), halo_pixels = Tile<C>::halo_pixels(conv.grid);
  const int pitch = channels + kWidth, sums_pitch = out_channels + kSumsPadding;
  T* weights = reinterpret_cast<T*>(dynamic_shared());
  T* activation = weights + kTaps * out_channels * pitch;
  float* sums = reinterpret_cast<float*>(activation + halo_pixels * pitch);
  float* norm = sums + pixels * sums_pitch;

  const ThreadColumn in(channels, kWidth), out(out_channels, kWidth);
  const T* x = static_cast<const T*>(conv.x) + in.channel;
  const T* residual = static_cast<const T*>(conv.residual);
  T* y = static_cast<T*>(conv.y) + out.channel;
  ThreadStatistics<kWidth> statistics;

  // Loads the x of the next tile while the current one is multiplied.
  FullVector<T> ahead[kHaloVectors<T, C>];
  const auto load_x = [&](int index) {
    const Tile<C> tile(conv.grid, index);
#pragma unroll
    for (int i = 0; i < kHaloVectors<T, C>; ++i) {
      const int p = in.lane + i * in.lanes;
      const bool is_own = in.is_active && p < halo_pixels;
      const int64_t pixel = is_own ? tile.halo_pixel(p) : -1;
      if (pixel >= 0) ahead[i].load(x + pixel * channels);
    }
  };
  const int blocks = gridDim.x;
  load_weights<T, kTaps>(static_cast<const T*>(conv.weight), weights, out_channels, channels);
  wait_for_predecessors();
  let_dependents_start();
  if (int(blockIdx.x) < conv.grid.tiles) load_x(blockIdx.x);
  Normalisation<kWidth>::prepare(conv.norm, channels, norm);
  __syncthreads();

  for (int index = blockIdx.x; index < conv.grid.tiles; index += blocks) {
    const Tile<C> tile(conv.grid, index);
    if (in.is_active) {
      const Normalisation<kWidth> in_norm(FromShared{}, norm, channels, in.channel);
#pragma unroll
      for (int i = 0; i < kHaloVectors<T, C>; ++i) {
        const int p = in.lane + i * in.lanes;
        if (p >= halo_pixels) break;
        // The padding is zero after the activation.
        const bool exists = tile.halo_pixel(p) >= 0;
        FullVector<T> a{};
        if (exists) a = in_norm.template activation<T>(ahead[i]);
        a.store(activation + p * pitch + in.channel);
      }
    }
    __syncthreads();  // the activation is complete
    if (index + blocks < conv.grid.tiles) load_x(index + blocks);
    multiply_weights<T, C, false>(activation, weights, pixels, channels, out_channels, sums);
    __syncthreads();  // the sums are complete, and the activation may be overwritten
    if (out.is_active) {
#pragma unroll
      for (int i = 0; i < kTileVectors<T, C>; ++i) {
        const int p = out.lane + i * out.lanes;
        if (p >= pixels) break;
        const int64_t pixel = tile.pixel(p);
        if (pixel < 0) continue;
        FullVector<T> stored;
        float values[kWidth];
        load_floats(values, sums + p * sums_pitch + out.channel);
        if (residual != nullptr) {
          float more[kWidth];
          stored.load(residual + pixel * out_channels + out.channel);
          stored.unpack(more);
          for (int j = 0; j < kWidth; ++j) values[j] += more[j];
        }
        stored.pack(values);
        stored.store(y + pixel * out_channels);
        if (conv.statistics.words != nullptr) {
          stored.unpack(values);
          statistics.add(values);
        }
      }
      statistics.end_tile();
    }
  }
  if (conv.statistics.words != nullptr) {
    add_statistics(statistics, out, out_channels, conv.statistics, dynamic_shared());
  }
}

}  // namespace preact_kernels::cuda
