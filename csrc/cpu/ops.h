// The native ops: what library.cpp registers, and the files of this folder define.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "../checks.h"

namespace preact_kernels {

std::tuple<Tensor, Tensor> bn_stats(const Tensor& x);

// running = (1 - momentum) * running + momentum * batch, contiguous float32, for many at once.
void running_stats_update(const std::vector<Tensor>& running, const std::vector<Tensor>& batch,
                          double momentum);

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

// Stride 1, "same" padding of an odd kernel, one group, channels that fill vectors.
std::tuple<Tensor, Tensor, Tensor> bn_relu_conv_forward(
    const Tensor& x, const Tensor& mean, const Tensor& var, const Tensor& bn_weight,
    const Tensor& bn_bias, double eps, const Tensor& conv_weight,
    const std::optional<Tensor>& conv_bias, const std::optional<Tensor>& residual, bool with_stats);

std::tuple<Tensor, Tensor, Tensor, Tensor> bn_relu_conv_backward(
    const Tensor& dy, const std::optional<Tensor>& skip, const std::optional<Tensor>& z,
    const std::optional<Tensor>& z_mean, const std::optional<Tensor>& z_var,
    const std::optional<Tensor>& z_weight, double z_eps, const std::optional<Tensor>& z_sums,
    double z_inv_count, const Tensor& x, const Tensor& mean, const Tensor& var,
    const Tensor& bn_weight, const Tensor& bn_bias, double eps, const Tensor& conv_weight,
    bool needs_g, bool needs_conv_weight, bool needs_dz);

// The same two, with small results in tensors that the caller allocated: a stage does so ahead of
// its large tensors, which would otherwise leave holes of awkward sizes between those that stay.
struct BatchStatistics {
  Tensor mean, var;
};
// Of outputs with so many channels each, 0 where none are wanted.
std::vector<BatchStatistics> empty_batch_statistics(const Tensor& x,
                                                    const std::vector<int64_t>& channels);

Tensor bn_relu_conv_forward_into(const BatchStatistics& of_y, const Tensor& x, const Tensor& mean,
                                 const Tensor& var, const Tensor& bn_weight, const Tensor& bn_bias,
                                 double eps, const Tensor& conv_weight,
                                 const std::optional<Tensor>& conv_bias,
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

// Blocks of `units_per_block` units with identity shortcuts, as ops/preact_stage.py runs them.
// parameters: bn_weight, bn_bias, conv_weight of every unit. known: mean and var of every unit, or
// nothing where each takes its batch's; x_statistics: those of x then, where the caller has them.
// Returns y and its mean and var (without values unless `with_stats`); mean and var of every unit
// unless they are known; the inputs of the first units of blocks where `keep_block_inputs` and of
// the other units where `keep_inputs`. The first of these are x and x_statistics themselves.
std::vector<Tensor> preact_stage_forward(const Tensor& x, const std::vector<Tensor>& x_statistics,
                                         const std::vector<Tensor>& parameters,
                                         const std::vector<Tensor>& known,
                                         const std::vector<double>& eps, int64_t units_per_block,
                                         bool with_stats, bool keep_inputs, bool keep_block_inputs);

// Its backward from a gradient dy that may be folded (bn_relu_conv_backward). inputs: of all units;
// where the output y is given, those of first units are rebuilt from it, `x = y - F(z)`, and inputs
// are those of the others; negated: the weight of each block's last unit then, its sign changed.
// Returns g of the first unit and dy of the first block, of which dx = dy + the input gradient of
// the first batch norm; the input of the first block; then dconv_weight and the sums of g of every
// unit.
std::vector<Tensor> preact_stage_backward(
    const Tensor& dy, const std::optional<Tensor>& skip, const std::optional<Tensor>& z,
    const std::optional<Tensor>& z_mean, const std::optional<Tensor>& z_var,
    const std::optional<Tensor>& z_weight, double z_eps, const std::optional<Tensor>& z_sums,
    double z_inv_count, const std::vector<Tensor>& inputs, const std::vector<Tensor>& statistics,
    const std::vector<Tensor>& parameters, const std::vector<double>& eps, double inv_count,
    int64_t units_per_block, const std::optional<Tensor>& y, const std::vector<Tensor>& negated);

// Bytes of a vector register of the instruction set in force.
int64_t vector_bytes();

}  // namespace preact_kernels
