// The launcher of the backward, for the dtype PK_DTYPE of the file that includes it.
#pragma once

#include "conv_launch.cuh"

namespace preact_kernels::cuda {

// Calls `body` with the template arguments C and GROUPS of the kernel.
template <class T, class Body>
auto for_weight_groups(const Conv& conv, const Body& body) {
  return for_channel_class<T>(conv, [&](auto c) {
    constexpr int C = decltype(c)::value;
    if constexpr (C == 0) {
      const int groups = conv.in_channels / 16 * (conv.out_channels / 16);
      if (groups > 2 * kWarps) return body(c, std::integral_constant<int, 8>());
    }
    return body(c, std::integral_constant<int, C == 16 || C == 32 ? 1 : 2>());
  });
}

template <class T>
ConvLaunch plan_bn_relu_conv_backward(const Conv& conv, bool needs_conv_weight, int tensors) {
  return for_weight_groups<T>(conv, [&](auto c, auto groups) {
    constexpr int C = decltype(c)::value;
    ConvLaunch plan{tile_grid<T, C>(conv)};
    plan.shared_bytes =
        BackwardShared<T, C>(plan.grid, conv.in_channels, conv.out_channels, tensors).bytes;
    plan.blocks = persistent_blocks(plan.grid.tiles, plan.shared_bytes,
                                    kBackwardBlocks<C, decltype(groups)::value>);
    if (needs_conv_weight) {
      // At least one block a multiprocessor, and no more than make the partial weight gradients as
      // large as x and dy: for small images they are in the cache.
      const int channels = conv.in_channels + conv.out_channels;
      const int64_t bytes = conv.images * conv.height * conv.width * channels * sizeof(T);
      const int64_t weights = int64_t(Tile<C>::kTaps) * conv.in_channels * conv.out_channels;
      const int64_t most = std::max<int64_t>(multiprocessors(), bytes / (4 * weights));
      plan.blocks = int(std::min<int64_t>(plan.blocks, most));
    }
    return plan;
  });
}

template <class T>
void launch_bn_relu_conv_backward(const Conv& conv, const ConvLaunch& plan,
                                  const BnReluConvBackward& params, cudaStream_t stream) {
  for_weight_groups<T>(conv, [&](auto c, auto groups) {
    launch("bn_relu_conv_backward",
           bn_relu_conv_backward_kernel<T, decltype(c)::value, decltype(groups)::value>,
           dim3(plan.blocks), dim3(kThreads), plan.shared_bytes, stream, params,
           params.is_dependent);
  });
}

template ConvLaunch plan_bn_relu_conv_backward<PK_DTYPE>(const Conv&, bool, int);
template void launch_bn_relu_conv_backward<PK_DTYPE>(const Conv&, const ConvLaunch&,
                                                     const BnReluConvBackward&, cudaStream_t);

}  // namespace preact_kernels::cuda
