// Launchers for norms with rows and for every activation; norm_act.cu has ReLU without rows.
#pragma once

#include "../host/launch.h"

namespace preact_kernels {

void launch_any_norm_act_forward(const ImageSizes& size, const Tensor& x, const Norm& norm,
                                 const Tensor* residual, const Tensor& y);
void launch_any_norm_act_backward_mask(const ImageSizes& size, const Tensor& dy, const Tensor& x,
                                       const Norm& norm, const Tensor* y, const Tensor* g,
                                       const Tensor* a, const Tensor& sums);
void launch_any_norm_input_gradient(const ImageSizes& size, const Gradient& gradient,
                                    bool activated, const Tensor& dx);

}  // namespace preact_kernels
