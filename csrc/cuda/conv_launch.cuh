// Launch configuration of the convolutions of narrow channels: kernels, tiles, thread blocks,
// shared memory.
#pragma once

#include "../args.h"
#include "conv_params.cuh"

namespace preact_kernels {
struct ConvDtypes;
}

namespace preact_kernels::cuda {

// The most channels of a 3x3 convolution: more weights leave no shared memory for tiles.
template <class T>
constexpr int kMostChannels3x3 = sizeof(T) == 4 ? 32 : 64;

struct ForwardPlan {
  TileGrid grid;
  int thread_blocks, shared_bytes;
  void (*kernel)(NormActConvForward);
};

struct BackwardTask {
  int tensors;  // see BackwardShared
  bool of_input, of_weight;
};

struct BackwardPlan {
  TileGrid grid;
  int thread_blocks, shared_bytes;
  // One of the two is set, depending on the task.
  void (*kernel)(NormActConvBackward) = nullptr;
  void (*weight_gradients_kernel)(WeightGradients) = nullptr;
};

// Instantiated by one source per dtype, and one per half precision dtype with a float32 stream.
template <class Types>
ForwardPlan plan_norm_act_conv_forward(const ConvSizes& conv);
template <class Types>
BackwardPlan plan_norm_act_conv_backward(const ConvSizes& conv, const BackwardTask& task);

BackwardPlan plan_norm_act_conv_backward(const ConvSizes& conv, const ConvDtypes& dtypes,
                                         const BackwardTask& task);

}  // namespace preact_kernels::cuda
