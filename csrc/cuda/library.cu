// Registers the ops of the CUDA library.

#include "../host/library.h"
#include "device.cuh"

namespace preact_kernels {
bool bn_relu_conv_is_served(const Tensor& conv_weight, bool float32_stream);  // bn_relu_conv.cu
}

using namespace preact_kernels;

STABLE_TORCH_LIBRARY(preact_kernels_cuda, m) {
  define_ops(m);
  m.def("bn_relu_conv_is_served(Tensor conv_weight, bool float32_stream) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(preact_kernels_cuda, PK_DISPATCH_KEY, m) {
  implement_ops(m);
  m.impl("bn_relu_conv_is_served", TORCH_BOX(&bn_relu_conv_is_served));
}
