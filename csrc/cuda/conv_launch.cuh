// Launch configuration of the convolutions of narrow channels: tiles, blocks, shared memory.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../args.h"
#include "bn_relu_conv_backward.cuh"
#include "bn_relu_conv_forward.cuh"

namespace preact_kernels::cuda {

struct ConvLaunch {
  TileGrid grid;
  int blocks, shared_bytes;
};

// Defined for BFloat16, Half and float, and for either half precision beside a float32 stream, each
// in its own file.
template <class Types>
ConvLaunch plan_bn_relu_conv_forward(const ConvSizes& conv);
template <class Types>
void launch_bn_relu_conv_forward(const ConvSizes& conv, const ConvLaunch& plan,
                                 const BnReluConvForward& params, cudaStream_t stream);
template <class Types>
ConvLaunch plan_bn_relu_conv_backward(const ConvSizes& conv, int tensors, bool of_input,
                                      bool of_weight, bool recomputes_g = false);
template <class Types>
void launch_bn_relu_conv_backward(const ConvSizes& conv, const ConvLaunch& plan,
                                  const BnReluConvBackward& params, bool of_weight,
                                  cudaStream_t stream);
// Launches; false, with nothing launched, where `for_recomputed_channels` has no kernel.
template <class Types>
bool launch_bn_relu_conv_backward_recomputed(const ConvSizes& conv, const ConvLaunch& plan,
                                             const BnReluConvBackwardRecomputed& params,
                                             bool of_weight, cudaStream_t stream);
// Of `count` convolutions of the same sizes.
template <class Types>
void launch_bn_relu_conv_weight_gradients(const ConvSizes& conv, const ConvLaunch& plan,
                                          const WeightGradients& params, int count,
                                          cudaStream_t stream);

// Calls a macro with the types that a file with PK_DTYPE defines launchers for.
#if defined(PK_FLOAT32_STREAM)
using StreamIn = ConvTypes<PK_DTYPE, float, PK_DTYPE>;
using StreamOut = ConvTypes<PK_DTYPE, PK_DTYPE, float>;
#define PK_FOR_TYPES_OF_FILE(CALL) CALL(StreamIn) CALL(StreamOut)
#elif defined(PK_DTYPE)
using OneDtype = ConvTypes<PK_DTYPE, PK_DTYPE, PK_DTYPE>;
#define PK_FOR_TYPES_OF_FILE(CALL) CALL(OneDtype)
#endif

// Calls `body` with the template argument CHANNELS of the kernel that recomputes g, and returns
// whether there is one for a convolution: the last of a bottleneck, which reads operands. There is
// none for inner width 64, whose blocks have a tile or two and would load one more weight for them,
// nor for 32 in float32, where one block would fit a multiprocessor in place of two.
template <class Types, class Body>
bool for_recomputed_channels(const ConvSizes& conv, const Body& body) {
  if constexpr (std::is_same_v<typename Types::X, typename Types::T>) {
    if (conv.taps() != 1 || conv.out_channels != 4 * conv.in_channels) return false;
    if (conv.in_channels == 16) return body(std::integral_constant<int, 16>()), true;
    if constexpr (sizeof(typename Types::T) == 2) {
      if (conv.in_channels == 32) return body(std::integral_constant<int, 32>()), true;
    }
  }
  return false;
}

// Tiles of pixels of a block that computes the gradient of a weight alone: more blocks would write
// more partial gradients. There are at least so many blocks, as far as there are tiles.
constexpr int kTilesOfWeightGradient = 16, kLeastBlocksOfWeightGradient = 8;

// The most channels of a 3x3 convolution: more weights leave no shared memory for tiles.
template <class T>
constexpr int kMostChannels3x3 = sizeof(T) == 4 ? 32 : 64;

// Calls `body` with the template argument C of the kernels: the channels of a 3x3 convolution, or
// 0.
template <class T, class Body>
auto for_channel_class(const ConvSizes& conv, const Body& body) {
  if (conv.taps() == 1) return body(std::integral_constant<int, 0>());
  if (conv.in_channels == 16) return body(std::integral_constant<int, 16>());
  if (kMostChannels3x3<T> == 32 || conv.in_channels == 32) {
    return body(std::integral_constant<int, 32>());
  }
  return body(std::integral_constant<int, kMostChannels3x3<T>>());
}

// A thread has at most kVectors of a tile of a 1x1 convolution.
template <class T, int C, int kVectors = kTileVectors<T, 0>>
TileGrid tile_grid(const ConvSizes& conv) {
  TileGrid grid{};
  if constexpr (C == 0) {
    const int most = int(std::max(conv.in_channels, conv.out_channels));
    grid.block_pixels = pixels_of_tile<T>(most, kVectors);
    grid.height = 1;
    grid.width = int(conv.pixels());
    grid.tiles = int((int64_t(grid.width) + grid.block_pixels - 1) / grid.block_pixels);
  } else {
    grid.height = int(conv.height), grid.width = int(conv.width);
    grid.tiles_down = (grid.height + Tile<C>::kHeight - 1) / Tile<C>::kHeight;
    grid.tiles_across = (grid.width + Tile<C>::kWidth - 1) / Tile<C>::kWidth;
    grid.tiles = int(conv.images * grid.tiles_down * grid.tiles_across);
    grid.tiles_of_image = Divisor(std::max(grid.tiles_down * grid.tiles_across, 1));
    grid.tiles_of_row = Divisor(std::max(grid.tiles_across, 1));
    grid.block_pixels = Tile<C>::kPixels;
  }
  return grid;
}

// Blocks of a persistent grid: at most `most` a multiprocessor, as its shared memory allows.
inline int persistent_blocks(int tiles, int shared_bytes, int most) {
  constexpr int kReserved = 1024;  // bytes that the system takes of each block
  const int fit = multiprocessor_shared_bytes() / (shared_bytes + kReserved);
  return std::min(tiles, multiprocessors() * std::clamp(fit, 1, most));
}

}  // namespace preact_kernels::cuda
