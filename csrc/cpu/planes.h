// The launchers of host/launch.h for tensors in NCHW order: a plane of pixels for each image and
// channel.
#pragma once

#include "../host/launch.h"

namespace preact_kernels {

void launch_planes_bn_stats(const ImageSizes& size, const Tensor& x, const Statistics& of_x);
void launch_planes_group_stats(const ImageSizes& size, const Tensor& x, int64_t groups,
                               const Statistics& of_x);
void launch_planes_norm_act_forward(const ImageSizes& size, const Tensor& x, const Norm& norm,
                                    const Tensor* residual, const Tensor& y);
void launch_planes_norm_act_backward(const ImageSizes& size, const Tensor& dy, const Tensor& x,
                                     const Norm& norm, const Tensor* y, const Tensor* g,
                                     const Tensor* a, const Tensor& sums);
void launch_planes_input_gradient(const ImageSizes& size, const Gradient& gradient, bool activated,
                                  const Tensor& dx);

}  // namespace preact_kernels
