// Checks of the arguments of native ops. Each message names the argument, what was expected and
// what was given.
#pragma once

#include <algorithm>
#include <vector>

#include "../tensor_args.h"

namespace preact_kernels {

// The device that the library being compiled serves, and the dispatch key of its ops.
#if defined(USE_CUDA)
#define PK_DISPATCH_KEY CUDA
constexpr const char* kDevice = "CUDA";
constexpr bool kServesPlanes = false;
inline bool is_served(const Tensor& t) { return t.is_cuda(); }
#else
#define PK_DISPATCH_KEY CPU
constexpr const char* kDevice = "CPU";
#if defined(PK_CUDA_ON_HOST)
constexpr bool kServesPlanes = false;
#else
constexpr bool kServesPlanes = true;
#endif
inline bool is_served(const Tensor& t) { return t.is_cpu(); }
#endif

// Throws unless the library serves a convolution of these dtypes with this weight. Each library
// defines it.
void check_conv_is_served(const ConvSizes& conv, const ConvDtypes& dtypes,
                          const Tensor& conv_weight);

// Whether [N, C, H, W] is planar: not in NHWC order, where the library serves NCHW too.
inline bool is_planar(const Tensor& t) {
  const auto size = t.sizes();
  return kServesPlanes && size.size() == 4 && size[1] > 1 && size[2] * size[3] > 1 &&
         t.strides()[1] != 1;
}

// Checks that a tensor is [N, C, H, W] with dense NHWC memory, or NCHW if `planar`.
inline Activation check_activation(const char* name, const Tensor& t, bool planar = false) {
  STD_TORCH_CHECK(t.dim() == 4, name, ": expected 4 dimensions [N, C, H, W], got ", t.dim());
  STD_TORCH_CHECK(is_served(t), name, ": expected a ", kDevice, " tensor");
  const auto size = t.sizes();
  const auto stride = t.strides();
  constexpr int kNhwc[] = {1, 3, 2, 0}, kNchw[] = {3, 2, 1, 0};  // the innermost first
  int64_t expected = 1;
  for (const int place : {0, 1, 2, 3}) {
    const int axis = (planar ? kNchw : kNhwc)[place];
    STD_TORCH_CHECK(size[axis] <= 1 || t.numel() == 0 || stride[axis] == expected, name,
                    ": expected memory dense in ", planar ? "NCHW" : "NHWC", " order, got stride ",
                    stride[axis], " on axis ", axis, " where ", expected, " was expected");
    expected *= size[axis];
  }
  STD_TORCH_CHECK(t.numel() > 0, name, ": expected at least one value, got none");
  return {size[0], size[1], size[2], size[3]};
}

inline void check_same_device(const char* name, const Tensor& t, const Tensor& like) {
  STD_TORCH_CHECK(is_served(t) && t.get_device_index() == like.get_device_index(), name,
                  ": expected a tensor on the device of x");
}

// Checks an activation of these sizes on the device of `like`.
inline void check_sizes(const char* name, const Tensor& t, const Activation& size,
                        const Tensor& like, bool planar = false) {
  check_activation(name, t, planar);
  check_same_device(name, t, like);
  const int64_t expected[] = {size.images, size.channels, size.height, size.width};
  for (int axis = 0; axis < 4; ++axis) {
    STD_TORCH_CHECK(t.sizes()[axis] == expected[axis], name, ": expected size ", expected[axis],
                    " on axis ", axis, ", got ", t.sizes()[axis]);
  }
}

// Also the dtype of `like`.
inline void check_like(const char* name, const Tensor& t, const Activation& size,
                       const Tensor& like, bool planar = false) {
  check_sizes(name, t, size, like, planar);
  STD_TORCH_CHECK(t.scalar_type() == like.scalar_type(), name, ": expected the dtype of x");
}

// The dtype of statistics: float64 for float64 activations, float32 for all others.
inline ScalarType statistics_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Checks for `count` contiguous values in the statistics dtype of `x`.
inline void check_statistics(const char* name, const Tensor& t, int64_t count, const Tensor& x) {
  STD_TORCH_CHECK(is_served(t) && t.is_contiguous(), name, ": expected a contiguous ", kDevice,
                  " tensor");
  check_same_device(name, t, x);
  STD_TORCH_CHECK(t.numel() == count, name, ": expected ", count, " values, got ", t.numel());
  STD_TORCH_CHECK(t.scalar_type() == statistics_dtype(x.scalar_type()), name,
                  ": expected the statistics dtype (float32, or float64 with float64)");
}

// Checks for [C] or [N, C], contiguous, in the statistics dtype of `x`.
inline void check_table(const char* name, const Tensor& t, const Activation& size,
                        const Tensor& x) {
  STD_TORCH_CHECK(t.dim() == 1 || (t.dim() == 2 && t.sizes()[0] == size.images), name,
                  ": expected [C], or [N, C] with a row for each image");
  check_statistics(name, t, t.dim() == 1 ? size.channels : size.images * size.channels, x);
}

// Checks the norm of `x`.
inline void check_norm(const Norm& norm, const Activation& size, const Tensor& x) {
  check_table("mean", norm.mean, size, x);
  check_table("var", norm.var, size, x);
  check_table("bn_weight", norm.weight, size, x);
  if (norm.bias.has_value()) check_table("bn_bias", *norm.bias, size, x);
}

// Checks the step of a gradient of these sizes, on the device of `like`.
inline void check_step(const AffineStep& step, const Activation& size, const Tensor& like,
                       bool planar = false) {
  check_sizes("step_x", step.x, size, like, planar);
  if (step.skip.has_value()) check_like("skip", *step.skip, size, step.x, planar);
  check_norm(step.norm, size, step.x);
  STD_TORCH_CHECK(step.has_rows() || !step.norm.has_rows(),
                  "step_sums: expected [2, N, C] for a norm with rows");
  const int64_t rows = step.has_rows() ? size.images : 1;
  check_statistics("step_sums", step.sums, 2 * rows * size.channels, step.x);
}

// Checks that the library serves a convolution of activations on the device of `like`.
inline ConvSizes check_conv(const Activation& size, const Tensor& conv_weight, Stride stride,
                            const ConvDtypes& dtypes, const Tensor& like) {
  STD_TORCH_CHECK(conv_weight.dim() == 4, "conv_weight: expected 4 dimensions [K, C, R, S], got ",
                  conv_weight.dim());
  check_same_device("conv_weight", conv_weight, like);
  const auto shape = conv_weight.sizes();
  STD_TORCH_CHECK(shape[1] == size.channels, "conv_weight: expected in_channels ", size.channels,
                  " to match x, got ", shape[1]);
  // A stride longer than the image reads the same pixels.
  stride = {std::min(stride.h, size.height), std::min(stride.w, size.width)};
  const ConvSizes conv{size.images, size.height, size.width, shape[1],
                       shape[0],    shape[2],    shape[3],   stride};
  check_conv_is_served(conv, dtypes, conv_weight);
  return conv;
}

}  // namespace preact_kernels
