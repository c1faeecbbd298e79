// An op for the tests of the harness: where what it launches runs between what torch does.

#include "cuda/on_device.h"

using namespace preact_kernels;
using namespace preact_kernels::cuda;

namespace {

struct Params {
  const float* in;
  float* out;
  int count;
};

__global__ void twice_kernel(Params p) {
  for (int i = threadIdx.x; i < p.count; i += blockDim.x) p.out[i] = 2 * p.in[i];
}

// 2 * x, or what `after` says.
Tensor planted(const Tensor& x, std::string after) {
  const int count = static_cast<int>(x.numel());
  Tensor y = torch::stable::empty_like(x);
  Tensor in = x;
  if (after == "memory was freed") {  // in place of x
    in = torch::stable::empty_like(x);
    launch("twice", twice_kernel, 1, 64, 0, nullptr,
           Params{data<float>(x), mutable_data<float>(in), count});
  }
  launch("twice", twice_kernel, 1, 64, 0, nullptr,
         Params{data<float>(in), mutable_data<float>(y), count});
  in = x;
  if (after == "memory was freed") torch::stable::empty_like(x);
  if (after == "a copy") return torch::stable::clone(y);
  if (after == "a write to the input") {
    launch("twice", twice_kernel, 1, 64, 0, nullptr,
           Params{data<float>(y), mutable_data<float>(x), count});
    STD_TORCH_CHECK(false, "after a launch");
  }
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY(cuda_on_host_planted, m) { m.def("planted(Tensor x, str after) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(cuda_on_host_planted, PK_DISPATCH_KEY, m) {
  m.impl("planted", TORCH_BOX(&planted));
}
