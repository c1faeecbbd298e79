// Parameters that native ops share, in schemas and in signatures.
#pragma once

#include <string>

#include "checks.h"

#define PK_NORM                                                            \
  "Tensor mean, Tensor var, Tensor bn_weight, Tensor bn_bias, float eps, " \
  "str activation, float parameter"
#define PK_GRADIENT                                                               \
  "Tensor g, Tensor? skip, Tensor? step_x, Tensor? step_mean, Tensor? step_var, " \
  "Tensor? step_weight, float step_eps, Tensor? step_sums, float step_inv_count"
#define PK_RUN                                                                       \
  "Tensor[] bn_weights, Tensor[] bn_biases, Tensor[] conv_weights, Tensor[] means, " \
  "Tensor[] variances, float[] eps, int units_per_block, ScalarType dtype"

#define PK_NORM_PARAMETERS                                                               \
  const Tensor &mean, const Tensor &var, const Tensor &bn_weight, const Tensor &bn_bias, \
      double eps, const std::string &activation, double parameter
#define PK_NORM_ARGUMENTS mean, var, bn_weight, bn_bias, eps, activation, parameter
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

namespace preact_kernels {

inline Activation activation_of(const std::string& name, double parameter) {
#define PK_NAME(Name, name) name,
  static constexpr const char* kNames[] = {PK_FOR_EACH_ACTIVATION(PK_NAME)};
#undef PK_NAME
  int kind = 0;
  for (const char* known : kNames) {
    if (name == known) return {static_cast<ActivationKind>(kind), parameter};
    ++kind;
  }
  fail("activation: expected a known name, got ", name);
}

inline Norm norm_of(PK_NORM_PARAMETERS) {
  return {mean, var, bn_weight, bn_bias, eps, activation_of(activation, parameter)};
}

// The gradient is whole if `step_x` is absent.
inline Gradient gradient_of(PK_GRADIENT_PARAMETERS) {
  if (!step_x.has_value()) {
    PK_CHECK(!skip.has_value(), "skip: expected none without a step");
    return {g};
  }
  PK_CHECK(step_mean.has_value() && step_var.has_value() && step_weight.has_value() &&
               step_sums.has_value(),
           "step_mean, step_var, step_weight, step_sums: expected tensors with step_x");
  check_sums("step_sums", *step_sums);
  const Norm norm{*step_mean, *step_var, *step_weight, std::nullopt, step_eps};
  return {g, AffineStep{skip, *step_x, norm, *step_sums, step_inv_count}};
}

}  // namespace preact_kernels
