// The arguments that hold tensors: see args.h.
#pragma once

#include <optional>

#include "args.h"
#include "host/torch.h"

namespace preact_kernels {

using torch::stable::Tensor;

// A batch norm. Every tensor is [C], in the statistics dtype.
struct Norm {
  Tensor mean, var, weight;
  std::optional<Tensor> bias;  // absent where only the input gradient is computed
  double eps;
  Accumulators moments = {};  // of mean and var: the sums of the values and of their squares
};

// Turns g, the gradient behind a ReLU mask, into the gradient of the batch norm's input:
// [skip +] A*g + B*(x - mean) + C. The gradient is folded until a kernel computes this.
struct Fold {
  std::optional<Tensor> skip;
  Tensor x;  // the input of the batch norm
  Norm norm;
  Tensor sums;                    // [2, C]: sum(g), sum(g * xhat)
  double inv_count;               // 1 / (N*H*W), or 0 in evaluation mode: B and C are then 0
  Accumulators accumulated = {};  // of sums
};

// The g of a fold that was not stored: [p > 0] * dz * weight for a 1x1 convolution of relu(p), the
// gradient dz of whose output is folded.
struct RecomputedG {
  Fold fold;       // of dz, without skip
  Tensor bn_bias;  // of the batch norm that p is from, which is that of the fold of g
  size_t weight;   // its index in the run
};

}  // namespace preact_kernels
