// Registers the ops of the CPU library.

#include "../host/library.h"

#include "conv_weights.h"
#include "dtypes.h"
#include "weight_stationary.h"

namespace preact_kernels {
Tensor dropout_bits(const Tensor& drawn);                               // dropout.cpp
void dropout(const Tensor& values, const Tensor& bits, double factor);  // dropout.cpp
Tensor transpose(const Tensor& x);                                      // transpose.cpp
std::tuple<Tensor, Tensor> norm_act_mask_recompute(const Tensor& dy, const Tensor& x,
                                                   PK_NORM_PARAMETERS);  // norm_act.cpp
Tensor depthwise_weight_gradient(const Tensor& dy, const Tensor& x,
                                 const std::vector<int64_t>& kernel,
                                 const std::vector<int64_t>& stride,
                                 const std::vector<int64_t>& padding,
                                 const std::vector<int64_t>& dilation);  // depthwise.cpp
void scaled_running_stats_update(const std::vector<Tensor>& running,
                                 const std::vector<Tensor>& batch, double momentum,
                                 const std::vector<double>& factors);  // bn_stats.cpp
}  // namespace preact_kernels

using namespace preact_kernels;

static std::string instruction_set() { return isa_name(); }

// Direct convolutions need channels in multiples of this.
static int64_t channel_multiple() { return vector_bytes() / static_cast<int64_t>(sizeof(float)); }

// The fields of `ConvLimits` in kernels/cpu.py.
static std::vector<int64_t> conv_limits() {
  return {Taps::kMost, kSmallWeight, kFewValues, kFewValuesPerWeight};
}

// Whether both passes of a convolution of `x` are weight-stationary; whether both use
// kernels/winograd.h, if that serves the values.
static std::tuple<bool, bool> conv_route(const Tensor& x, const Tensor& conv_weight,
                                         const std::vector<int64_t>& stride) {
  const ScalarType dtype = check_dtype("x", x);
  PK_CHECK(dtype != ScalarType::Double, "x: expected float32, bfloat16 or float16");
  const ConvSizes conv = one_unit(x, conv_weight, stride, {dtype, dtype, dtype})[0].conv;
  bool is_winograd = false;
  for_single_dtype(dtype, [&](auto value) { is_winograd = has_winograd<decltype(value)>(conv); });
  return {is_forward_stationary(conv, is_winograd) && is_backward_stationary(conv, is_winograd),
          is_winograd && !is_backward_stationary(conv, is_winograd)};
}

STABLE_TORCH_LIBRARY(preact_kernels_cpu, m) {
  define_ops(m);
  m.def("instruction_set() -> str");
  m.def("channel_multiple() -> int");
  m.def("conv_limits() -> int[]");
  m.def("conv_route(Tensor x, Tensor conv_weight, int[] stride) -> (bool, bool)");
  m.def("dropout_bits(Tensor drawn) -> Tensor");
  m.def("transpose(Tensor x) -> Tensor");
  m.def("norm_act_mask_recompute(Tensor(a!) dy, Tensor x, " PK_NORM ") -> (Tensor, Tensor)");
  m.def(
      "depthwise_weight_gradient(Tensor dy, Tensor x, int[] kernel, int[] stride, int[] padding, "
      "int[] dilation) -> Tensor");
  m.def("dropout_(Tensor(a!) values, Tensor bits, float factor) -> ()");
  m.def(
      "scaled_running_stats_update(Tensor(a!)[] running, Tensor[] batch, float momentum, "
      "float[] factors) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(preact_kernels_cpu, CompositeExplicitAutograd, m) {
  implement_ops(m);
  m.impl("instruction_set", TORCH_BOX(&instruction_set));
  m.impl("channel_multiple", TORCH_BOX(&channel_multiple));
  m.impl("conv_limits", TORCH_BOX(&conv_limits));
  m.impl("conv_route", TORCH_BOX(&conv_route));
  m.impl("dropout_bits", TORCH_BOX(&dropout_bits));
  m.impl("transpose", TORCH_BOX(&transpose));
  m.impl("depthwise_weight_gradient", TORCH_BOX(&depthwise_weight_gradient));
  m.impl("norm_act_mask_recompute", TORCH_BOX(&norm_act_mask_recompute));
  m.impl("dropout_", TORCH_BOX(&dropout));
  m.impl("scaled_running_stats_update", TORCH_BOX(&scaled_running_stats_update));
}
