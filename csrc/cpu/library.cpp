// Registers the ops of the CPU library.

#include "../host/library.h"

#include "isa.h"

namespace preact_kernels {
void running_stats_update(const std::vector<Tensor>& running, const std::vector<Tensor>& batch,
                          double momentum);  // bn_stats.cpp
}

using namespace preact_kernels;

// The chosen `Isa`.
static int64_t instruction_set() { return static_cast<int64_t>(isa()); }

STABLE_TORCH_LIBRARY(preact_kernels_cpu, m) {
  define_ops(m);
  m.def("instruction_set() -> int");
  m.def("running_stats_update(Tensor(a!)[] running, Tensor[] batch, float momentum) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(preact_kernels_cpu, CompositeExplicitAutograd, m) {
  m.impl("instruction_set", TORCH_BOX(&instruction_set));
}

STABLE_TORCH_LIBRARY_IMPL(preact_kernels_cpu, CPU, m) {
  implement_ops(m);
  m.impl("running_stats_update", TORCH_BOX(&running_stats_update));
}
