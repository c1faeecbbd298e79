// What the launches of a run of units share.
#pragma once

#include <vector>

#include "exact_sums.cuh"
#include "on_device.h"
#include "weight_gradient_partials.cuh"

namespace preact_kernels {

struct Run {
  std::vector<const void*> weights;  // of each unit, [K][taps][C] in the dtype of the activations
  std::vector<Tensor> owners;        // of that memory and of the sums
  Accumulators sums;                 // of all units
  bool has_launched = false;         // the last launch on the stream is a convolution of this run
  cuda::WeightGradientPartials partials{};  // of the last backward, not added up yet
  std::optional<Tensor> partials_owner;
};

}  // namespace preact_kernels
