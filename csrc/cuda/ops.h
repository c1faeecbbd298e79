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

// Whether the fused convolutions below take such a weight on its device, for stride 1, the padding
// that keeps the image's size, and one group.
bool bn_relu_conv_is_served(const Tensor& conv_weight);

std::tuple<Tensor, Tensor, Tensor> bn_relu_conv_forward(const Tensor& x, const Tensor& mean,
                                                        const Tensor& var, const Tensor& bn_weight,
                                                        const Tensor& bn_bias, double eps,
                                                        const Tensor& conv_weight,
                                                        const std::optional<Tensor>& residual,
                                                        bool with_stats);

std::tuple<Tensor, Tensor, Tensor, Tensor> bn_relu_conv_backward(
    const Tensor& dy, const std::optional<Tensor>& skip, const std::optional<Tensor>& z,
    const std::optional<Tensor>& z_mean, const std::optional<Tensor>& z_var,
    const std::optional<Tensor>& z_weight, double z_eps, const std::optional<Tensor>& z_sums,
    double z_inv_count, const Tensor& x, const Tensor& mean, const Tensor& var,
    const Tensor& bn_weight, const Tensor& bn_bias, double eps, const Tensor& conv_weight,
    bool needs_g, bool needs_conv_weight, bool needs_dz);

// The same two, with small results in tensors that the caller allocated.
struct BatchStatistics {
  Tensor mean, var;
};
BatchStatistics empty_batch_statistics(const Tensor& x, int64_t channels);

Tensor bn_relu_conv_forward_into(const BatchStatistics& of_y, const Tensor& x, const Tensor& mean,
                                 const Tensor& var, const Tensor& bn_weight, const Tensor& bn_bias,
                                 double eps, const Tensor& conv_weight,
                                 const std::optional<Tensor>& residual, bool with_stats);

struct ParameterGradients {
  Tensor conv_weight, sums;
};
ParameterGradients empty_parameter_gradients(const Tensor& x, const Tensor& conv_weight,
                                             bool needs_g, bool needs_conv_weight);

std::tuple<Tensor, Tensor> bn_relu_conv_backward_into(
    const ParameterGradients& gradients, const Tensor& dy, const std::optional<Tensor>& skip,
    const std::optional<Tensor>& z, const std::optional<Tensor>& z_mean,
    const std::optional<Tensor>& z_var, const std::optional<Tensor>& z_weight, double z_eps,
    const std::optional<Tensor>& z_sums, double z_inv_count, const Tensor& x, const Tensor& mean,
    const Tensor& var, const Tensor& bn_weight, const Tensor& bn_bias, double eps,
    const Tensor& conv_weight, bool needs_g, bool needs_conv_weight, bool needs_dz);

std::tuple<Tensor, Tensor, Tensor> residual_add_forward(const Tensor& x, const Tensor& branch,
                                                        bool with_stats);

}  // namespace preact_kernels::cuda
