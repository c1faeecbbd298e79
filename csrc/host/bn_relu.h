// Statistics, batch norm and ReLU, and the residual addition on tensors: checks, allocation,
// launch.
#pragma once

#include <tuple>

#include "launch.h"

namespace preact_kernels {

inline std::tuple<Tensor, Tensor> bn_stats(const Tensor& x) {
  const Activation size = check_activation("x", x);
  const BatchStatistics of_x = empty_batch_statistics(x, true, size.channels);
  launch_bn_stats(size, x, of_x);
  return {of_x.mean, of_x.var};
}

inline std::tuple<Tensor, Tensor, Tensor> residual_add_forward(const Tensor& x,
                                                               const Tensor& branch,
                                                               bool with_stats) {
  const Activation size = check_activation("x", x);
  check_like("branch", branch, "x", x);
  const Tensor y = empty_nhwc(x, size);
  const BatchStatistics of_y = empty_batch_statistics(x, with_stats, size.channels);
  launch_residual_add_forward(size, x, branch, y, of_y);
  return {y, of_y.mean, of_y.var};
}

inline Tensor bn_relu_forward(const Tensor& x, const Norm& norm) {
  const Activation size = check_activation("x", x);
  check_norm(norm, size.channels, x);
  const Tensor y = empty_nhwc(x, size);
  launch_bn_relu_forward(size, x, norm, y);
  return y;
}

// Sums [2, C] of g = dy * [p > 0] and of g * xhat. Also stores g where it is given.
inline Tensor bn_relu_backward_mask(const Tensor& dy, const Tensor& x, const Norm& norm,
                                    const Tensor* g) {
  const Activation size = check_activation("x", x);
  check_like("dy", dy, "x", x);
  check_norm(norm, size.channels, x);
  const Tensor sums = empty_sums(x, size.channels);
  launch_bn_relu_backward_mask(size, dy, x, norm, g, sums);
  return sums;
}

// The gradient that `fold` makes of g. Where its norm has a bias, `g` is dy and is masked first.
inline Tensor bn_input_gradient(const Tensor& g, const Fold& fold) {
  const Activation size = check_activation("x", fold.x);
  check_like("g", g, "x", fold.x);
  check_fold(fold, size.channels);
  const Tensor dx = empty_nhwc(fold.x, size);
  launch_bn_input_gradient(size, g, fold, dx);
  return dx;
}

}  // namespace preact_kernels
