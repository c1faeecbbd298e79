// Data that the launches of one native call share: packed weights and unfinished sums. Each library
// defines it.
#pragma once

#include <memory>

#include "tensors.h"

namespace preact_kernels {

struct Workspace;

// `dtype` is the dtype of products, `sums` the number of sums over pixels that kernels compute.
std::shared_ptr<Workspace> new_workspace(const Tensor& like, ScalarType dtype,
                                         const std::vector<Tensor>& conv_weights, int64_t sums);

// The sums, initially zero; null if kernels write the tensors themselves.
Accumulators sums_of(const Workspace& workspace);

// Fills mean and var of tensors with `count` pixels from the sums, if there are any.
void finish_statistics(Workspace& workspace, const Tensor& mean, const Tensor& var, int64_t count);

// Fills `sums` from the workspace's, if there are any, and unfinished weight gradients.
void finish_gradients(Workspace& workspace, const Tensor& like, const Tensor& sums);

}  // namespace preact_kernels
