// Ops: statistics, norm and activation, residual addition. Each checks, allocates and launches.
#pragma once

#include <tuple>

#include "launch.h"
#include "schema.h"

namespace preact_kernels {

inline std::tuple<Tensor, Tensor> bn_stats(const Tensor& x) {
  const ImageSizes size = check_images("x", x, is_planar(x));
  const Statistics statistics = new_statistics(x, true, size.channels);
  launch_bn_stats(size, x, statistics);
  return {statistics.mean, statistics.var};
}

inline std::tuple<Tensor, Tensor> group_stats(const Tensor& x, int64_t groups) {
  const ImageSizes size = check_images("x", x, is_planar(x));
  PK_CHECK(groups > 0 && size.channels % groups == 0, "groups: expected a divisor of the channels ",
           size.channels, ", got ", groups);
  const Statistics statistics = new_image_statistics(x, size);
  launch_group_stats(size, x, groups, statistics);
  return {statistics.mean, statistics.var};
}

// The tensor, or null.
inline const Tensor* pointer_to(const std::optional<Tensor>& t) {
  return t.has_value() ? &*t : nullptr;
}

inline std::tuple<Tensor, Tensor, Tensor> residual_add_forward(const Tensor& x,
                                                               const Tensor& branch,
                                                               bool with_stats,
                                                               const std::optional<Tensor>& bias) {
  const ImageSizes size = check_images("x", x);
  check_like("branch", branch, size, x);
  if (bias.has_value()) {
    check_tensor("bias", *bias);
    check_same_device("bias", *bias, x);
    check_shape("bias", *bias, {size.channels});
    PK_CHECK(bias->scalar_type() == x.scalar_type() && bias->is_contiguous(),
             "bias: expected contiguous values in the dtype of x");
    PK_CHECK(!with_stats, "bias: expected none with statistics");
  }
  const Output output{empty_nhwc(x, size), new_statistics(x, with_stats, size.channels)};
  launch_residual_add_forward(size, x, branch, pointer_to(bias), output);
  return {output.y, output.statistics.mean, output.statistics.var};
}

inline Tensor norm_act_forward(const Tensor& x, PK_NORM_PARAMETERS,
                               const std::optional<Tensor>& residual) {
  const Norm norm = norm_of(PK_NORM_ARGUMENTS);
  const ImageSizes size = check_images("x", x, is_planar(x));
  check_norm(norm, size, x);
  if (residual.has_value()) {
    check_like("residual", *residual, size, x, is_planar(x));
    PK_CHECK(norm.activation.kind == ActivationKind::kRelu ||
                 norm.activation.kind == ActivationKind::kIdentity,
             "activation: expected relu or identity with a residual, got ", activation);
  }
  const Tensor y = empty_dense(x, size);
  launch_norm_act_forward(size, x, norm, pointer_to(residual), y);
  return y;
}

// Checks and allocates for launch_norm_act_backward_mask, and returns the sums.
inline Tensor activation_gradient(const Tensor& dy, const Tensor& x, PK_NORM_PARAMETERS,
                                  const std::optional<Tensor>& y, const Tensor* g) {
  const Norm norm = norm_of(PK_NORM_ARGUMENTS);
  const ImageSizes size = check_images("x", x, is_planar(x));
  check_like("dy", dy, size, x, is_planar(x));
  check_norm(norm, size, x);
  if (y.has_value()) {
    check_like("y", *y, size, x, is_planar(x));
    PK_CHECK(norm.activation.kind == ActivationKind::kRelu,
             "activation: expected relu with y, got ", activation);
  }
  const Tensor sums = empty_sums(x, size, norm.has_rows());
  launch_norm_act_backward_mask(size, dy, x, norm, pointer_to(y), g, sums);
  return sums;
}

inline Tensor norm_act_backward_sums(const Tensor& dy, const Tensor& x, PK_NORM_PARAMETERS,
                                     const std::optional<Tensor>& y) {
  return activation_gradient(dy, x, PK_NORM_ARGUMENTS, y, nullptr);
}

// Used with residuals, and in stages with convolutions that PyTorch computes.
inline std::tuple<Tensor, Tensor> norm_act_backward_mask(const Tensor& dy, const Tensor& x,
                                                         PK_NORM_PARAMETERS,
                                                         const std::optional<Tensor>& y) {
  const Tensor g = empty_dense(x, check_images("x", x, is_planar(x)));
  return {g, activation_gradient(dy, x, PK_NORM_ARGUMENTS, y, &g)};
}

// Used with convolutions that PyTorch computes.
inline std::tuple<Tensor, Tensor> norm_act_recompute(const Tensor& dy, const Tensor& x,
                                                     PK_NORM_PARAMETERS) {
  const Norm norm = norm_of(PK_NORM_ARGUMENTS);
  const ImageSizes size = check_images("x", x, is_planar(x));
  check_like("dy", dy, size, x, is_planar(x));
  check_norm(norm, size, x);
  const Tensor a = empty_dense(x, size), sums = empty_sums(x, size, norm.has_rows());
  launch_norm_act_recompute(size, dy, x, norm, a, sums);
  return {a, sums};
}

// Checks and allocates for launch_norm_input_gradient.
inline Tensor whole_gradient(const Gradient& gradient, bool activated, const GradientNames& names) {
  PK_CHECK(gradient.step.has_value(), names.x, ": expected a tensor, got none");
  const Tensor& x = gradient.step->x;
  const bool planar = is_planar(x);
  const ImageSizes size = check_images(names.x, x, planar);
  check_like(names.g, gradient.g, size, x, planar);
  check_step(*gradient.step, size, x, planar, names);
  const Tensor dx = empty_dense(x, size);
  launch_norm_input_gradient(size, gradient, activated, dx);
  return dx;
}

inline Tensor norm_act_backward_input(const Tensor& dy, const Tensor& x, PK_NORM_PARAMETERS,
                                      const Tensor& sums, double inv_count,
                                      const std::optional<Tensor>& skip) {
  const Norm norm = norm_of(PK_NORM_ARGUMENTS);
  check_sums("sums", sums);
  return whole_gradient({dy, AffineStep{skip, x, norm, sums, inv_count}}, true,
                        {"dy", "x", kUnitNames.norm, "sums"});
}

inline Tensor norm_input_gradient(PK_GRADIENT_PARAMETERS) {
  return whole_gradient(gradient_of(PK_GRADIENT_ARGUMENTS), false, kGradientNames);
}

}  // namespace preact_kernels
