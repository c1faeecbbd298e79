// The ops of the CUDA library: what library.cu registers, and the files of this folder define.
#pragma once

#include <optional>
#include <tuple>

#include "../checks.h"

namespace preact_kernels::cuda {

std::tuple<Tensor, Tensor> bn_stats(const Tensor& x);

Tensor bn_relu_forward(const Tensor& x, const Tensor& mean, const Tensor& var,
                       const Tensor& bn_weight, const Tensor& bn_bias, double eps);

Tensor bn_relu_backward_sums(const Tensor& dy, const Tensor& x, const Tensor& mean,
                             const Tensor& var, const Tensor& bn_weight, const Tensor& bn_bias,
                             double eps);

// g and its sums, for convolutions that this library leaves to PyTorch.
std::tuple<Tensor, Tensor> bn_relu_backward_mask(const Tensor& dy, const Tensor& x,
                                                 const Tensor& mean, const Tensor& var,
                                                 const Tensor& bn_weight, const Tensor& bn_bias,
                                                 double eps);

Tensor bn_relu_backward_input(const Tensor& dy, const Tensor& x, const Tensor& mean,
                              const Tensor& var, const Tensor& bn_weight, const Tensor& bn_bias,
                              double eps, const Tensor& sums, double inv_count);

Tensor bn_input_gradient(const std::optional<Tensor>& dy, const Tensor& g, const Tensor& x,
                         const Tensor& mean, const Tensor& var, const Tensor& bn_weight, double eps,
                         const Tensor& sums, double inv_count);

std::tuple<Tensor, Tensor, Tensor> residual_add_forward(const Tensor& x, const Tensor& branch,
                                                        bool with_stats);

}  // namespace preact_kernels::cuda
