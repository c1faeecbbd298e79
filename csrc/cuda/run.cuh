// What the launches of a run of units share.
#pragma once

#include <vector>

#include "bn_relu_conv_backward.cuh"
#include "on_device.h"
#include "weight_gradient_partials.cuh"

namespace preact_kernels {

// A weight gradient that is computed apart from that of the input, with others of the run.
struct PostponedWeightGradient {
  Conv conv;
  ConvDtypes dtypes;
  cuda::BnReluConvBackward params;
  std::vector<Tensor> owners;  // of the memory that they point to
  cuda::WeightGradientPartials partials;
  Tensor partials_owner;
};

struct Run {
  ScalarType dtype;                  // of the convolutions' operands
  std::vector<const void*> weights;  // of each unit, [K][taps][C] in that dtype
  std::vector<Tensor> owners;        // of that memory and of the sums
  Accumulators sums;                 // of all units
  bool has_launched = false;         // the last launch on the stream is a kernel of this run
  std::vector<cuda::WeightGradientPartials> partials;  // not added up yet
  std::vector<Tensor> partials_owners;                 // of their memory
  int64_t partials_bytes = 0;
  std::vector<PostponedWeightGradient> postponed;
};

// Keeps partial weight gradients, which `memory` owns, until there are enough to add up.
void keep_partials(Run& run, const cuda::WeightGradientPartials& partials, const Tensor& memory,
                   cudaStream_t stream);

// Keeps what a weight gradient is computed from until there are enough for a launch.
void postpone(Run& run, const PostponedWeightGradient& postponed, cudaStream_t stream);

}  // namespace preact_kernels
