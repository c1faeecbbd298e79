// BN-ReLU-Conv on tensors: checks, allocation, launch.
#pragma once

#include "run.h"

namespace preact_kernels {

// y has the dtype of the residual where there is one, else that of the operands.
inline Tensor bn_relu_conv_forward(const Tensor& x, const Norm& norm, const Tensor& conv_weight,
                                   const std::optional<Tensor>& conv_bias,
                                   const std::optional<Tensor>& residual,
                                   const BatchStatistics& of_y, UnitOfRun unit,
                                   Stride stride = {}) {
  const ScalarType y_dtype = residual.has_value() ? residual->scalar_type() : unit.dtype;
  const Conv conv = check_conv(x, conv_weight, stride, unit.dtype, y_dtype);
  check_norm(norm, conv.in_channels, x);
  const Tensor y = empty_nhwc(x, conv.output(), y_dtype);
  if (residual.has_value()) check_like("residual", *residual, "y", y);
  if (conv_bias.has_value()) {
    check_same_device("conv_bias", *conv_bias, x);
    STD_TORCH_CHECK(conv_bias->is_contiguous() && conv_bias->numel() == conv.out_channels &&
                        conv_bias->scalar_type() == x.scalar_type(),
                    "conv_bias: expected ", conv.out_channels, " values in the dtype of x");
  }
  launch_bn_relu_conv_forward(conv, x, norm, conv_weight, conv_bias, residual, y, of_y, unit);
  return y;
}

// Fills `gradients`, whose parameter gradients are allocated. With a fold, `dy` is the g that the
// fold applies to, or that the fold of `recomputed_g` applies to, in the dtype of the operands, as
// is the g that this computes.
inline void bn_relu_conv_backward(const Tensor& dy, const std::optional<Fold>& fold,
                                  const std::optional<RecomputedG>& recomputed_g, const Tensor& x,
                                  const Norm& norm, const Tensor& conv_weight,
                                  UnitGradients& gradients, UnitOfRun unit, Stride stride = {}) {
  const ScalarType y_dtype = fold.has_value() ? fold->x.scalar_type() : dy.scalar_type();
  const Conv conv = check_conv(x, conv_weight, stride, unit.dtype, y_dtype);
  // The tensors of `recomputed_g` were checked with the convolution that g is of.
  const Tensor& of_output = recomputed_g.has_value() ? fold->x : dy;
  const Activation size = check_activation("dy", of_output);
  check_same_device("dy", of_output, x);
  STD_TORCH_CHECK(size.images == conv.images && size.channels == conv.out_channels &&
                      size.height == conv.out_height() && size.width == conv.out_width(),
                  "dy: expected the shape of the convolution's output");
  check_norm(norm, conv.in_channels, x);
  if (fold.has_value()) {
    STD_TORCH_CHECK(dy.scalar_type() == unit.dtype, "dy: expected the dtype of the convolution");
    check_sizes_like("fold.x", fold->x, "dy", of_output);
    check_fold(*fold, conv.out_channels);
  }
  STD_TORCH_CHECK(fold.has_value() || !gradients.wanted.dy,
                  "dy: expected a fold where the unfolded gradient is wanted");
  const bool stores_g = gradients.wanted.g && gradients.wanted.stores_g;
  gradients.g = stores_g ? empty_nhwc(x, conv.input(), unit.dtype) : absent(x);
  gradients.dy = gradients.wanted.dy ? empty_nhwc(x, size, y_dtype) : absent(x);
  launch_bn_relu_conv_backward(conv, dy, fold, recomputed_g, x, norm, conv_weight, gradients, unit);
}

}  // namespace preact_kernels
