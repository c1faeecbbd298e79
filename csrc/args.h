// The arguments of every kernel, named once, as in preact_kernels/kernels/contract.py.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

namespace preact_kernels {

using torch::stable::Tensor;

// Sizes of an activation [N, C, H, W].
struct Activation {
  int64_t images, channels, height, width;
  int64_t pixels() const { return images * height * width; }
};

// Two sums per channel that kernels of a run add up, in the words of csrc/cuda/exact_sums.cuh. The
// tensors that they belong to get their values at the end of the run.
struct Accumulators {
  uint64_t* words = nullptr;  // null where those tensors have their values already
  int64_t second = 0;         // from a channel's first sum to its second
  int64_t stride = 0;         // from a word to the next
};

// A batch norm. Every tensor is [C], in the statistics dtype.
struct Norm {
  Tensor mean, var, weight;
  std::optional<Tensor> bias;  // absent where only the input gradient is computed
  double eps;
  Accumulators moments = {};  // of mean and var: the sums of the values and of their squares
};

// Sizes of a convolution with stride 1, one group, an odd kernel and "same" padding.
struct Conv {
  int64_t images, height, width, in_channels, out_channels, kernel_h, kernel_w;

  int64_t taps() const { return kernel_h * kernel_w; }
  int64_t halo_h() const { return kernel_h / 2; }
  int64_t halo_w() const { return kernel_w / 2; }
  int64_t pixels() const { return images * height * width; }
  Activation input() const { return {images, in_channels, height, width}; }
  Activation output() const { return {images, out_channels, height, width}; }
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
struct GradientProduct {
  Fold fold;      // of dz, without skip
  Norm norm;      // that p is from
  size_t weight;  // its index in the run
};

// Which gradients of bn_relu_conv the caller asks for.
struct Wanted {
  bool g;                // with its sums
  bool weight;           // of the convolution
  bool dy;               // the gradient of the convolution's output, unfolded
  bool stores_g = true;  // else only the sums of g
};

}  // namespace preact_kernels
