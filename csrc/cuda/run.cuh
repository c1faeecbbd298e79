// What the launches of a run of units share.
#pragma once

#include <vector>

#include "bn_relu_conv_backward.cuh"
#include "on_device.h"

namespace preact_kernels {

// A weight gradient that is computed apart from that of the input, with others of the run.
struct PostponedWeightGradient {
  Conv conv;
  ConvDtypes dtypes;
  cuda::BnReluConvBackward params;
  cuda::WeightGradientPartials partials;
  std::vector<Tensor> owners;  // of the memory that they point to
};

struct Run {
  ScalarType dtype;                  // of the convolutions' operands
  std::vector<const void*> weights;  // of each unit, [K][taps][C] in that dtype
  std::vector<Tensor> owners;        // of that memory and of the sums
  Accumulators sums;                 // of all units
  bool has_launched = false;         // the last launch on the stream is a convolution of this run
  cuda::WeightGradientPartials partials{};  // of the last backward, not added up yet
  std::optional<Tensor> partials_owner;
  std::vector<PostponedWeightGradient> postponed;
  int64_t postponed_bytes = 0;  // of their dy
};

// Computes and stores the weight gradients that were postponed.
void finish_postponed(Run& run, const Tensor& like);

}  // namespace preact_kernels
