// Weight-stationary convolutions: see image_groups.h.
#pragma once

#include "../host/launch.h"
#include "conv_strips.h"

namespace preact_kernels {

// Strips are as fast for weights of at most kSmallWeight elements, or with more values before
// and after the convolution than these limits, in total or per weight. A weight-stationary
// convolution has all operands in memory at once: they must be small.
constexpr int64_t kSmallWeight = 64 * 1024;
constexpr int64_t kFewValues = 2 * 1024 * 1024;
constexpr int64_t kFewValuesPerWeight = 4;

// With kernels/winograd.h, strips are faster from this many values per weight on. A backward
// needs more, as each thread sums its own weight gradient. The limits must not depend on the number
// of threads: outputs and input gradients would, too.
constexpr double kWinogradValues = 0.4, kWinogradBackwardValues = 0.8;

bool is_forward_stationary(const ConvSizes& conv, bool has_winograd);
bool is_backward_stationary(const ConvSizes& conv, bool has_winograd);

// Like launch_norm_act_conv_forward, without packed weights.
template <class T>
void stationary_forward(const ConvForward<T>& op, const Tensor& conv_weight,
                        const Statistics& of_y);

// Like launch_norm_act_conv_backward, without packed weights.
template <class T>
void stationary_backward(const ConvBackward<T>& op, const Tensor& conv_weight,
                         const Gradients& gradients);

}  // namespace preact_kernels
