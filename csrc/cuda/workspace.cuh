// The workspace of a native call (host/workspace.h).
#pragma once

#include <vector>

#include "conv_params.cuh"
#include "on_device.h"
#include "weight_gradient_partials.cuh"

namespace preact_kernels {

// A weight gradient that is computed later, with others.
struct PostponedWeightGradient {
  ConvSizes conv;
  ConvDtypes dtypes;
  cuda::NormActConvBackward params;  // without partials
  std::vector<Tensor> owners;        // owners of the memory that `params` points to
  int64_t bytes;                     // bytes that only these owners keep alive
  Tensor conv_weight;                // the weight gradient
};

struct Workspace {
  ScalarType dtype;                  // dtype of products
  std::vector<const void*> weights;  // [K][taps][C] in that dtype, for each unit
  std::vector<Tensor> owners;        // owners of packed weights and sums
  Accumulators sums;                 // sums of all units
  // Whether the last launch on the stream is a kernel of this call that calls
  // `wait_for_predecessors`: weights were packed and sums zeroed before it began.
  bool has_launched = false;
  std::vector<cuda::WeightGradientPartials> partials;  // not added up yet
  std::vector<Tensor> partials_owners;                 // owners of their memory
  int64_t partials_bytes = 0;
  std::vector<PostponedWeightGradient> postponed;
  int64_t postponed_bytes = 0;

  // How to launch a kernel that calls `wait_for_predecessors`.
  cuda::LaunchKind launch_kind() const {
    return has_launched ? cuda::LaunchKind::kDependent : cuda::LaunchKind::kPlain;
  }
};

// The most bytes of partial sums, and of the inputs of postponed weight gradients, that are kept.
// The partial sums of postponed weight gradients are added up at once.
constexpr int64_t kMostBytes = 72 << 20;

// Memory for the partial weight gradients of `thread_blocks`. Their sum goes to `conv_weight`.
Tensor allocate_partials(const Tensor& conv_weight, int thread_blocks,
                         cuda::WeightGradientPartials& partials);

// Keeps partial weight gradients, which `memory` owns, until there are enough to add up.
void keep_partials(Workspace& workspace, const cuda::WeightGradientPartials& partials,
                   const Tensor& memory, cudaStream_t stream);

// Launches the postponed weight gradients if `bytes` more would be too many.
void make_room(Workspace& workspace, int64_t bytes, cudaStream_t stream);

// Keeps the inputs of a weight gradient until there are enough for a launch, or too many bytes.
void postpone(Workspace& workspace, const PostponedWeightGradient& postponed, cudaStream_t stream);

}  // namespace preact_kernels
