// The forward's launcher, for a file to instantiate for its dtype.
#pragma once

#include "conv_launch.cuh"

namespace preact_kernels::cuda {

template <class T>
ConvLaunch plan_bn_relu_conv_forward(const ConvShape& shape) {
  return for_channel_class(shape, [&](auto c) {
    constexpr int C = decltype(c)::value;
    ConvLaunch plan{tile_grid<T, C>(shape)};
    plan.shared_bytes =
        forward_shared_bytes<T, C>(plan.grid, shape.in_channels, shape.out_channels);
    plan.blocks = persistent_blocks(plan.grid.tiles, plan.shared_bytes, kForwardBlocks<C>);
    return plan;
  });
}

template <class T>
void launch_bn_relu_conv_forward(const ConvShape& shape, const ConvLaunch& plan,
                                 const BnReluConvForward& params, cudaStream_t stream) {
  for_channel_class(shape, [&](auto c) {
    launch("bn_relu_conv_forward", bn_relu_conv_forward_kernel<T, decltype(c)::value>,
           dim3(plan.blocks), dim3(kThreads), plan.shared_bytes, stream, params);
  });
}

}  // namespace preact_kernels::cuda
