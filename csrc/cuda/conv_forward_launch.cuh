// The launcher of the forward, for the dtype PK_DTYPE of the file that includes it; beside a
// float32 stream where PK_FLOAT32_STREAM is defined.
#pragma once

#include "conv_launch.cuh"

namespace preact_kernels::cuda {

template <class Types>
ConvLaunch plan_bn_relu_conv_forward(const ConvSizes& conv) {
  return for_channel_class<typename Types::T>(conv, [&](auto c) {
    constexpr int C = decltype(c)::value;
    ConvLaunch plan{tile_grid<typename Types::T, C>(conv)};
    plan.shared_bytes =
        ForwardShared<Types, C>(plan.grid, conv.in_channels, conv.out_channels).bytes;
    plan.blocks = persistent_blocks(plan.grid.tiles, plan.shared_bytes, kForwardBlocks<C>);
    return plan;
  });
}

template <class Types>
void launch_bn_relu_conv_forward(const ConvSizes& conv, const ConvLaunch& plan,
                                 const BnReluConvForward& params, cudaStream_t stream) {
  for_channel_class<typename Types::T>(conv, [&](auto c) {
    launch("bn_relu_conv_forward", bn_relu_conv_forward_kernel<Types, decltype(c)::value>,
           dim3(plan.blocks), dim3(kThreads), plan.shared_bytes, stream, params,
           params.is_dependent);
  });
}

#define PK_INSTANTIATE(TYPES)                                                           \
  template ConvLaunch plan_bn_relu_conv_forward<TYPES>(const ConvSizes&);               \
  template void launch_bn_relu_conv_forward<TYPES>(const ConvSizes&, const ConvLaunch&, \
                                                   const BnReluConvForward&, cudaStream_t);
PK_FOR_TYPES_OF_FILE(PK_INSTANTIATE)
#undef PK_INSTANTIATE

}  // namespace preact_kernels::cuda
