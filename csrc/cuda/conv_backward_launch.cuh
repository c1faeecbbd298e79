// The launcher of the backward, for the dtype PK_DTYPE of the file that includes it; beside a
// float32 stream where PK_FLOAT32_STREAM is defined.
#pragma once

#include "conv_launch.cuh"

namespace preact_kernels::cuda {

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

// A plan for the gradient of the input, of the weight, or both.
template <class Types>
ConvLaunch plan_bn_relu_conv_backward(const ConvSizes& conv, int tensors, bool of_input,
                                      bool of_weight, bool recomputes_g) {
  return for_weight_groups<Types>(conv, [&](auto c, auto groups) {
    constexpr int C = decltype(c)::value, GROUPS = decltype(groups)::value;
    ConvLaunch plan{tile_grid<typename Types::T, C, kBackwardVectors<Types, 0, GROUPS>>(conv)};
    const auto shared_bytes = [&](auto is_recomputed) {
      return BackwardShared<Types, C, is_recomputed()>(
                 plan.grid, conv.in_channels, conv.out_channels, tensors, of_input, of_weight)
          .bytes;
    };
    plan.shared_bytes =
        recomputes_g ? shared_bytes(std::true_type()) : shared_bytes(std::false_type());
    if (!of_input) {
      // Few blocks for each weight: a launch computes the gradients of several.
      const int tiles = plan.grid.tiles;
      const int few = (tiles + kTilesOfWeightGradient - 1) / kTilesOfWeightGradient;
      plan.blocks = std::clamp(few, std::min(tiles, kLeastBlocksOfWeightGradient),
                               std::max(multiprocessors(), kLeastBlocksOfWeightGradient));
    } else {
      const bool is_large = multiprocessor_shared_bytes() >= kLargeSharedBytes;
      plan.blocks = persistent_blocks(plan.grid.tiles, plan.shared_bytes,
                                      of_weight ? backward_blocks<Types, C, GROUPS>(is_large)
                                                : backward_blocks<Types, C, 0>(is_large));
    }
    return plan;
  });
}

template <class Types>
void launch_bn_relu_conv_backward(const ConvSizes& conv, const ConvLaunch& plan,
                                  const BnReluConvBackward& params, bool of_weight,
                                  cudaStream_t stream) {
  for_weight_groups<Types>(conv, [&](auto c, auto groups) {
    constexpr int C = decltype(c)::value, GROUPS = decltype(groups)::value;
    launch(of_weight ? "bn_relu_conv_backward" : "bn_relu_conv_backward_input",
           of_weight ? bn_relu_conv_backward_kernel<Types, C, GROUPS>
                     : bn_relu_conv_backward_kernel<Types, C, 0>,
           dim3(plan.blocks), dim3(kThreads), plan.shared_bytes, stream, params,
           params.is_dependent);
  });
}

template <class Types>
bool launch_bn_relu_conv_backward_recomputed(const ConvSizes& conv, const ConvLaunch& plan,
                                             const BnReluConvBackwardRecomputed& params,
                                             bool of_weight, cudaStream_t stream) {
  return for_recomputed_channels<Types>(conv, [&](auto channels) {
    constexpr int CHANNELS = decltype(channels)::value;
    launch(
        of_weight ? "bn_relu_conv_backward_recomputed" : "bn_relu_conv_backward_recomputed_input",
        of_weight ? bn_relu_conv_backward_recomputed_kernel<Types, CHANNELS, kRecomputedGroups>
                  : bn_relu_conv_backward_recomputed_kernel<Types, CHANNELS, 0>,
        dim3(plan.blocks), dim3(kThreads), plan.shared_bytes, stream, params,
        params.conv.is_dependent);
  });
}

template <class Types>
void launch_bn_relu_conv_weight_gradients(const ConvSizes& conv, const ConvLaunch& plan,
                                          const WeightGradients& params, int count,
                                          cudaStream_t stream) {
  for_weight_groups<Types>(conv, [&](auto c, auto groups) {
    constexpr int C = decltype(c)::value, GROUPS = decltype(groups)::value;
    launch("bn_relu_conv_weight_gradients", bn_relu_conv_weight_gradients_kernel<Types, C, GROUPS>,
           dim3(plan.blocks, count), dim3(kThreads), plan.shared_bytes, stream, params,
           params.of[0].is_dependent);
  });
}

#define PK_INSTANTIATE(TYPES)                                                                     \
  template ConvLaunch plan_bn_relu_conv_backward<TYPES>(const ConvSizes&, int, bool, bool, bool); \
  template void launch_bn_relu_conv_backward<TYPES>(                                              \
      const ConvSizes&, const ConvLaunch&, const BnReluConvBackward&, bool, cudaStream_t);        \
  template bool launch_bn_relu_conv_backward_recomputed<TYPES>(                                   \
      const ConvSizes&, const ConvLaunch&, const BnReluConvBackwardRecomputed&, bool,             \
      cudaStream_t);                                                                              \
  template void launch_bn_relu_conv_weight_gradients<TYPES>(                                      \
      const ConvSizes&, const ConvLaunch&, const WeightGradients&, int, cudaStream_t);
PK_FOR_TYPES_OF_FILE(PK_INSTANTIATE)
#undef PK_INSTANTIATE

}  // namespace preact_kernels::cuda
