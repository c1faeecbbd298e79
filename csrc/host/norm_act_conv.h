// Norm, activation and convolution: checks, allocation and launch of a unit, and the ops for one.
#pragma once

#include "run_results.h"
#include "schema.h"

namespace preact_kernels {

inline void check_inputs(const Unit& unit, const Inputs& inputs, const UnitNames& names) {
  check_sizes(names.x, inputs.x, unit.conv.input(), inputs.x);
  PK_CHECK(inputs.x.scalar_type() == unit.dtypes.x, names.x,
           ": expected the dtype of the convolutions, or that of g for first units");
  check_norm(inputs.norm, unit.conv.input(), inputs.x, names.norm);
}

inline Tensor unit_forward(const Unit& unit, const Inputs& inputs, const Epilogue& epilogue,
                           const Statistics& statistics, const UnitNames& names = kUnitNames) {
  const auto& [conv_bias, residual] = epilogue;
  check_inputs(unit, inputs, names);
  const Output output{empty_nhwc(inputs.x, unit.conv.output(), unit.dtypes.y), statistics};
  if (residual.has_value()) check_like("residual", *residual, unit.conv.output(), output.y);
  if (conv_bias.has_value()) {
    check_tensor("conv_bias", *conv_bias);
    check_same_device("conv_bias", *conv_bias, inputs.x);
    check_shape("conv_bias", *conv_bias, {unit.conv.out_channels});
    PK_CHECK(conv_bias->is_contiguous() && conv_bias->scalar_type() == inputs.x.scalar_type(),
             "conv_bias: expected a contiguous tensor in the dtype of x");
  }
  launch_norm_act_conv_forward(unit, inputs, epilogue, output);
  return output.y;
}

// Fills `gradients`, in which parameter gradients are allocated; allocates g and dy. g is in the
// dtype of products.
inline void unit_backward(const Unit& unit, const Gradient& dy, const Inputs& inputs,
                          Gradients& gradients, const UnitNames& names = kUnitNames) {
  const Wanted& wanted = gradients.wanted;
  const Tensor& x = inputs.x;
  const ImageSizes y_size = unit.conv.output();
  check_inputs(unit, inputs, names);
  check_sizes("g", dy.g, y_size, x);
  PK_CHECK(dy.dtype() == unit.dtypes.y, "g, step_x: expected the dtype of y");
  if (dy.step.has_value()) {
    PK_CHECK(dy.g.scalar_type() == unit.dtypes.products,
             "g: expected the dtype of the convolution, with a step");
    check_step(*dy.step, y_size, x);
  }
  PK_CHECK(dy.step.has_value() || !wanted.dy, "step_x: expected one where dy is wanted");
  gradients.g = wanted.g ? empty_nhwc(x, unit.conv.input(), unit.dtypes.products) : absent(x);
  gradients.dy = wanted.dy ? empty_nhwc(x, y_size, unit.dtypes.y) : absent(x);
  launch_norm_act_conv_backward(unit, dy, inputs, gradients);
}

// A unit without workspace.
inline std::vector<Unit> one_unit(const Tensor& x, const Tensor& conv_weight,
                                  const std::vector<int64_t>& stride, const ConvDtypes& dtypes) {
  const ImageSizes size = check_images("x", x);  // before memory on its device is written
  PK_CHECK(stride.size() == 2, "stride: expected 2 values, got ", stride.size());
  return {{check_conv(size, conv_weight, {stride[0], stride[1]}, dtypes, x), dtypes, 0}};
}

inline std::tuple<Tensor, Tensor, Tensor> norm_act_conv_forward(
    const Tensor& x, PK_NORM_PARAMETERS, const Tensor& conv_weight,
    const std::vector<int64_t>& stride, const std::optional<Tensor>& conv_bias,
    const std::optional<Tensor>& residual, bool with_stats, ScalarType dtype) {
  const ScalarType y_dtype = residual.has_value() ? check_dtype("residual", *residual) : dtype;
  auto units = one_unit(x, conv_weight, stride, {dtype, check_dtype("x", x), y_dtype});
  RunStatistics results(x, units, {conv_weight}, {with_stats});
  const Norm norm = norm_of(PK_NORM_ARGUMENTS);
  const Tensor y =
      unit_forward(units[0], {x, norm, conv_weight}, {conv_bias, residual}, results.of_outputs[0]);
  results.finish();
  return {y, results.mean, results.var};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> norm_act_conv_backward(
    PK_GRADIENT_PARAMETERS, const Tensor& x, PK_NORM_PARAMETERS, const Tensor& conv_weight,
    const std::vector<int64_t>& stride, bool wants_input, bool wants_weight, bool wants_dy,
    ScalarType dtype) {
  const Gradient dy = gradient_of(PK_GRADIENT_ARGUMENTS);
  auto units = one_unit(x, conv_weight, stride, {dtype, check_dtype("x", x), dtype_of(dy)});
  RunGradients results(x, units, {conv_weight}, {{wants_input, wants_weight, wants_dy}});
  Gradients& found = results.of_units[0];
  const Norm norm = norm_of(PK_NORM_ARGUMENTS);
  const bool has_rows = wants_input && norm.has_rows();
  found.sums = has_rows ? empty_sums(x, units[0].conv.input(), true) : results.sums_of_unit(0);
  unit_backward(units[0], dy, {x, norm, conv_weight}, found);
  results.finish(x);
  return {*found.g, found.sums, found.conv_weight, *found.dy};
}

}  // namespace preact_kernels
