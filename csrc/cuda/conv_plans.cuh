// The plans of conv_launch.cuh for PK_DTYPE, which the including file defines; with a float32
// stream if it defines PK_FLOAT32_STREAM.
#pragma once

#include <algorithm>
#include <type_traits>

#include "conv_launch.cuh"
#include "norm_act_conv_backward.cuh"
#include "norm_act_conv_forward.cuh"

namespace preact_kernels::cuda {

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

// Calls `body` with the template arguments C and GROUPS of the kernel.
template <class Types, class Body>
auto for_weight_groups(const ConvSizes& conv, const Body& body) {
  return for_channel_class<typename Types::T>(conv, [&](auto c) {
    constexpr int C = decltype(c)::value;
    if constexpr (C == 0) {
      const int groups = conv.in_channels / 16 * (conv.out_channels / 16);
      if (groups > 2 * kWarps) return body(c, std::integral_constant<int, 8>());
    }
    return body(c, std::integral_constant<int, C == 16 || C == 32 ? 1 : 2>());
  });
}

// Calls `body` with the template argument CHANNELS of the kernel that recomputes g, if the
// convolution has one: the last of a bottleneck. Inner width 64 has none: its blocks have a tile or
// two and would load another weight for them. Nor has 32 in float32: one block per multiprocessor
// would fit instead of two.
template <class Types, class Body>
void for_recomputed_channels(const ConvSizes& conv, const Body& body) {
  // In a run, only the first unit of a block can have dtypes X and T that differ, and it never
  // recomputes g. The condition keeps kernels that nothing calls out of the library.
  if constexpr (std::is_same_v<typename Types::X, typename Types::T>) {
    if (conv.taps() != 1 || conv.out_channels != 4 * conv.in_channels) return;
    if (conv.in_channels == 16) body(std::integral_constant<int, 16>());
    if constexpr (sizeof(typename Types::T) == 2) {
      if (conv.in_channels == 32) body(std::integral_constant<int, 32>());
    }
  }
}

template <class Types>
ForwardPlan plan_norm_act_conv_forward(const ConvSizes& conv) {
  return for_channel_class<typename Types::T>(conv, [&](auto c) {
    constexpr int C = decltype(c)::value;
    ForwardPlan plan{tile_grid<typename Types::T, C>(conv)};
    plan.shared_bytes =
        ForwardShared<Types, C>(plan.grid, conv.in_channels, conv.out_channels).bytes;
    plan.blocks = persistent_blocks(plan.grid.tiles, plan.shared_bytes, kForwardBlocks<C>);
    plan.kernel = norm_act_conv_forward_kernel<Types, C>;
    return plan;
  });
}

// Tiles per block of a kernel for the weight gradient alone: more blocks write more partial
// gradients. At least this many blocks, if there are tiles for them.
constexpr int kTilesOfWeightGradient = 16, kLeastBlocksOfWeightGradient = 8;

template <class Types>
BackwardPlan plan_norm_act_conv_backward(const ConvSizes& conv, const BackwardTask& task) {
  return for_weight_groups<Types>(conv, [&](auto c, auto groups) {
    constexpr int C = decltype(c)::value, GROUPS = decltype(groups)::value;
    BackwardPlan plan{tile_grid<typename Types::T, C, kBackwardVectors<Types, 0, GROUPS>>(conv)};
    const auto shared_bytes = [&](auto recomputes_g) {
      return BackwardShared<Types, C, recomputes_g()>(plan.grid, conv.in_channels,
                                                      conv.out_channels, task.tensors,
                                                      task.of_input, task.of_weight)
          .bytes;
    };
    plan.shared_bytes =
        task.recomputes_g ? shared_bytes(std::true_type()) : shared_bytes(std::false_type());
    if (!task.of_input) {
      // Few blocks for each weight: a launch computes the gradients of several.
      const int tiles = plan.grid.tiles;
      const int few = (tiles + kTilesOfWeightGradient - 1) / kTilesOfWeightGradient;
      plan.blocks = std::clamp(few, std::min(tiles, kLeastBlocksOfWeightGradient),
                               std::max(multiprocessors(), kLeastBlocksOfWeightGradient));
      plan.weight_gradients_kernel = norm_act_conv_weight_gradients_kernel<Types, C, GROUPS>;
      return plan;
    }
    const bool is_large = multiprocessor_shared_bytes() >= kLargeSharedBytes;
    plan.blocks = persistent_blocks(plan.grid.tiles, plan.shared_bytes,
                                    task.of_weight ? backward_blocks<Types, C, GROUPS>(is_large)
                                                   : backward_blocks<Types, C, 0>(is_large));
    if (task.recomputes_g) {
      for_recomputed_channels<Types>(conv, [&](auto channels) {
        constexpr int CHANNELS = decltype(channels)::value;
        plan.recomputing_kernel =
            task.of_weight
                ? norm_act_conv_backward_recomputed_kernel<Types, CHANNELS, kRecomputedGroups>
                : norm_act_conv_backward_recomputed_kernel<Types, CHANNELS, 0>;
      });
    } else {
      plan.kernel = task.of_weight ? norm_act_conv_backward_kernel<Types, C, GROUPS>
                                   : norm_act_conv_backward_kernel<Types, C, 0>;
    }
    return plan;
  });
}

#define PK_INSTANTIATE(...)                                                                   \
  template ForwardPlan plan_norm_act_conv_forward<ConvTypes<__VA_ARGS__>>(const ConvSizes&);  \
  template BackwardPlan plan_norm_act_conv_backward<ConvTypes<__VA_ARGS__>>(const ConvSizes&, \
                                                                            const BackwardTask&);
#if defined(PK_FLOAT32_STREAM)
PK_INSTANTIATE(PK_DTYPE, float, PK_DTYPE)
PK_INSTANTIATE(PK_DTYPE, PK_DTYPE, float)
#else
PK_INSTANTIATE(PK_DTYPE, PK_DTYPE, PK_DTYPE)
#endif
#undef PK_INSTANTIATE

}  // namespace preact_kernels::cuda
