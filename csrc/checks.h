// Checks at the native entry points: each names the argument, what was expected and what was given.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>

namespace preact_kernels {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The device whose tensors the library serves that is being compiled.
#if defined(USE_CUDA)
constexpr const char* kDevice = "CUDA";
inline bool is_served(const Tensor& t) { return t.is_cuda(); }
#else
constexpr const char* kDevice = "CPU";
inline bool is_served(const Tensor& t) { return t.is_cpu(); }
#endif

// Sizes of an activation [N, C, H, W].
struct Activation {
  int64_t images, channels, height, width;
  int64_t pixels() const { return images * height * width; }
};

// A tensor [N, C, H, W] whose memory is dense in NHWC order.
inline Activation check_activation(const char* name, const Tensor& t) {
  STD_TORCH_CHECK(t.dim() == 4, name, ": expected 4 dimensions [N, C, H, W], got ", t.dim());
  STD_TORCH_CHECK(is_served(t), name, ": expected a ", kDevice, " tensor");
  const auto size = t.sizes();
  const auto stride = t.strides();
  int64_t expected = 1;
  for (const int axis : {1, 3, 2, 0}) {
    STD_TORCH_CHECK(size[axis] <= 1 || t.numel() == 0 || stride[axis] == expected, name,
                    ": expected memory dense in NHWC order, got stride ", stride[axis], " on axis ",
                    axis, " where ", expected, " was expected");
    expected *= size[axis];
  }
  STD_TORCH_CHECK(t.numel() > 0, name, ": expected at least one value, got none");
  return {size[0], size[1], size[2], size[3]};
}

inline void check_same_device(const char* name, const Tensor& t, const Tensor& like) {
  STD_TORCH_CHECK(is_served(t) && t.get_device_index() == like.get_device_index(), name,
                  ": expected a tensor on the device of x");
}

// The same sizes, dtype and device as another activation.
inline void check_like(const char* name, const Tensor& t, const char* like_name,
                       const Tensor& like) {
  check_activation(name, t);
  check_same_device(name, t, like);
  for (int axis = 0; axis < 4; ++axis) {
    STD_TORCH_CHECK(t.sizes()[axis] == like.sizes()[axis], name, ": expected size ",
                    like.sizes()[axis], " on axis ", axis, " to match ", like_name, ", got ",
                    t.sizes()[axis]);
  }
  STD_TORCH_CHECK(t.scalar_type() == like.scalar_type(), name, ": expected the dtype of ",
                  like_name);
}

// float64 beside float64 activations, float32 beside others.
inline ScalarType statistics_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// `count` contiguous values in the statistics dtype of `x`.
inline void check_statistics(const char* name, const Tensor& t, int64_t count, const Tensor& x) {
  STD_TORCH_CHECK(is_served(t) && t.is_contiguous(), name, ": expected a contiguous ", kDevice,
                  " tensor");
  check_same_device(name, t, x);
  STD_TORCH_CHECK(t.numel() == count, name, ": expected ", count, " values, got ", t.numel());
  STD_TORCH_CHECK(t.scalar_type() == statistics_dtype(x.scalar_type()), name,
                  ": expected the statistics dtype (float32, or float64 beside float64)");
}

}  // namespace preact_kernels
