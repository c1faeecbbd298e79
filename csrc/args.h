// Arguments of the kernels, named as in preact_kernels/kernels/contract.py. Structs that hold
// tensors are in tensor_args.h: kernels get pointers, and compile faster without torch's headers.
#pragma once

#include <cstdint>

namespace preact_kernels {

// Sizes of a tensor [N, C, H, W].
struct ImageSizes {
  int64_t images, channels, height, width;
  int64_t pixels() const { return images * height * width; }
};

// Calls macro(Name, "name") for ACTIVATIONS of Python, in its order. For each, activation.cpp and
// activation.cuh define a struct `Name`; without it they do not compile.
// clang-format off
#define PK_FOR_EACH_ACTIVATION(macro) \
  macro(Relu, "relu")                 \
  macro(LeakyRelu, "leaky_relu")      \
  macro(Identity, "identity")         \
  macro(Relu6, "relu6")               \
  macro(Silu, "silu")                 \
  macro(Gelu, "gelu")                 \
  macro(GeluTanh, "gelu_tanh")        \
  macro(Elu, "elu")                   \
  macro(Hardswish, "hardswish")       \
  macro(Mish, "mish")                 \
  macro(Softplus, "softplus")         \
  macro(Sigmoid, "sigmoid")           \
  macro(Tanh, "tanh")                 \
  macro(Softsign, "softsign")
// clang-format on

enum class ActivationKind {
#define PK_ENUMERATOR(Name, name) k##Name,
  PK_FOR_EACH_ACTIVATION(PK_ENUMERATOR)
#undef PK_ENUMERATOR
};

struct Activation {
  ActivationKind kind = ActivationKind::kRelu;
  double parameter = 0;  // the slope of leaky_relu, alpha of elu, beta of softplus
};

// Two exact sums per channel (csrc/cuda/exact_sums.cuh). The launches of a native call add to them;
// the end of the call writes them to tensors.
struct Accumulators {
  uint64_t* words = nullptr;  // null if kernels write the tensors themselves
  int64_t second = 0;         // words between the first and the second sum of a channel
  int64_t stride = 0;         // words between two words of a sum
};

// Strides of a convolution, in pixels.
struct Stride {
  int64_t h = 1, w = 1;
};

// Sizes of a convolution with one group, an odd kernel and padding of half the kernel.
struct ConvSizes {
  int64_t images, height, width, in_channels, out_channels, kernel_h, kernel_w;
  Stride stride = {};

  int64_t taps() const { return kernel_h * kernel_w; }
  int64_t halo_h() const { return kernel_h / 2; }
  int64_t halo_w() const { return kernel_w / 2; }
  int64_t pixels() const { return images * height * width; }
  int64_t out_height() const { return (height - 1) / stride.h + 1; }
  int64_t out_width() const { return (width - 1) / stride.w + 1; }
  ImageSizes input() const { return {images, in_channels, height, width}; }
  ImageSizes output() const { return {images, out_channels, out_height(), out_width()}; }
};

// The results of a unit's backward that the caller wants.
struct Wanted {
  bool g;       // g and its sums
  bool weight;  // the gradient of the convolution's weight
  bool dy;      // the whole gradient of the output
};

}  // namespace preact_kernels
