// The arguments that hold tensors, named as in preact_kernels/kernels/contract.py: see args.h.
#pragma once

#include <optional>

#include "args.h"
#include "host/torch.h"

namespace preact_kernels {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A norm and the activation after it. Every tensor is [C], or [N, C] with a row for each image, in
// the statistics dtype.
struct Norm {
  Tensor mean, var, weight;
  std::optional<Tensor> bias;  // absent in an AffineStep, which does not read it
  double eps;
  Activation activation = {};
  Accumulators moments = {};  // if present: sums of values and squares, in place of mean and var

  // Whether a tensor has a row for each image.
  bool has_rows() const {
    return mean.dim() == 2 || var.dim() == 2 || weight.dim() == 2 ||
           (bias.has_value() && bias->dim() == 2);
  }
};

// A deferred affine gradient: if g is the gradient of an activation's input, the gradient of the
// norm's input is [skip +] A*g + B*(x - mean) + C. The consumer computes it.
struct AffineStep {
  std::optional<Tensor> skip;
  Tensor x;  // the input of the batch norm
  Norm norm;
  Tensor sums;       // [2, C]: sum(g), sum(g * xhat); pooled [2, N, C] if the norm has rows
  double inv_count;  // 1 / (N*H*W), or 0 in evaluation mode: B and C are then 0
  Accumulators accumulated = {};  // `sums` are computed from these, if present

  // Whether the norm has rows, also if only its bias, which is absent here, has them.
  bool has_rows() const { return sums.dim() == 3; }
};

struct Gradient {
  Tensor g;
  std::optional<AffineStep> step;  // absent if g is the whole gradient

  // The dtype of the whole gradient.
  ScalarType dtype() const { return (step.has_value() ? step->x : g).scalar_type(); }
};

// The dtypes of a convolution: of products, of x, and of y or its gradient.
struct ConvDtypes {
  ScalarType products, x, y;
};

// The tensors that a unit convolves.
struct Inputs {
  Tensor x;
  Norm norm;
  Tensor conv_weight;
};

// Addends of a forward's fused epilogue.
struct Epilogue {
  std::optional<Tensor> conv_bias, residual;
};

// Mean and biased variance of a tensor; outputs that are not wanted are empty tensors.
struct Statistics {
  Tensor mean, var;
  bool are_wanted = false;
  Accumulators moments = {};
};

struct Output {
  Tensor y;
  Statistics statistics;
};

// Results of a unit's backward; those that are not wanted are empty tensors.
struct Gradients {
  Wanted wanted;
  Tensor conv_weight, sums;
  Accumulators accumulated;     // see AffineStep
  std::optional<Tensor> g, dy;  // allocated by unit_backward
};

}  // namespace preact_kernels
