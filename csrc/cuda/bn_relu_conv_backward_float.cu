#include "conv_backward_launch.cuh"

namespace preact_kernels::cuda {

template ConvLaunch plan_bn_relu_conv_backward<float>(const Conv&, bool);
template void launch_bn_relu_conv_backward<float>(const Conv&, const ConvLaunch&,
                                                  const BnReluConvBackward&, cudaStream_t);

}  // namespace preact_kernels::cuda
