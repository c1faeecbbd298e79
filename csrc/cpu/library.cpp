// Registers the ops of the CPU library.

#include "../host/library.h"

#include "isa.h"
#include "weight_stationary.h"

namespace preact_kernels {
void running_stats_update(const std::vector<Tensor>& running, const std::vector<Tensor>& batch,
                          double momentum);  // bn_stats.cpp
}

using namespace preact_kernels;

// The chosen `Isa`.
static int64_t instruction_set() { return static_cast<int64_t>(isa()); }

// Whether a convolution of `x` is weight-stationary.
static bool is_weight_stationary_conv(const Tensor& x, const Tensor& conv_weight,
                                      const std::vector<int64_t>& stride) {
  const ScalarType dtype = x.scalar_type();
  return is_weight_stationary(check_conv(x, conv_weight, entry::stride_of(stride), dtype, dtype));
}

STABLE_TORCH_LIBRARY(preact_kernels_cpu, m) {
  define_ops(m);
  m.def("instruction_set() -> int");
  m.def("is_weight_stationary(Tensor x, Tensor conv_weight, int[] stride) -> bool");
  m.def("running_stats_update(Tensor(a!)[] running, Tensor[] batch, float momentum) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(preact_kernels_cpu, CompositeExplicitAutograd, m) {
  m.impl("instruction_set", TORCH_BOX(&instruction_set));
}

STABLE_TORCH_LIBRARY_IMPL(preact_kernels_cpu, CPU, m) {
  implement_ops(m);
  m.impl("is_weight_stationary", TORCH_BOX(&is_weight_stationary_conv));
  m.impl("running_stats_update", TORCH_BOX(&running_stats_update));
}
