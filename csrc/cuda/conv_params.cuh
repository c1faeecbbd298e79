// Parameters of the convolution kernels of narrow channels. Images are dense in NHWC order and
// aligned to 16 bytes, statistics [channels].
#pragma once

#include "conv_tile.cuh"

namespace preact_kernels::cuda {

struct NormActConvForward {
  const void* x;
  NormPointers norm;
  const void* weight;    // [K][taps][C]
  const void* residual;  // shaped like y, or null
  void* y;
  Accumulators statistics;  // sums of y and of its squares; absent if not wanted
  int in_channels, out_channels;
  TileGrid grid;
  bool is_dependent;  // see `launch`
};

struct NormActConvBackward {
  const void* dy;  // g of the step, in the dtype of products, if there is a step
  AffineStepPointers step;
  const void* x;
  NormPointers norm;
  const void* weight;  // [K][taps][C]
  void* g;             // dtype of products; null if not wanted
  void* whole_dy;      // null if not wanted
  Accumulators sums;   // sum(g), sum(g * xhat)
  float* partials;     // [thread blocks][taps][K][C]: weight gradients of thread blocks
  int in_channels, out_channels;
  int tensors;  // see BackwardShared
  TileGrid grid;
  bool is_dependent;  // see `launch`
};

// Several convolutions, one per row of the grid.
constexpr int kMostWeightGradients = 64;
struct WeightGradients {
  NormActConvBackward of[kMostWeightGradients];
};
static_assert(sizeof(WeightGradients) <= 32764, "more parameters than a kernel may have");

}  // namespace preact_kernels::cuda
