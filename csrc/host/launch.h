// The functions that each library defines for its device: csrc/cpu/*.cpp and csrc/cuda/*.cu.
// Arguments were checked and outputs allocated by the caller.
#pragma once

#include <memory>

#include "tensors.h"

namespace preact_kernels {

// What the launches of a run of units share: weights in the kernels' own layout, sums that are not
// finished. Each library defines it.
struct Run;

// `dtype` is that of the convolutions' operands, `sums` the number of sums over pixels that the
// run's kernels compute.
std::shared_ptr<Run> begin_run(const Tensor& like, ScalarType dtype,
                               const std::vector<Tensor>& conv_weights, int64_t sums);

// The sums of a run, which are zeros; none where kernels write the tensors themselves.
Accumulators sums_of(const Run& run);

// Fills the statistics of tensors with `count` pixels from the run's sums, if it has any.
void finish_statistics(Run& run, const Tensor& mean, const Tensor& var, int64_t count);

// Fills `sums` from those of the run, if it has any, and the weight gradients that are not
// finished.
void finish_gradients(Run& run, const Tensor& like, const Tensor& sums);

// A unit of a run, by the index of its weight.
struct UnitOfRun {
  Run& run;
  size_t weight;
  ScalarType dtype;           // of the operands
  bool is_x_rebuilt = false;  // a postponed weight gradient alone keeps x alive
};

void launch_bn_stats(const Activation& size, const Tensor& x, const BatchStatistics& of_x);

// y = x + branch, and the statistics of y where they are wanted.
void launch_residual_add_forward(const Activation& size, const Tensor& x, const Tensor& branch,
                                 const Tensor& y, const BatchStatistics& of_y);

// y = relu(p) for p = (x - mean) * scale + bias.
void launch_bn_relu_forward(const Activation& size, const Tensor& x, const Norm& norm,
                            const Tensor& y);

// g = dy * [p > 0] where `g` is given, and sums [2, C] of g and of g * xhat.
void launch_bn_relu_backward_mask(const Activation& size, const Tensor& dy, const Tensor& x,
                                  const Norm& norm, const Tensor* g, const Tensor& sums);

// dx = [skip +] A*g + B*(x - mean) + C. Where the norm has a bias, g is dy and is masked first.
void launch_bn_input_gradient(const Activation& size, const Tensor& g, const Fold& fold,
                              const Tensor& dx);

// y = conv(relu(p)) [+ conv_bias] [+ residual], and the statistics of y where they are wanted.
void launch_bn_relu_conv_forward(const Conv& conv, const Tensor& x, const Norm& norm,
                                 const Tensor& conv_weight, const std::optional<Tensor>& conv_bias,
                                 const std::optional<Tensor>& residual, const Tensor& y,
                                 const BatchStatistics& of_y, UnitOfRun unit);

// g = dgrad(dy) * [p > 0] with its sums, the gradient of the weight, and dy itself: each where it
// is wanted. With a fold, `dy` is the g that the fold applies to; with `recomputed_g` beside it,
// the g that the fold in there applies to.
void launch_bn_relu_conv_backward(const Conv& conv, const Tensor& dy,
                                  const std::optional<Fold>& fold,
                                  const std::optional<RecomputedG>& recomputed_g, const Tensor& x,
                                  const Norm& norm, const Tensor& conv_weight,
                                  const UnitGradients& gradients, UnitOfRun unit);

// Whether the backward of `conv`, whose input is `x`, recomputes the g of its fold, which is that
// of the convolution `conv_of_g`.
bool recomputes_g(const Conv& conv, const Conv& conv_of_g, const ConvDtypes& dtypes,
                  const Tensor& x);

}  // namespace preact_kernels
