// Checks of the arguments of native ops. Each message names the argument, what was expected and
// what was given.
#pragma once

#include <algorithm>
#include <vector>

#include "../tensor_args.h"

namespace preact_kernels {

using torch::headeronly::ScalarType;

// The device that the library being compiled serves, and the dispatch key of its ops.
#if defined(USE_CUDA)
#define PK_DISPATCH_KEY CUDA
constexpr const char* kDevice = "CUDA";
inline bool is_served(const Tensor& t) { return t.is_cuda(); }
#else
#define PK_DISPATCH_KEY CPU
constexpr const char* kDevice = "CPU";
inline bool is_served(const Tensor& t) { return t.is_cpu(); }
#endif

// The dtypes of a convolution's tensors. In a backward, y stands for its gradient.
struct ConvDtypes {
  ScalarType operands, x, y;
};

// The dtype in which convolutions of `x` multiply: a half precision among the weights, else that of
// x. Beside one, the other may be float32.
inline ScalarType operand_dtype(const Tensor& x, const std::vector<Tensor>& conv_weights) {
  for (const Tensor& weight : conv_weights) {
    const ScalarType dtype = weight.scalar_type();
    if (dtype == ScalarType::BFloat16 || dtype == ScalarType::Half) return dtype;
  }
  return x.scalar_type();
}

// Throws unless the library has direct kernels for a convolution of these dtypes with this weight.
// Each library defines it.
void check_conv_is_served(const Conv& conv, const ConvDtypes& dtypes, const Tensor& conv_weight);

// Checks that a tensor is [N, C, H, W] with dense NHWC memory.
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

// Checks that an activation has the sizes and device of another.
inline void check_sizes_like(const char* name, const Tensor& t, const char* like_name,
                             const Tensor& like) {
  check_activation(name, t);
  check_same_device(name, t, like);
  for (int axis = 0; axis < 4; ++axis) {
    STD_TORCH_CHECK(t.sizes()[axis] == like.sizes()[axis], name, ": expected size ",
                    like.sizes()[axis], " on axis ", axis, " to match ", like_name, ", got ",
                    t.sizes()[axis]);
  }
}

// Also the dtype.
inline void check_like(const char* name, const Tensor& t, const char* like_name,
                       const Tensor& like) {
  check_sizes_like(name, t, like_name, like);
  STD_TORCH_CHECK(t.scalar_type() == like.scalar_type(), name, ": expected the dtype of ",
                  like_name);
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
                  ": expected the statistics dtype (float32, or float64 beside float64)");
}

// Checks the batch norm of `x`.
inline void check_norm(const Norm& norm, int64_t channels, const Tensor& x) {
  check_statistics("mean", norm.mean, channels, x);
  check_statistics("var", norm.var, channels, x);
  check_statistics("bn_weight", norm.weight, channels, x);
  if (norm.bias.has_value()) check_statistics("bn_bias", *norm.bias, channels, x);
}

// Checks a fold against its own x, whose sizes the caller has checked.
inline void check_fold(const Fold& fold, int64_t channels) {
  if (fold.skip.has_value()) check_like("skip", *fold.skip, "x", fold.x);
  check_norm(fold.norm, channels, fold.x);
  check_statistics("sums", fold.sums, 2 * channels, fold.x);
}

// The number of output channels of a weight [K, C, R, S].
inline int64_t check_out_channels(const Tensor& conv_weight) {
  STD_TORCH_CHECK(conv_weight.dim() == 4, "conv_weight: expected 4 dimensions [K, C, R, S], got ",
                  conv_weight.dim());
  return conv_weight.sizes()[0];
}

// Checks that the library serves the convolution of `x`.
inline Conv check_conv(const Tensor& x, const Tensor& conv_weight, Stride stride,
                       ScalarType operands, ScalarType y) {
  const Activation size = check_activation("x", x);
  const int64_t out_channels = check_out_channels(conv_weight);
  check_same_device("conv_weight", conv_weight, x);
  const auto shape = conv_weight.sizes();
  STD_TORCH_CHECK(shape[1] == size.channels, "conv_weight: expected in_channels ", size.channels,
                  " to match x, got ", shape[1]);
  // A longer stride than the image reads the same pixels.
  stride = {std::min(stride.h, size.height), std::min(stride.w, size.width)};
  const Conv conv{size.images,  size.height, size.width, shape[1],
                  out_channels, shape[2],    shape[3],   stride};
  check_conv_is_served(conv, {operands, x.scalar_type(), y}, conv_weight);
  return conv;
}

}  // namespace preact_kernels
