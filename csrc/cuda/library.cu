// Schemas and registration of the ops of the CUDA library, nothing else.

#include <torch/csrc/stable/library.h>

#include "device.cuh"
#include "ops.h"

using namespace preact_kernels::cuda;

#define BN "Tensor mean, Tensor var, Tensor bn_weight, Tensor bn_bias, float eps"

STABLE_TORCH_LIBRARY(preact_kernels_cuda, m) {
  m.def("bn_stats(Tensor x) -> (Tensor, Tensor)");
  m.def("bn_relu_forward(Tensor x, " BN ") -> Tensor");
  m.def("bn_relu_backward_sums(Tensor dy, Tensor x, " BN ") -> Tensor");
  m.def("bn_relu_backward_mask(Tensor dy, Tensor x, " BN ") -> (Tensor, Tensor)");
  m.def("bn_relu_backward_input(Tensor dy, Tensor x, " BN
        ", Tensor sums, float inv_count) -> Tensor");
  m.def(
      "bn_input_gradient(Tensor? dy, Tensor g, Tensor x, Tensor mean, Tensor var, "
      "Tensor bn_weight, float eps, Tensor sums, float inv_count) -> Tensor");
  m.def("bn_relu_conv_is_served(Tensor conv_weight) -> bool");
  m.def("bn_relu_conv_forward(Tensor x, " BN
        ", Tensor conv_weight, Tensor? residual, bool with_stats) -> (Tensor, Tensor, Tensor)");
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

STABLE_TORCH_LIBRARY_IMPL(preact_kernels_cuda, PK_DISPATCH_KEY, m) {
  m.impl("bn_stats", TORCH_BOX(&bn_stats));
  m.impl("bn_relu_forward", TORCH_BOX(&bn_relu_forward));
  m.impl("bn_relu_backward_sums", TORCH_BOX(&bn_relu_backward_sums));
  m.impl("bn_relu_backward_mask", TORCH_BOX(&bn_relu_backward_mask));
  m.impl("bn_relu_backward_input", TORCH_BOX(&bn_relu_backward_input));
  m.impl("bn_input_gradient", TORCH_BOX(&bn_input_gradient));
  m.impl("bn_relu_conv_is_served", TORCH_BOX(&bn_relu_conv_is_served));
  m.impl("bn_relu_conv_forward", TORCH_BOX(&bn_relu_conv_forward));
  m.impl("bn_relu_conv_backward", TORCH_BOX(&bn_relu_conv_backward));
  m.impl("preact_stage_forward", TORCH_BOX(&preact_stage_forward));
  m.impl("preact_stage_backward", TORCH_BOX(&preact_stage_backward));
  m.impl("residual_add_forward", TORCH_BOX(&residual_add_forward));
}
