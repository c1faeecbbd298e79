// Checks of the arguments of native ops. Each message names the argument, what was expected and
// what was given.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <vector>

#include "../tensor_args.h"
#include "errors.h"

namespace preact_kernels {

// The device that the library being compiled serves.
#if defined(USE_CUDA)
constexpr const char* kDevice = "CUDA";
constexpr bool kServesPlanes = false;
inline bool is_served(const Tensor& t) { return t.is_cuda(); }
#else
constexpr const char* kDevice = "CPU";
#if defined(PK_CUDA_ON_HOST)
constexpr bool kServesPlanes = false;
#else
constexpr bool kServesPlanes = true;
#endif
inline bool is_served(const Tensor& t) { return t.is_cpu(); }
#endif

#if defined(USE_CUDA) || defined(PK_CUDA_ON_HOST)
constexpr const char* kDtypes = "float32, bfloat16 or float16";
constexpr bool kServesDouble = false;
#else
constexpr const char* kDtypes = "float32, float64, bfloat16 or float16";
constexpr bool kServesDouble = true;
#endif
inline bool is_served_dtype(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half ||
         (kServesDouble && dtype == ScalarType::Double);
}

// Throws unless the library serves this convolution; `name` is the argument that holds the weight.
// Each library defines it.
void check_conv_is_served(const char* name, const ConvSizes& conv, const ConvDtypes& dtypes,
                          const Tensor& conv_weight);

// Whether a tensor has sizes and strides.
inline bool is_strided(const Tensor& t) {
  return t.defined() && t.layout() == torch::headeronly::Layout::Strided;
}

// Whether torch's stable ABI has the dtype of a tensor; it lacks quantized ones.
inline bool has_known_dtype(const Tensor& t) {
  try {
    return t.scalar_type() != ScalarType::Undefined;
  } catch (const std::exception&) {
    return false;
  }
}

// Checks that a tensor is strided, on the library's device, and has memory for all of its values.
inline void check_tensor(const char* name, const Tensor& t) {
  PK_CHECK(t.defined(), name, ": expected a tensor, got none");
  PK_CHECK(is_served(t), name, ": expected a ", kDevice, " tensor");
  PK_CHECK(is_strided(t), name, ": expected a strided tensor");
  PK_CHECK(has_known_dtype(t), name, ": expected dtype ", kDtypes);
  const auto size = t.sizes(), stride = t.strides();
  int64_t last = t.storage_offset(), found = 0;  // elements, bytes
  for (size_t axis = 0; axis < size.size(); ++axis) {
    if (size[axis] == 0) return;
    last += (size[axis] - 1) * stride[axis];
  }
  const int64_t needed = (last + 1) * static_cast<int64_t>(t.element_size());
  PK_CHECK(aoti_torch_get_storage_size(t.get(), &found) == AOTI_TORCH_SUCCESS && found >= needed &&
               t.const_data_ptr() != nullptr,
           name, ": expected a storage of ", needed, " bytes or more, got ", found,
           "; was it freed or resized?");
}

// Checks a tensor and its dtype, and returns the dtype.
inline ScalarType check_dtype(const char* name, const Tensor& t) {
  check_tensor(name, t);
  const ScalarType dtype = t.scalar_type();
  PK_CHECK(is_served_dtype(dtype), name, ": expected dtype ", kDtypes);
  return dtype;
}

// Whether to treat [N, C, H, W] as NCHW: the library serves planes, and the memory is not NHWC.
inline bool is_planar(const Tensor& t) {
  if (!kServesPlanes || !is_strided(t)) return false;
  const auto size = t.sizes();
  return size.size() == 4 && size[1] > 1 && size[2] * size[3] > 1 && t.strides()[1] != 1;
}

// Checks that a tensor is [N, C, H, W] with dense NHWC memory, or NCHW if `planar`.
inline ImageSizes check_images(const char* name, const Tensor& t, bool planar = false) {
  check_dtype(name, t);
  PK_CHECK(t.dim() == 4, name, ": expected 4 dimensions [N, C, H, W], got ", t.dim());
  const auto size = t.sizes();
  const auto stride = t.strides();
  constexpr int kNhwc[] = {1, 3, 2, 0}, kNchw[] = {3, 2, 1, 0};  // the innermost first
  int64_t expected = 1;
  for (const int place : {0, 1, 2, 3}) {
    const int axis = (planar ? kNchw : kNhwc)[place];
    PK_CHECK(size[axis] <= 1 || t.numel() == 0 || stride[axis] == expected, name,
             ": expected memory dense in ", planar ? "NCHW" : "NHWC", " order, got stride ",
             stride[axis], " on axis ", axis, " where ", expected, " was expected");
    expected *= size[axis];
  }
  PK_CHECK(t.numel() > 0, name, ": expected at least one value, got none");
  return {size[0], size[1], size[2], size[3]};
}

// The tensor must have passed check_tensor.
inline void check_same_device(const char* name, const Tensor& t, const Tensor& like) {
  PK_CHECK(t.get_device_index() == like.get_device_index(), name,
           ": expected a tensor on the device of the others");
}

inline void check_shape(const char* name, const Tensor& t,
                        std::initializer_list<int64_t> expected) {
  const auto size = t.sizes();
  if (std::equal(size.begin(), size.end(), expected.begin(), expected.end())) return;
  const auto text = [](const auto& sizes) {
    std::ostringstream out;
    for (const int64_t s : sizes) out << (out.tellp() > 0 ? ", " : "") << s;
    return "[" + out.str() + "]";
  };
  fail(name, ": expected shape ", text(expected), ", got ", text(size));
}

// Checks a tensor of these sizes on the device of `like`.
inline void check_sizes(const char* name, const Tensor& t, const ImageSizes& size,
                        const Tensor& like, bool planar = false) {
  check_images(name, t, planar);
  check_same_device(name, t, like);
  check_shape(name, t, {size.images, size.channels, size.height, size.width});
}

// check_sizes, and the dtype of `like`.
inline void check_like(const char* name, const Tensor& t, const ImageSizes& size,
                       const Tensor& like, bool planar = false) {
  check_sizes(name, t, size, like, planar);
  PK_CHECK(t.scalar_type() == like.scalar_type(), name, ": expected the dtype of x");
}

// The dtype of statistics: float64 for float64, float32 for all others.
inline ScalarType statistics_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Checks that a tensor on the device of `x` is contiguous, in the statistics dtype of `x`.
inline void check_statistics(const char* name, const Tensor& t, const Tensor& x) {
  check_tensor(name, t);
  check_same_device(name, t, x);
  PK_CHECK(t.is_contiguous(), name, ": expected a contiguous tensor");
  PK_CHECK(t.scalar_type() == statistics_dtype(x.scalar_type()), name,
           ": expected the statistics dtype (float32, or float64 with float64)");
}

// check_statistics, and the shape [C] or [N, C].
inline void check_table(const char* name, const Tensor& t, const ImageSizes& size,
                        const Tensor& x) {
  check_statistics(name, t, x);
  if (t.dim() == 2) return check_shape(name, t, {size.images, size.channels});
  check_shape(name, t, {size.channels});
}

// Checks the dimensions of sums from a caller. In a run of blocks sums are [2 * C].
inline void check_sums(const char* name, const Tensor& sums) {
  check_tensor(name, sums);
  PK_CHECK(sums.dim() == 2 || sums.dim() == 3, name, ": expected [2, C] or [2, N, C]");
}

// Names of arguments in schemas.
struct NormNames {
  const char *mean, *var, *weight, *bias;
};
struct UnitNames {
  const char* x;
  NormNames norm;
  const char* conv_weight;
};
struct GradientNames {
  const char *g, *x;
  NormNames norm;
  const char* sums;
};
constexpr UnitNames kUnitNames{"x", {"mean", "var", "bn_weight", "bn_bias"}, "conv_weight"};
constexpr UnitNames kRunNames{
    "inputs", {"means", "variances", "bn_weights", "bn_biases"}, "conv_weights"};
constexpr GradientNames kGradientNames{
    "g", "step_x", {"step_mean", "step_var", "step_weight", ""}, "step_sums"};

inline void check_norm(const Norm& norm, const ImageSizes& size, const Tensor& x,
                       const NormNames& names = kUnitNames.norm) {
  check_table(names.mean, norm.mean, size, x);
  check_table(names.var, norm.var, size, x);
  check_table(names.weight, norm.weight, size, x);
  if (norm.bias.has_value()) check_table(names.bias, *norm.bias, size, x);
}

// Checks the dtypes of a gradient, and returns the dtype of the whole gradient.
inline ScalarType dtype_of(const Gradient& gradient) {
  const ScalarType dtype = check_dtype(kGradientNames.g, gradient.g);
  return gradient.step.has_value() ? check_dtype(kGradientNames.x, gradient.step->x) : dtype;
}

// Checks the step of a gradient of these sizes, on the device of `like`.
inline void check_step(const AffineStep& step, const ImageSizes& size, const Tensor& like,
                       bool planar = false, const GradientNames& names = kGradientNames) {
  check_sizes(names.x, step.x, size, like, planar);
  if (step.skip.has_value()) check_like("skip", *step.skip, size, step.x, planar);
  check_norm(step.norm, size, step.x, names.norm);
  check_statistics(names.sums, step.sums, step.x);
  if (step.has_rows()) return check_shape(names.sums, step.sums, {2, size.images, size.channels});
  PK_CHECK(!step.norm.has_rows(), names.sums, ": expected [2, N, C] for a norm with rows");
  if (step.sums.dim() == 1) return check_shape(names.sums, step.sums, {2 * size.channels});
  check_shape(names.sums, step.sums, {2, size.channels});
}

// Checks the weight and the stride of a convolution of images on the device of `like`, and
// that the library serves it.
inline ConvSizes check_conv(const ImageSizes& size, const Tensor& conv_weight, Stride stride,
                            const ConvDtypes& dtypes, const Tensor& like,
                            const char* name = kUnitNames.conv_weight) {
  check_tensor(name, conv_weight);
  check_same_device(name, conv_weight, like);
  PK_CHECK(conv_weight.dim() == 4, name, ": expected 4 dimensions [K, C, R, S], got ",
           conv_weight.dim());
  const auto shape = conv_weight.sizes();
  PK_CHECK(shape[1] == size.channels, name, ": expected in_channels ", size.channels,
           " to match x, got ", shape[1]);
  PK_CHECK(stride.h > 0 && stride.w > 0, "stride: expected 1 or more, got ", stride.h, " and ",
           stride.w);
  // A stride longer than the image reads the same pixels.
  stride = {std::min(stride.h, size.height), std::min(stride.w, size.width)};
  const ConvSizes conv{size.images, size.height, size.width, shape[1],
                       shape[0],    shape[2],    shape[3],   stride};
  check_conv_is_served(name, conv, dtypes, conv_weight);
  return conv;
}

}  // namespace preact_kernels
