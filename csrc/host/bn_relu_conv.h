// BN-ReLU-Conv on tensors: checks, allocation, launch.
#pragma once

#include "run_results.h"

namespace preact_kernels {

inline void check_inputs(const Unit& unit, const UnitInputs& inputs) {
  check_sizes("x", inputs.x, unit.conv.input(), inputs.x);
  STD_TORCH_CHECK(inputs.x.scalar_type() == unit.dtypes.x,
                  "inputs: expected the dtype of the convolutions, or that of g for first units");
  check_norm(inputs.norm, unit.conv.in_channels, inputs.x);
}

inline Tensor bn_relu_conv_forward(const Unit& unit, const UnitInputs& inputs,
                                   const Epilogue& epilogue, const Statistics& statistics) {
  const auto& [conv_bias, residual] = epilogue;
  check_inputs(unit, inputs);
  const Output output{empty_nhwc(inputs.x, unit.conv.output(), unit.dtypes.y), statistics};
  if (residual.has_value()) check_like("residual", *residual, unit.conv.output(), output.y);
  if (conv_bias.has_value()) {
    check_same_device("conv_bias", *conv_bias, inputs.x);
    STD_TORCH_CHECK(conv_bias->is_contiguous() && conv_bias->numel() == unit.conv.out_channels &&
                        conv_bias->scalar_type() == inputs.x.scalar_type(),
                    "conv_bias: expected ", unit.conv.out_channels, " values in the dtype of x");
  }
  launch_bn_relu_conv_forward(unit, inputs, epilogue, output);
  return output.y;
}

// Fills `gradients`, whose parameter gradients are allocated. g is in the dtype of products.
inline void bn_relu_conv_backward(const Unit& unit, const Gradient& dy, const UnitInputs& inputs,
                                  UnitGradients& gradients) {
  const Wanted& wanted = gradients.wanted;
  const Tensor& x = inputs.x;
  const Activation y_size = unit.conv.output();
  check_inputs(unit, inputs);
  // The g of `recomputed` was checked as a gradient of the unit after this one.
  if (!dy.recomputed.has_value()) check_sizes("g", dy.g, y_size, x);
  STD_TORCH_CHECK(dy.dtype() == unit.dtypes.y, "g, step_x: expected the dtype of y");
  if (dy.step.has_value()) {
    STD_TORCH_CHECK(dy.g.scalar_type() == unit.dtypes.products,
                    "g: expected the dtype of the convolution, with a step");
    check_step(*dy.step, y_size, x);
  }
  STD_TORCH_CHECK(dy.step.has_value() || !wanted.dy, "step_x: expected one where dy is wanted");
  gradients.g = wanted.g && wanted.stores_g ? empty_nhwc(x, unit.conv.input(), unit.dtypes.products)
                                            : absent(x);
  gradients.dy = wanted.dy ? empty_nhwc(x, y_size, unit.dtypes.y) : absent(x);
  launch_bn_relu_conv_backward(unit, dy, inputs, gradients);
}

}  // namespace preact_kernels
