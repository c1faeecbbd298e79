#include "conv_forward_launch.cuh"

namespace preact_kernels::cuda {

template ConvLaunch plan_bn_relu_conv_forward<BFloat16>(const Conv&);
template void launch_bn_relu_conv_forward<BFloat16>(const Conv&, const ConvLaunch&,
                                                    const BnReluConvForward&, cudaStream_t);

}  // namespace preact_kernels::cuda
