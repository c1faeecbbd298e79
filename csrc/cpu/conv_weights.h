// Weights of convolutions and their gradients, in tensors.
#pragma once

#include <utility>

#include "../host/tensors.h"
#include "conv_strips.h"
#include "isa.h"

namespace preact_kernels {

// The memory of a weight. If `transposed`, of the transposed convolution's weight: channels are
// swapped, taps reversed.
template <class T>
ConvWeight<T> memory_of(const Tensor& t, bool transposed) {
  ConvWeight<T> weight{data<T>(t), t.strides()[0], t.strides()[1], {}};
  if (transposed) std::swap(weight.stride_k, weight.stride_c);
  const int64_t count = t.sizes()[2] * t.sizes()[3];
  for (int64_t tap = 0; tap < count; ++tap) {
    weight.taps[transposed ? count - 1 - tap : tap] =
        tap / t.sizes()[3] * t.strides()[2] + tap % t.sizes()[3] * t.strides()[3];
  }
  return weight;
}

// Stores values of a weight gradient, `stride` apart.
template <class T>
void store_weights(T* to, int64_t stride, const Accumulate<T>* values, int64_t count) {
  if (stride == 1) {
    for (int64_t c = 0; c < count; ++c) to[c] = rounded_to<T>(values[c]);
  } else {
    for (int64_t c = 0; c < count; ++c) to[c * stride] = rounded_to<T>(values[c]);
  }
}

// Whether kernels/winograd.h serves a convolution in storage type T. It does not serve bfloat16
// where there are dot products of bfloat16.
template <class T>
bool has_winograd(const ConvSizes& conv) {
  const bool has_own_products = std::is_same_v<T, BFloat16> && isa() >= Isa::kAvx512Bf16;
  return !has_own_products && Winograd::serves(conv);
}

// Packs a weight [K, C, R, S] of any strides, or its transpose, into a buffer of this thread.
template <class T>
PackedWeights packed_weights(const ConvSizes& conv, const Tensor& conv_weight, bool transposed);

}  // namespace preact_kernels
