// Schemas and entry points of the native ops, which both libraries register.
//
// An entry point takes what the dispatcher passes, one positional argument after the other, and
// names it. The ops of preact_kernels/ops/schema.py choose between the libraries.
#pragma once

#include <torch/csrc/stable/library.h>

#include "preact_stage.h"

// A norm and a fold, in schemas and in signatures.
#define PK_NORM "Tensor mean, Tensor var, Tensor bn_weight, Tensor bn_bias, float eps"
#define PK_FOLD                                                                              \
  "Tensor? skip, Tensor? fold_x, Tensor? fold_mean, Tensor? fold_var, Tensor? fold_weight, " \
  "float fold_eps, Tensor? fold_sums, float fold_inv_count"

#define PK_NORM_PARAMETERS \
  const Tensor &mean, const Tensor &var, const Tensor &bn_weight, const Tensor &bn_bias, double eps
#define PK_FOLD_PARAMETERS                                                         \
  const std::optional<Tensor>&skip, const std::optional<Tensor>&fold_x,            \
      const std::optional<Tensor>&fold_mean, const std::optional<Tensor>&fold_var, \
      const std::optional<Tensor>&fold_weight, double fold_eps,                    \
      const std::optional<Tensor>&fold_sums, double fold_inv_count
#define PK_FOLD_ARGUMENTS \
  skip, fold_x, fold_mean, fold_var, fold_weight, fold_eps, fold_sums, fold_inv_count

namespace preact_kernels::entry {

// The fold of a gradient, or none where `x` is absent.
inline std::optional<Fold> fold_of(const std::optional<Tensor>& skip,
                                   const std::optional<Tensor>& x,
                                   const std::optional<Tensor>& mean,
                                   const std::optional<Tensor>& var,
                                   const std::optional<Tensor>& weight, double eps,
                                   const std::optional<Tensor>& sums, double inv_count) {
  if (!x.has_value()) {
    STD_TORCH_CHECK(!skip.has_value(), "skip: expected none without a fold");
    return std::nullopt;
  }
  STD_TORCH_CHECK(mean.has_value() && var.has_value() && weight.has_value() && sums.has_value(),
                  "fold: expected mean, var, weight and sums beside x");
  return Fold{skip, *x, {*mean, *var, *weight, std::nullopt, eps}, *sums, inv_count};
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
  return preact_kernels::bn_input_gradient(dy, {std::nullopt, x, norm, sums, inv_count});
}

inline Tensor bn_input_gradient(const Tensor& g, PK_FOLD_PARAMETERS) {
  const std::optional<Fold> fold = fold_of(PK_FOLD_ARGUMENTS);
  STD_TORCH_CHECK(fold.has_value(), "fold_x: expected a tensor, got none");
  return preact_kernels::bn_input_gradient(g, *fold);
}

inline Stride stride_of(const std::vector<int64_t>& stride) {
  STD_TORCH_CHECK(stride.size() == 2, "stride: expected 2 values, got ", stride.size());
  return {stride[0], stride[1]};
}

inline std::tuple<Tensor, Tensor, Tensor> bn_relu_conv_forward(
    const Tensor& x, PK_NORM_PARAMETERS, const Tensor& conv_weight,
    const std::vector<int64_t>& stride, const std::optional<Tensor>& conv_bias,
    const std::optional<Tensor>& residual, bool with_stats, std::optional<ScalarType> dtype) {
  check_activation("x", x);  // before memory on its device is written
  ForwardRun run(x, {conv_weight}, {with_stats}, dtype);
  const Tensor y = preact_kernels::bn_relu_conv_forward(
      x, {mean, var, bn_weight, bn_bias, eps}, conv_weight, conv_bias, residual, run.statistics[0],
      run.unit(0), stride_of(stride));
  run.finish();
  return {y, run.mean, run.var};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> bn_relu_conv_backward(
    const Tensor& dy, PK_FOLD_PARAMETERS, const Tensor& x, PK_NORM_PARAMETERS,
    const Tensor& conv_weight, const std::vector<int64_t>& stride, bool wants_input,
    bool wants_weight, bool wants_dy) {
  check_activation("x", x);
  BackwardRun run(x, {conv_weight}, {{wants_input, wants_weight, wants_dy}}, {dy});
  UnitGradients& gradients = run.gradients[0];
  preact_kernels::bn_relu_conv_backward(dy, fold_of(PK_FOLD_ARGUMENTS), std::nullopt, x,
                                        {mean, var, bn_weight, bn_bias, eps}, conv_weight,
                                        gradients, run.unit(0), stride_of(stride));
  run.finish(x);
  return {*gradients.g, gradients.sums, gradients.conv_weight, *gradients.dy};
}

inline std::vector<Tensor> preact_stage_backward(
    const Tensor& dy, PK_FOLD_PARAMETERS, const std::vector<Tensor>& inputs,
    const std::vector<Tensor>& statistics, const std::vector<Tensor>& parameters,
    const std::vector<double>& eps, double inv_count, int64_t units_per_block,
    const std::optional<Tensor>& y, const std::vector<Tensor>& negated) {
  return preact_kernels::preact_stage_backward(
      dy, fold_of(PK_FOLD_ARGUMENTS),
      {inputs, statistics, parameters, eps, inv_count, units_per_block, y, negated});
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
  m.def("bn_input_gradient(Tensor g, " PK_FOLD ") -> Tensor");
  m.def("bn_relu_conv_forward(Tensor x, " PK_NORM
        ", Tensor conv_weight, int[] stride, Tensor? conv_bias, Tensor? residual, "
        "bool with_stats, ScalarType? dtype=None)"
        " -> (Tensor, Tensor, Tensor)");
  m.def("bn_relu_conv_backward(Tensor dy, " PK_FOLD ", Tensor x, " PK_NORM
        ", Tensor conv_weight, int[] stride, bool wants_input, bool wants_weight, bool wants_dy)"
        " -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "preact_stage_forward(Tensor x, Tensor[] x_statistics, Tensor[] parameters, "
      "Tensor[] known, float[] eps, int units_per_block, bool with_stats, bool keep_inputs, "
      "bool keep_block_inputs, ScalarType? dtype=None) -> Tensor[]");
  m.def("preact_stage_backward(Tensor dy, " PK_FOLD
        ", Tensor[] inputs, Tensor[] statistics, "
        "Tensor[] parameters, float[] eps, float inv_count, int units_per_block, Tensor? y, "
        "Tensor[] negated) -> Tensor[]");
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
  m.impl("preact_stage_forward", TORCH_BOX(&preact_stage_forward));
  m.impl("preact_stage_backward", TORCH_BOX(&entry::preact_stage_backward));
}

}  // namespace preact_kernels
