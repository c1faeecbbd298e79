// Schemas and entry points of the native ops, which both libraries register.
//
// An entry point takes what the dispatcher passes, one positional argument after the other, and
// names it. The ops of preact_kernels/ops/schema.py choose between the libraries.
#pragma once

#include <torch/csrc/stable/library.h>

#include "block_run.h"

// A norm, a gradient and a run of blocks, in schemas and in signatures.
#define PK_NORM "Tensor mean, Tensor var, Tensor bn_weight, Tensor bn_bias, float eps"
#define PK_GRADIENT                                                                       \
  "Tensor g, Tensor? skip, Tensor? step_x, Tensor? step_mean, Tensor? step_var, Tensor? " \
  "step_weight, "                                                                         \
  "float step_eps, Tensor? step_sums, float step_inv_count"
#define PK_RUN                                                                       \
  "Tensor[] bn_weights, Tensor[] bn_biases, Tensor[] conv_weights, Tensor[] means, " \
  "Tensor[] variances, float[] eps, int units_per_block, ScalarType dtype"

#define PK_NORM_PARAMETERS \
  const Tensor &mean, const Tensor &var, const Tensor &bn_weight, const Tensor &bn_bias, double eps
#define PK_GRADIENT_PARAMETERS                                                           \
  const Tensor &g, const std::optional<Tensor>&skip, const std::optional<Tensor>&step_x, \
      const std::optional<Tensor>&step_mean, const std::optional<Tensor>&step_var,       \
      const std::optional<Tensor>&step_weight, double step_eps,                          \
      const std::optional<Tensor>&step_sums, double step_inv_count
#define PK_GRADIENT_ARGUMENTS \
  g, skip, step_x, step_mean, step_var, step_weight, step_eps, step_sums, step_inv_count
#define PK_RUN_PARAMETERS                                                                          \
  const std::vector<Tensor>&bn_weights, const std::vector<Tensor>&bn_biases,                       \
      const std::vector<Tensor>&conv_weights, const std::vector<Tensor>&means,                     \
      const std::vector<Tensor>&variances, const std::vector<double>&eps, int64_t units_per_block, \
      ScalarType dtype
#define PK_RUN_ARGUMENTS \
  bn_weights, bn_biases, conv_weights, means, variances, eps, size_t(units_per_block), dtype

