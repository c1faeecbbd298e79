// Defines and registers the native ops of both libraries. The ops of preact_kernels/ops/schema.py
// choose between the libraries.
#pragma once

#include <torch/csrc/stable/library.h>

#include "block_run.h"

namespace preact_kernels {

template <class Library>
void define_ops(Library& m) {
  m.def("bn_stats(Tensor x) -> (Tensor, Tensor)");
  m.def("group_stats(Tensor x, int groups) -> (Tensor, Tensor)");
  m.def(
      "residual_add_forward(Tensor x, Tensor branch, bool with_stats, Tensor? bias)"
      " -> (Tensor, Tensor, Tensor)");
  m.def("norm_act_forward(Tensor x, " PK_NORM ", Tensor? residual) -> Tensor");
  m.def("norm_act_backward_sums(Tensor dy, Tensor x, " PK_NORM ", Tensor? y) -> Tensor");
  m.def("norm_act_backward_mask(Tensor dy, Tensor x, " PK_NORM ", Tensor? y) -> (Tensor, Tensor)");
  m.def("norm_act_recompute(Tensor dy, Tensor x, " PK_NORM ") -> (Tensor, Tensor)");
  m.def("norm_act_backward_input(Tensor dy, Tensor x, " PK_NORM
        ", Tensor sums, float inv_count, Tensor? skip) -> Tensor");
  m.def("norm_input_gradient(" PK_GRADIENT ") -> Tensor");
  m.def("norm_act_conv_forward(Tensor x, " PK_NORM
        ", Tensor conv_weight, int[] stride, Tensor? conv_bias, Tensor? residual, "
        "bool with_stats, ScalarType dtype) -> (Tensor, Tensor, Tensor)");
  m.def("norm_act_conv_backward(" PK_GRADIENT ", Tensor x, " PK_NORM
        ", Tensor conv_weight, int[] stride, bool wants_input, bool wants_weight, bool wants_dy, "
        "ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("block_run_forward(Tensor x, " PK_RUN
        ", bool with_stats, int[] kept_blocks, bool keep_unit_inputs) -> Tensor[]");
  m.def("block_run_backward(" PK_GRADIENT ", " PK_RUN
        ", Tensor[] inputs, int[] kept_blocks, float inv_count, Tensor? y, Tensor[] negated)"
        " -> Tensor[]");
}

// Registers the ops for every device and layout: the checks name the argument that is wrong, which
// PyTorch's dispatcher would not.
template <class Library>
void implement_ops(Library& m) {
  m.impl("bn_stats", TORCH_BOX(&bn_stats));
  m.impl("group_stats", TORCH_BOX(&group_stats));
  m.impl("residual_add_forward", TORCH_BOX(&residual_add_forward));
  m.impl("norm_act_forward", TORCH_BOX(&norm_act_forward));
  m.impl("norm_act_backward_sums", TORCH_BOX(&norm_act_backward_sums));
  m.impl("norm_act_backward_mask", TORCH_BOX(&norm_act_backward_mask));
  m.impl("norm_act_recompute", TORCH_BOX(&norm_act_recompute));
  m.impl("norm_act_backward_input", TORCH_BOX(&norm_act_backward_input));
  m.impl("norm_input_gradient", TORCH_BOX(&norm_input_gradient));
  m.impl("norm_act_conv_forward", TORCH_BOX(&norm_act_conv_forward));
  m.impl("norm_act_conv_backward", TORCH_BOX(&norm_act_conv_backward));
  m.impl("block_run_forward", TORCH_BOX(&block_run_forward));
  m.impl("block_run_backward", TORCH_BOX(&block_run_backward));
}

}  // namespace preact_kernels
