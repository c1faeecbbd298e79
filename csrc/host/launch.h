// Launchers, which each library defines: csrc/cpu/*.cpp and csrc/cuda/*.cu. The caller checks
// arguments and allocates outputs.
#pragma once

#include "workspace.h"

namespace preact_kernels {

// `Unit` of kernels/contract.py (norm, activation and convolution), as a launch needs it: its sizes
// and dtypes, and where the workspace keeps its packed weight. The activation is part of `Norm`.
struct Unit {
  ConvSizes conv;
  ConvDtypes dtypes;
  size_t weight;  // index of its weight in the workspace
  Workspace* workspace = nullptr;
  bool is_x_rebuilt = false;  // only postponed weight gradients then keep x alive
};

void launch_bn_stats(const ImageSizes& size, const Tensor& x, const Statistics& of_x);

// Mean and variance of each image and group of channels, [N, C]: equal for the channels of a group.
void launch_group_stats(const ImageSizes& size, const Tensor& x, int64_t groups,
                        const Statistics& of_x);

// y = x + branch, and the statistics of y if they are wanted; or y = x + (branch + bias), unless
// `bias` is null.
void launch_residual_add_forward(const ImageSizes& size, const Tensor& x, const Tensor& branch,
                                 const Tensor* bias, const Output& output);

// y = act(p) for p = (x - mean) * scale + bias, or act(p + residual) unless `residual` is null.
// With a residual, p and the sum are rounded to the dtype of x, and the activation is ReLU or the
// identity.
void launch_norm_act_forward(const ImageSizes& size, const Tensor& x, const Norm& norm,
                             const Tensor* residual, const Tensor& y);

// g = dy * act'(p), or, unless `y` is null, 0 where y <= 0, else dy (ReLU). Stored unless `g` is
// null. And the sums of g and of g * xhat: [2, C], or [2, N, C] if the norm has rows.
void launch_norm_act_backward_mask(const ImageSizes& size, const Tensor& dy, const Tensor& x,
                                   const Norm& norm, const Tensor* y, const Tensor* g,
                                   const Tensor& sums);

// a = act(p), and the sums of launch_norm_act_backward_mask, in one pass.
void launch_norm_act_recompute(const ImageSizes& size, const Tensor& dy, const Tensor& x,
                               const Norm& norm, const Tensor& a, const Tensor& sums);

// dx = [skip +] A*g + B*(x - mean) + C for a gradient with a step. If `activated`, g is first
// multiplied by act'(p), and there is no skip.
void launch_norm_input_gradient(const ImageSizes& size, const Gradient& gradient, bool activated,
                                const Tensor& dx);

// y = conv(act(p)) [+ conv_bias] [+ residual], and the statistics of y if they are wanted.
void launch_norm_act_conv_forward(const Unit& unit, const Inputs& inputs, const Epilogue& epilogue,
                                  const Output& output);

// g = dgrad(dy) * act'(p) with its sums, the gradient of the weight, and the whole dy, each if
// wanted.
void launch_norm_act_conv_backward(const Unit& unit, const Gradient& dy, const Inputs& inputs,
                                   const Gradients& gradients);

}  // namespace preact_kernels