namespace preact_kernels::entry {

// A gradient; whole where `step_x` is absent.
inline Gradient gradient_of(PK_GRADIENT_PARAMETERS) {
  if (!step_x.has_value()) {
    STD_TORCH_CHECK(!skip.has_value(), "skip: expected none without a step");
    return {g};
  }
  STD_TORCH_CHECK(step_mean.has_value() && step_var.has_value() && step_weight.has_value() &&
                      step_sums.has_value(),
                  "step: expected mean, var, weight and sums beside x");
  const Norm norm{*step_mean, *step_var, *step_weight, std::nullopt, step_eps};
  return {g, AffineStep{skip, *step_x, norm, *step_sums, step_inv_count}};
}

inline Tensor bn_relu_forward(const Tensor& x, PK_NORM_PARAMETERS) {
  return preact_kernels::bn_relu_forward(x, {mean, var, bn_weight, bn_bias, eps});
}

inline Tensor bn_relu_backward_sums(const Tensor& dy, const Tensor& x, PK_NORM_PARAMETERS) {
  return preact_kernels::bn_relu_backward_mask(dy, x, {mean, var, bn_weight, bn_bias, eps},
                                               nullptr);
}

// For convolutions that the library leaves to PyTorch.
inline std::tuple<Tensor, Tensor> bn_relu_backward_mask(const Tensor& dy, const Tensor& x,
                                                        PK_NORM_PARAMETERS) {
  const Tensor g = empty_nhwc(x, check_activation("x", x));
  const Norm norm{mean, var, bn_weight, bn_bias, eps};
  return {g, preact_kernels::bn_relu_backward_mask(dy, x, norm, &g)};
}

inline Tensor bn_relu_backward_input(const Tensor& dy, const Tensor& x, PK_NORM_PARAMETERS,
                                     const Tensor& sums, double inv_count) {
  const Norm norm{mean, var, bn_weight, bn_bias, eps};
  return preact_kernels::bn_input_gradient({dy, AffineStep{std::nullopt, x, norm, sums, inv_count}},
                                           true);
}

inline Tensor bn_input_gradient(PK_GRADIENT_PARAMETERS) {
  return preact_kernels::bn_input_gradient(gradient_of(PK_GRADIENT_ARGUMENTS), false);
}

inline Stride stride_of(const std::vector<int64_t>& stride) {
  STD_TORCH_CHECK(stride.size() == 2, "stride: expected 2 values, got ", stride.size());
  return {stride[0], stride[1]};
}

// The unit of a call that has one.
inline std::vector<Unit> one_unit(const Tensor& x, const Tensor& conv_weight,
                                  const std::vector<int64_t>& stride, const ConvDtypes& dtypes) {
  const Activation size = check_activation("x", x);  // before memory on its device is written
  return {{check_conv(size, conv_weight, stride_of(stride), dtypes, x), dtypes, 0}};
}

inline std::tuple<Tensor, Tensor, Tensor> bn_relu_conv_forward(
    const Tensor& x, PK_NORM_PARAMETERS, const Tensor& conv_weight,
    const std::vector<int64_t>& stride, const std::optional<Tensor>& conv_bias,
    const std::optional<Tensor>& residual, bool with_stats, ScalarType dtype) {
  const ScalarType y_dtype = residual.has_value() ? residual->scalar_type() : dtype;
  auto units = one_unit(x, conv_weight, stride, {dtype, x.scalar_type(), y_dtype});
  RunStatistics results(x, units, {conv_weight}, {with_stats});
  const Norm norm{mean, var, bn_weight, bn_bias, eps};
  const Tensor y = preact_kernels::bn_relu_conv_forward(
      units[0], {x, norm, conv_weight}, {conv_bias, residual}, results.of_outputs[0]);
  results.finish();
  return {y, results.mean, results.var};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> bn_relu_conv_backward(
    PK_GRADIENT_PARAMETERS, const Tensor& x, PK_NORM_PARAMETERS, const Tensor& conv_weight,
    const std::vector<int64_t>& stride, bool wants_input, bool wants_weight, bool wants_dy,
    ScalarType dtype) {
  const Gradient dy = gradient_of(PK_GRADIENT_ARGUMENTS);
  auto units = one_unit(x, conv_weight, stride, {dtype, x.scalar_type(), dy.dtype()});
  RunGradients results(x, units, {conv_weight}, {{wants_input, wants_weight, wants_dy}});
  UnitGradients& found = results.of_units[0];
  const Norm norm{mean, var, bn_weight, bn_bias, eps};
  preact_kernels::bn_relu_conv_backward(units[0], dy, {x, norm, conv_weight}, found);
  results.finish(x);
  return {*found.g, found.sums, found.conv_weight, *found.dy};
}

inline std::vector<Tensor> block_run_forward(const Tensor& x, PK_RUN_PARAMETERS, bool with_stats,
                                             bool keep_block_inputs, bool keep_unit_inputs) {
  return preact_kernels::block_run_forward(x, {PK_RUN_ARGUMENTS}, with_stats, keep_block_inputs,
                                           keep_unit_inputs);
}

inline std::vector<Tensor> block_run_backward(PK_GRADIENT_PARAMETERS, PK_RUN_PARAMETERS,
                                              const std::vector<Tensor>& inputs, double inv_count,
                                              const std::optional<Tensor>& y,
                                              const std::vector<Tensor>& negated) {
  return preact_kernels::block_run_backward(gradient_of(PK_GRADIENT_ARGUMENTS), {PK_RUN_ARGUMENTS},
                                            {inputs, y, negated}, inv_count);
}

}  // namespace preact_kernels::entry

namespace preact_kernels {

// Defines the ops that both libraries have with the same schema.
template <class Library>
void define_ops(Library& m) {
  m.def("bn_stats(Tensor x) -> (Tensor, Tensor)");
  m.def(
      "residual_add_forward(Tensor x, Tensor branch, bool with_stats)"
      " -> (Tensor, Tensor, Tensor)");
  m.def("bn_relu_forward(Tensor x, " PK_NORM ") -> Tensor");
  m.def("bn_relu_backward_sums(Tensor dy, Tensor x, " PK_NORM ") -> Tensor");
  m.def("bn_relu_backward_mask(Tensor dy, Tensor x, " PK_NORM ") -> (Tensor, Tensor)");
  m.def("bn_relu_backward_input(Tensor dy, Tensor x, " PK_NORM
        ", Tensor sums, float inv_count) -> Tensor");
  m.def("bn_input_gradient(" PK_GRADIENT ") -> Tensor");
  m.def("bn_relu_conv_forward(Tensor x, " PK_NORM
        ", Tensor conv_weight, int[] stride, Tensor? conv_bias, Tensor? residual, "
        "bool with_stats, ScalarType dtype) -> (Tensor, Tensor, Tensor)");
  m.def("bn_relu_conv_backward(" PK_GRADIENT ", Tensor x, " PK_NORM
        ", Tensor conv_weight, int[] stride, bool wants_input, bool wants_weight, bool wants_dy, "
        "ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("block_run_forward(Tensor x, " PK_RUN
        ", bool with_stats, bool keep_block_inputs, bool keep_unit_inputs) -> Tensor[]");
  m.def("block_run_backward(" PK_GRADIENT ", " PK_RUN
        ", Tensor[] inputs, float inv_count, Tensor? y, Tensor[] negated) -> Tensor[]");
}

// Registers their entry points.
template <class Library>
void implement_ops(Library& m) {
  m.impl("bn_stats", TORCH_BOX(&bn_stats));
  m.impl("residual_add_forward", TORCH_BOX(&residual_add_forward));
  m.impl("bn_relu_forward", TORCH_BOX(&entry::bn_relu_forward));
  m.impl("bn_relu_backward_sums", TORCH_BOX(&entry::bn_relu_backward_sums));
  m.impl("bn_relu_backward_mask", TORCH_BOX(&entry::bn_relu_backward_mask));
  m.impl("bn_relu_backward_input", TORCH_BOX(&entry::bn_relu_backward_input));
  m.impl("bn_input_gradient", TORCH_BOX(&entry::bn_input_gradient));
  m.impl("bn_relu_conv_forward", TORCH_BOX(&entry::bn_relu_conv_forward));
  m.impl("bn_relu_conv_backward", TORCH_BOX(&entry::bn_relu_conv_backward));
  m.impl("block_run_forward", TORCH_BOX(&entry::block_run_forward));
  m.impl("block_run_backward", TORCH_BOX(&entry::block_run_backward));
}

}  // namespace preact_kernels
