// Schemas and registration of the native ops, nothing else.
//
// They have a namespace of their own: `preact_kernels::` are the ops above the choice of a backend
// (preact_kernels/ops/schema.py), of which this library is one.

#include <torch/csrc/stable/library.h>

#include "cpu/ops.h"

using namespace preact_kernels;

#define BN "Tensor mean, Tensor var, Tensor bn_weight, Tensor bn_bias, float eps"

STABLE_TORCH_LIBRARY(preact_kernels_cpu, m) {
  m.def("vector_bytes() -> int");
  m.def("bn_stats(Tensor x) -> (Tensor, Tensor)");
  m.def("running_stats_update(Tensor(a!)[] running, Tensor[] batch, float momentum) -> ()");
  m.def("bn_relu_forward(Tensor x, " BN ") -> Tensor");
  m.def("bn_relu_backward_sums(Tensor dy, Tensor x, " BN ") -> Tensor");
  m.def("bn_relu_backward_mask(Tensor dy, Tensor x, " BN ") -> (Tensor, Tensor)");
  m.def("bn_relu_backward_input(Tensor dy, Tensor x, " BN
        ", Tensor sums, float inv_count) -> Tensor");
  m.def(
      "bn_input_gradient(Tensor? dy, Tensor g, Tensor x, Tensor mean, Tensor var, "
      "Tensor bn_weight, float eps, Tensor sums, float inv_count) -> Tensor");
  m.def("bn_relu_conv_forward(Tensor x, " BN
        ", Tensor conv_weight, Tensor? conv_bias, Tensor? residual, bool with_stats)"
        " -> (Tensor, Tensor, Tensor)");
  m.def(
      "bn_relu_conv_backward(Tensor dy, Tensor? skip, Tensor? z, Tensor? z_mean, Tensor? z_var, "
      "Tensor? z_weight, float z_eps, Tensor? z_sums, float z_inv_count, Tensor x, " BN
      ", Tensor conv_weight, bool needs_g, bool needs_conv_weight, bool needs_dz)"
      " -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "preact_stage_forward(Tensor x, Tensor[] x_statistics, Tensor[] parameters, Tensor[] known, "
      "float[] eps, int units_per_block, bool with_stats, bool keep_inputs, "
      "bool keep_block_inputs) -> Tensor[]");
  m.def(
      "preact_stage_backward(Tensor dy, Tensor? skip, Tensor? z, Tensor? z_mean, Tensor? z_var, "
      "Tensor? z_weight, float z_eps, Tensor? z_sums, float z_inv_count, Tensor[] inputs, "
      "Tensor[] statistics, Tensor[] parameters, float[] eps, float inv_count, "
      "int units_per_block, Tensor? y, Tensor[] negated) -> Tensor[]");
  m.def(
      "residual_add_forward(Tensor x, Tensor branch, bool with_stats)"
      " -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(preact_kernels_cpu, CompositeExplicitAutograd, m) {
  m.impl("vector_bytes", TORCH_BOX(&vector_bytes));
}

STABLE_TORCH_LIBRARY_IMPL(preact_kernels_cpu, CPU, m) {
  m.impl("bn_stats", TORCH_BOX(&bn_stats));
  m.impl("running_stats_update", TORCH_BOX(&running_stats_update));
  m.impl("bn_relu_forward", TORCH_BOX(&bn_relu_forward));
  m.impl("bn_relu_backward_sums", TORCH_BOX(&bn_relu_backward_sums));
  m.impl("bn_relu_backward_mask", TORCH_BOX(&bn_relu_backward_mask));
  m.impl("bn_relu_backward_input", TORCH_BOX(&bn_relu_backward_input));
  m.impl("bn_input_gradient", TORCH_BOX(&bn_input_gradient));
  m.impl("bn_relu_conv_forward", TORCH_BOX(&bn_relu_conv_forward));
  m.impl("bn_relu_conv_backward", TORCH_BOX(&bn_relu_conv_backward));
  m.impl("preact_stage_forward", TORCH_BOX(&preact_stage_forward));
  m.impl("preact_stage_backward", TORCH_BOX(&preact_stage_backward));
  m.impl("residual_add_forward", TORCH_BOX(&residual_add_forward));
}
