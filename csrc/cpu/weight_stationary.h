// Convolutions with large weights beside few activations: see image_groups.h.
#pragma once

#include "../host/launch.h"
#include "conv_strips.h"

namespace preact_kernels {

// Strips are as fast for weights of at most this many elements, and beside activations, before and
// after the convolution, of more elements than these: in all, and for each of the weight. The
// operands of all pixels are in memory at once: they must not be large.
constexpr int64_t kSmallWeight = 64 * 1024;
constexpr int64_t kFewActivations = 2 * 1024 * 1024;
constexpr int64_t kFewActivationsPerWeight = 4;

// Whether a convolution is weight-stationary, not one of strips.
bool is_weight_stationary(const ConvSizes& conv);

// As launch_bn_relu_conv_forward, without packed weights.
template <class T>
void stationary_forward(const ConvForward<T>& op, const Tensor& conv_weight,
                        const Statistics& of_y);

// As launch_bn_relu_conv_backward, without packed weights.
template <class T>
void stationary_backward(const ConvBackward<T>& op, const Tensor& conv_weight,
                         const UnitGradients& gradients);

}  // namespace preact_kernels
