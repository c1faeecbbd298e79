// Weight-stationary convolutions: see image_groups.h.
#pragma once

#include "../host/launch.h"
#include "conv_strips.h"

namespace preact_kernels {

// Strips are as fast for weights of at most kSmallWeight elements, and with more activations before
// and after the convolution: in all, or per weight. All operands are in memory at once: they must
// be small.
constexpr int64_t kSmallWeight = 64 * 1024;
constexpr int64_t kFewActivations = 2 * 1024 * 1024;
constexpr int64_t kFewActivationsPerWeight = 4;

// Strips are faster, by kernels/winograd.h, with this many activations per weight. In a backward,
// for each thread: each sums a weight gradient of its own.
constexpr double kWinogradActivationsPerWeight = 0.4;

bool is_weight_stationary(const ConvSizes& conv, bool has_winograd, int64_t threads);

// Like launch_norm_act_conv_forward, without packed weights.
template <class T>
void stationary_forward(const ConvForward<T>& op, const Tensor& conv_weight,
                        const Statistics& of_y);

// Like launch_norm_act_conv_backward, without packed weights.
template <class T>
void stationary_backward(const ConvBackward<T>& op, const Tensor& conv_weight,
                         const UnitGradients& gradients);

}  // namespace preact_kernels
