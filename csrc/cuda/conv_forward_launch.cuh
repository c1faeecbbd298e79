// The launcher of the forward, for the dtype PK_DTYPE of the file that includes it.
#pragma once

#include "conv_launch.cuh"

namespace preact_kernels::cuda {

template <class T>
ConvLaunch plan_bn_relu_conv_forward(const Conv& conv) {
  return for_channel_class<T>(conv, [&](auto c) {
    constexpr int C = decltype(c)::value;
    ConvLaunch plan{tile_grid<T, C>(conv)};
    plan.shared_bytes = ForwardShared<T, C>(plan.grid, conv.in_channels, conv.out_channels).bytes;
    plan.blocks = persistent_blocks(plan.grid.tiles, plan.shared_bytes, kForwardBlocks<C>);
    return plan;
  });
}

template <class T>
void launch_bn_relu_conv_forward(const Conv& conv, const ConvLaunch& plan,
                                 const BnReluConvForward& params, cudaStream_t stream) {
  for_channel_class<T>(conv, [&](auto c) {
    launch("bn_relu_conv_forward", bn_relu_conv_forward_kernel<T, decltype(c)::value>,
           dim3(plan.blocks), dim3(kThreads), plan.shared_bytes, stream, params,
           params.is_dependent);
  });
}

template ConvLaunch plan_bn_relu_conv_forward<PK_DTYPE>(const Conv&);
template void launch_bn_relu_conv_forward<PK_DTYPE>(const Conv&, const ConvLaunch&,
                                                    const BnReluConvForward&, cudaStream_t);

}  // namespace preact_kernels::cuda
