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

// Calls `body` with the template arguments IN and OUT of the kernels: the channels of a 3x3
// convolution, and of the 1x1 convolutions of bottlenecks with inner width 16, 32 and 64, else 0.
// With constants, addresses take fewer instructions. A float32 stream is the wider side.
template <class Types, int C, class Body>
auto for_channels(const ConvSizes& conv, const Body& body) {
  using std::integral_constant;
  if constexpr (C != 0) {
    return body(integral_constant<int, C>(), integral_constant<int, C>());
  } else {
    constexpr bool kReadsStream = !std::is_same_v<typename Types::X, typename Types::T>;
    constexpr bool kWritesStream = !std::is_same_v<typename Types::Y, typename Types::T>;
    const auto with = [&](auto narrow) {
      constexpr int kNarrow = decltype(narrow)::value;
      const integral_constant<int, 4 * kNarrow> wide;
      if constexpr (!kReadsStream) {
        if (conv.in_channels == narrow && conv.out_channels == wide) return body(narrow, wide);
      }
      if constexpr (!kWritesStream) {
        if (conv.in_channels == wide && conv.out_channels == narrow) return body(wide, narrow);
      }
      return body(integral_constant<int, 0>(), integral_constant<int, 0>());
    };
    switch (std::min(conv.in_channels, conv.out_channels)) {
      case 16:
        return with(integral_constant<int, 16>());
      case 32:
        return with(integral_constant<int, 32>());
      default:
        return with(integral_constant<int, 64>());
    }
  }
}

// Calls `body` with the template argument GROUPS of the kernels for the gradient of a weight, whose
// channels are constant if IN and OUT are not 0.
template <int C, int IN = C, int OUT = C, class Body>
auto for_groups(const ConvSizes& conv, const Body& body) {
  if constexpr (IN != 0) {
    constexpr int kGroups = C == 16 || C == 32 ? 1 : C == 64 ? 2 : groups_of_warp(IN, OUT);
    return body(std::integral_constant<int, kGroups>());
  } else {
    if (groups_of_warp(int(conv.in_channels), int(conv.out_channels)) == 8) {
      return body(std::integral_constant<int, 8>());
    }
    return body(std::integral_constant<int, 2>());
  }
}

// `tile_pixels` is for 1x1 convolutions.
template <int C>
TileGrid tile_grid(const ConvSizes& conv, int tile_pixels) {
  TileGrid grid{};
  if constexpr (C == 0) {
    grid.tile_pixels = tile_pixels;
    grid.height = 1;
    grid.width = int(conv.pixels());
    grid.tiles = int((int64_t(grid.width) + grid.tile_pixels - 1) / grid.tile_pixels);
  } else {
    grid.height = int(conv.height), grid.width = int(conv.width);
    grid.tiles_down = (grid.height + Tile<C>::kHeight - 1) / Tile<C>::kHeight;
    grid.tiles_across = (grid.width + Tile<C>::kWidth - 1) / Tile<C>::kWidth;
    grid.tiles = int(conv.images * grid.tiles_down * grid.tiles_across);
    grid.tiles_of_image = Divisor(std::max(grid.tiles_down * grid.tiles_across, 1));
    grid.tiles_of_row = Divisor(std::max(grid.tiles_across, 1));
    grid.tile_pixels = Tile<C>::kPixels;
  }
  return grid;
}

// The number of persistent thread blocks: at most `most` per multiprocessor, as its shared memory
// allows.
inline int persistent_thread_blocks(int tiles, int shared_bytes, int most) {
  constexpr int kReserved = 1024;  // bytes of each thread block that the system reserves
  const int fit = multiprocessor_shared_bytes() / (shared_bytes + kReserved);
  return std::min(tiles, multiprocessors() * std::clamp(fit, 1, most));
}

template <class Types>
ForwardPlan plan_norm_act_conv_forward(const ConvSizes& conv) {
  using T = typename Types::T;
  const int in_channels = int(conv.in_channels), out_channels = int(conv.out_channels);
  return for_channel_class<T>(conv, [&](auto c) {
    constexpr int C = decltype(c)::value;
    const int pixels = pixels_of_tile<T>(in_channels, out_channels, kTileVectors<T, 0>);
    ForwardPlan plan{tile_grid<C>(conv, pixels)};
    plan.shared_bytes = ForwardShared<Types, C>(pixels, in_channels, out_channels).bytes;
    plan.thread_blocks =
        persistent_thread_blocks(plan.grid.tiles, plan.shared_bytes, kForwardThreadBlocks<C>);
    plan.kernel = for_channels<Types, C>(conv, [](auto in, auto out) {
      return norm_act_conv_forward_kernel<Types, C, in(), out()>;
    });
    return plan;
  });
}

// For a kernel that computes only the weight gradient: pixels per thread block (more thread blocks
// write more partial gradients), and the least number of thread blocks, if there are tiles for
// them. A launch for 12 weights of the last stage of a ResNet for CIFAR, at batch 128, fills 132
// multiprocessors once.
constexpr int kPixelsOfWeightGradient = 768, kLeastThreadBlocksOfWeightGradient = 8;

template <class Types>
BackwardPlan plan_norm_act_conv_backward(const ConvSizes& conv, const BackwardTask& task) {
  const int in_channels = int(conv.in_channels), out_channels = int(conv.out_channels);
  return for_channel_class<typename Types::T>(conv, [&](auto c) {
    constexpr int C = decltype(c)::value;
    const int pixels = backward_pixels<Types>(in_channels, out_channels);
    BackwardPlan plan{tile_grid<C>(conv, pixels)};
    plan.shared_bytes = BackwardShared<Types, C>(pixels, in_channels, out_channels, task.tensors,
                                                 task.of_input, task.of_weight)
                            .bytes;
    if (!task.of_input) {
      // Few thread blocks for each weight: a launch computes the gradients of several.
      const int tiles = plan.grid.tiles;
      const int thread_block_pixels = kPixelsOfWeightGradient / (C == 0 ? 2 : 1);
      const int thread_block_tiles = std::max(thread_block_pixels / plan.grid.tile_pixels, 1);
      const int few = (tiles + thread_block_tiles - 1) / thread_block_tiles;
      plan.thread_blocks =
          std::clamp(few, std::min(tiles, kLeastThreadBlocksOfWeightGradient),
                     std::max(multiprocessors(), kLeastThreadBlocksOfWeightGradient));
    } else {
      const bool is_large = multiprocessor_shared_bytes() >= kLargeSharedBytes;
      const int most = for_groups<C>(conv, [&](auto groups) {
        return task.of_weight ? backward_thread_blocks<Types, C, groups()>(is_large)
                              : backward_thread_blocks<Types, C, 0>(is_large);
      });
      plan.thread_blocks = persistent_thread_blocks(plan.grid.tiles, plan.shared_bytes, most);
    }
    for_channels<Types, C>(conv, [&](auto in, auto out) {
      if (task.of_input && !task.of_weight) {
        plan.kernel = norm_act_conv_backward_kernel<Types, C, 0, in(), out()>;
        return;
      }
      for_groups<C, in(), out()>(conv, [&](auto groups) {
        constexpr int GROUPS = decltype(groups)::value;
        if (task.of_input) {
          plan.kernel = norm_act_conv_backward_kernel<Types, C, GROUPS, in(), out()>;
        } else {
          plan.weight_gradients_kernel =
              norm_act_conv_weight_gradients_kernel<Types, C, GROUPS, in(), out()>;
        }
      });
    });
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
