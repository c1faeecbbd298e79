// Launch limits of the backward: shared memory and thread blocks per multiprocessor.
#pragma once

#include "conv_params.cuh"
#include "weight_gradient.cuh"

namespace preact_kernels::cuda {

// The layout of a thread block's shared memory.
template <class Types, int C>
struct BackwardShared {
  using T = typename Types::T;
  static constexpr int kWidth = kFullWidth<T>;
  // x of two tiles: a tile's x is read again after the products, while the next tile's arrives.
  static constexpr int kXParts = kParts<typename Types::X, kWidth>;
  using XAhead = VectorsAhead<typename Types::X, kWidth>;
  // Vectors in this order: dy or the step's x; g; skip.
  static constexpr int kDyParts = kParts<typename Types::Y, kWidth>;
  static constexpr int kSkip = kDyParts + kParts<T, kWidth>;
  static constexpr int kAllParts = kSkip + kDyParts;
  using DyAhead = VectorsAhead<typename Types::Y, kWidth>;
  using GAhead = VectorsAhead<T, kWidth>;

  // Offsets in bytes.
  int weights, dy, activated, da, norm, step, x_ahead, dy_ahead;
  int bytes;
  int dy_parts;  // parts of a vector in dy_ahead

  // `tensors` counts the tensors that dy is computed from: g, and the step's x and skip.
  __host__ __device__ BackwardShared(int tile_pixels, int in_channels, int out_channels,
                                     int tensors, bool of_input, bool of_weight) {
    const int in_row = in_channels * int(sizeof(T)) + 16;
    const int out_row = out_channels * int(sizeof(T)) + 16;
    const int pixels = Tile<C>::pixels(tile_pixels);
    const int halo_pixels = Tile<C>::halo_pixels(tile_pixels);
    weights = 0;
    dy = weights + (of_input ? Tile<C>::kTaps * out_channels * in_row : 0);
    activated = dy + halo_pixels * out_row;
    da = activated + pixels * in_row;
    norm = da + (of_input ? pixels * in_row : 0);
    step = norm + Normalisation<kWidth>::kRows * in_channels * 4;
    x_ahead = step + InputGradient<kWidth>::kRows * out_channels * 4;
    dy_ahead = x_ahead + XAhead::bytes(pixels, in_channels, 2 * kXParts);
    dy_parts = tensors == 1 ? kDyParts : tensors == 2 ? kSkip : kAllParts;
    bytes = dy_ahead + DyAhead::bytes(halo_pixels, out_channels, dy_parts);
    // After the last tile: the sums of every thread, or the weight gradients of warps that share a
    // group.
    const int groups = out_channels / 16 * (in_channels / 16);
    const int slices = WeightGradient<T, C, 1>::slices_of(groups);
    const bool warps_share = of_weight && slices > 1;
    const int shared_values = slices * Tile<C>::kTaps * in_channels * out_channels;
    const int thread_sums = of_input ? 2 * kWidth * kThreads : 0;
    const int least =
        4 * (warps_share && shared_values > thread_sums ? shared_values : thread_sums);
    if (bytes < least) bytes = least;
  }
};

// Bytes per multiprocessor that fit two thread blocks of a 3x3 convolution of 16 or 32 channels in
// half precision. 9.0 and 10.0 have them; 8.0 has 164 KB, 8.6 and 12.0 have 100 KB.
constexpr int kLargeSharedBytes = 228 * 1024;

// Thread blocks per multiprocessor, which limits the registers. 64 channels leave shared memory for
// one.
template <class Types, int C, int GROUPS>
constexpr int backward_thread_blocks(bool has_large_shared_memory) {
  if (C == 0) return GROUPS <= 2 ? 2 : 1;
  if (C == 64) return 1;
  const bool is_small = sizeof(typename Types::T) == 2 && !Types::kHasStream;
  return GROUPS == 0 || (is_small && has_large_shared_memory) ? 2 : 1;
}

// Thread blocks per multiprocessor of the GPU that is compiled for; the host asks its GPU.
#if defined(__CUDA_ARCH__)
constexpr bool kHasLargeSharedMemory = __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200;
#else
constexpr bool kHasLargeSharedMemory = true;
#endif
template <class Types, int C, int GROUPS>
constexpr int kBackwardThreadBlocks =
    backward_thread_blocks<Types, C, GROUPS>(kHasLargeSharedMemory);

// Thread blocks per multiprocessor for the weight gradient alone. Sums of eight groups fit two
// thread blocks if the channels are constant.
template <class Types, int C, int GROUPS, int IN>
constexpr int kWeightGradientThreadBlocks =
    C == 0 && IN != 0 ? 2 : kBackwardThreadBlocks<Types, C, GROUPS>;

// The most vectors of a thread in a tile. Fewer for a 1x1 convolution with a float32 stream, whose
// vectors have two parts: two thread blocks fit.
template <class Types, int C, int GROUPS>
constexpr int kBackwardVectors =
    C == 0 && Types::kHasStream && GROUPS == 2 ? 3 : kTileVectors<typename Types::T, C>;

// Groups of a warp for the weight gradient of a 1x1 convolution: GROUPS of its kernels.
__host__ __device__ constexpr int groups_of_warp(int in_channels, int out_channels) {
  return in_channels / 16 * (out_channels / 16) > 2 * kWarps ? 8 : 2;
}

// Pixels in a tile of a 1x1 convolution, in all kernels of its backward.
template <class Types>
__host__ __device__ constexpr int backward_pixels(int in_channels, int out_channels) {
  const int vectors = groups_of_warp(in_channels, out_channels) == 2
                          ? kBackwardVectors<Types, 0, 2>
                          : kBackwardVectors<Types, 0, 8>;
  return pixels_of_tile<typename Types::T>(in_channels, out_channels, vectors);
}

}  // namespace preact_kernels::cuda
