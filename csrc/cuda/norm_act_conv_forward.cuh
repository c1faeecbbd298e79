// BN-ReLU-Conv of narrow channels, forward: y = conv(relu(p)) [+ residual] and y's statistics.
#pragma once

#include "channel_statistics.cuh"

namespace preact_kernels::cuda {

// The layout of a thread block's shared memory.
template <class Types, int C>
struct ForwardShared {
  using T = typename Types::T;
  static constexpr int kWidth = kFullWidth<T>;
  using XAhead = VectorsAhead<typename Types::X, kWidth>;
  using ResidualAhead = VectorsAhead<typename Types::Y, kWidth>;

  int weights, activated, sums, norm, x_ahead, residual_ahead;  // offsets in bytes
  int bytes;

  __host__ __device__ ForwardShared(int tile_pixels, int in_channels, int out_channels) {
    const int row = in_channels * int(sizeof(T)) + 16;
    const int pixels = Tile<C>::pixels(tile_pixels);
    const int halo_pixels = Tile<C>::halo_pixels(tile_pixels);
    weights = 0;
    activated = weights + Tile<C>::kTaps * out_channels * row;
    sums = activated + halo_pixels * row;
    norm = sums + pixels * (out_channels + kSumsPadding) * 4;
    x_ahead = norm + Normalisation<kWidth>::kRows * in_channels * 4;
    residual_ahead = x_ahead + XAhead::bytes(halo_pixels, in_channels);
    bytes = residual_ahead + ResidualAhead::bytes(pixels, out_channels);
    constexpr int kLeast = kStatisticsBytes<kWidth>;
    if (bytes < kLeast) bytes = kLeast;
  }
};

// Thread blocks per multiprocessor. Shared memory is the limit for 64 channels, registers for
// others.
template <int C>
constexpr int kForwardThreadBlocks = C == 64 ? 1 : 2;

// y[p][k] = the sum over taps and c of relu(p)[p at tap][c] * weight[k][c][tap] [+ residual[p][k]].
// A persistent thread block owns every gridDim.x-th tile of pixels with all channels. The weight
// stays in shared memory. While a tile is multiplied, the x of the next tile and its own residual
// are copied. IN and OUT are the channels, or 0 if they are not constant.
template <class Types, int C, int IN = C, int OUT = C>
__global__ void __launch_bounds__(kThreads, kForwardThreadBlocks<C>)
    norm_act_conv_forward_kernel(const __grid_constant__ NormActConvForward conv) {
  using T = typename Types::T;
  using X = typename Types::X;
  using Y = typename Types::Y;
  using Shared = ForwardShared<Types, C>;
  constexpr int kWidth = kFullWidth<T>;
  constexpr int kTaps = Tile<C>::kTaps;
  const int channels = IN ? IN : conv.in_channels, out_channels = OUT ? OUT : conv.out_channels;
  const int tile_pixels =
      IN ? pixels_of_tile<T>(IN, OUT, kTileVectors<T, 0>) : conv.grid.tile_pixels;
  const int pixels = Tile<C>::pixels(tile_pixels);
  const int halo_pixels = Tile<C>::halo_pixels(tile_pixels);
  const int pitch = channels + kWidth, sums_pitch = out_channels + kSumsPadding;
  const Shared shared(tile_pixels, channels, out_channels);
  unsigned char* memory = dynamic_shared();
  T* weights = reinterpret_cast<T*>(memory + shared.weights);
  T* activated = reinterpret_cast<T*>(memory + shared.activated);
  float* sums = reinterpret_cast<float*>(memory + shared.sums);
  float* norm = reinterpret_cast<float*>(memory + shared.norm);
  const typename Shared::XAhead x_ahead(memory + shared.x_ahead);
  const typename Shared::ResidualAhead residual_ahead(memory + shared.residual_ahead);

  const ThreadColumn in(channels, kWidth), out(out_channels, kWidth);
  const X* x = static_cast<const X*>(conv.x) + in.channel;
  const Y* residual = static_cast<const Y*>(conv.residual) + out.channel;
  const bool has_residual = conv.residual != nullptr;
  Y* y = static_cast<Y*>(conv.y) + out.channel;
  ThreadStatistics<kWidth> statistics;

  // Both start a group of copies, which may be empty.
  const auto copy_x = [&](int index) {
    const Tile<C> tile(conv.grid, index);
    if (index < conv.grid.tiles) {
      in.for_pixels<kHaloVectors<T, C>>(halo_pixels, [&](int i, int p) {
        const int64_t pixel = tile.halo_pixel(p);
        x_ahead.copy(i, x + pixel * channels, pixel >= 0);
      });
    }
    cp_async_commit();
  };
  const auto copy_residual = [&](int index) {
    const Tile<C> tile(conv.grid, index);
    if (has_residual && index < conv.grid.tiles) {
      out.for_pixels<kTileVectors<T, C>>(pixels, [&](int i, int p) {
        const int64_t pixel = tile.pixel(p);
        residual_ahead.copy(i, residual + pixel * out_channels, pixel >= 0);
      });
    }
    cp_async_commit();
  };
  // Short loads come before copies, which would delay them.
  NormChannel norm_channel(conv.norm, channels);
  load_weights<T, kTaps>(static_cast<const T*>(conv.weight), weights, out_channels, channels);
  wait_for_predecessors();
  let_dependents_start();
  norm_channel.load_sums(conv.norm.moments);
  const int thread_blocks = gridDim.x;
  copy_x(blockIdx.x);
  copy_residual(blockIdx.x);
  Normalisation<kWidth>::store(conv.norm, norm_channel, channels, norm);
  __syncthreads();

  for (int index = blockIdx.x; index < conv.grid.tiles; index += thread_blocks) {
    const Tile<C> tile(conv.grid, index);
    cp_async_wait<1>();  // x is here
    if (in.is_active) {
      const Normalisation<kWidth> in_norm(FromShared{}, norm, channels, in.channel);
#pragma unroll
      for (int i = 0; i < kHaloVectors<T, C>; ++i) {
        const int p = in.lane + i * in.lanes;
        if (p >= halo_pixels) break;
        // The padding of act(p) is zero.
        FullVector<T> a{};
        if (tile.halo_pixel(p) >= 0) a = in_norm.template activated<T>(x_ahead[i]);
        a.store(activated + p * pitch + in.channel);
      }
    }
    __syncthreads();  // act(p) is complete
    copy_x(index + thread_blocks);
    multiply_weights<T, C, false>(activated, weights, pixels, channels, out_channels, sums,
                                  sums_pitch);
    __syncthreads();     // the sums are complete, and act(p) may be overwritten
    cp_async_wait<1>();  // the residual is here
    if (out.is_active) {
#pragma unroll
      for (int i = 0; i < kTileVectors<T, C>; ++i) {
        const int p = out.lane + i * out.lanes;
        if (p >= pixels) break;
        const int64_t pixel = tile.pixel(p);
        if (pixel < 0) continue;
        Vector<Y, kWidth> stored;
        float values[kWidth];
        load_floats(values, sums + p * sums_pitch + out.channel);
        if (has_residual) {
          float more[kWidth];
          residual_ahead[i].unpack(more);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) values[j] += more[j];
        }
        stored.pack(values);
        stored.store(y + pixel * out_channels);
        if (conv.statistics.words != nullptr) {
          stored.unpack(values);
          statistics.add(values);
        }
      }
      statistics.end_tiles(kTileVectors<T, C>);
    }
    copy_residual(index + thread_blocks);
  }
  cp_async_wait<0>();  // before shared memory gets another use
  if (conv.statistics.words != nullptr) {
    statistics.end_tile();
    add_statistics(statistics, out, out_channels, conv.statistics, memory);
  }
}

}  // namespace preact_kernels::cuda
