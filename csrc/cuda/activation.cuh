// Activations and their gradients, by PyTorch's formulas (ActivationKind of args.h).
//
// The kind is an argument of a kernel: all threads take the same branch, once for several numbers.
// Functions that use expf and the like are accurate to about two units in the last place.
#pragma once

#include <type_traits>

#include "../args.h"
#include "device.cuh"

namespace preact_kernels::cuda {

// An Activation in the precision of kernels.
struct KernelActivation {
  ActivationKind kind;
  float parameter;
};

inline KernelActivation kernel_activation(const Activation& function) {
  return {function.kind, static_cast<float>(function.parameter)};
}

constexpr float kSqrtHalf = 0.70710678118654752f;       // sqrt(1/2)
constexpr float kNormalDensity = 0.39894228040143268f;  // 1 / sqrt(2 pi)
constexpr float kGeluTanhScale = 0.79788456080286536f;  // sqrt(2 / pi)
constexpr float kGeluTanhCubic = 0.044715f;
constexpr float kSoftplusThreshold = 20.0f;

__device__ inline float sigmoid(float p) { return 1.0f / (1.0f + expf(-p)); }

// exp(p) for mish: from 20 on tanh(log1p(exp(p))) is 1 in float32. NaN becomes exp(20).
__device__ inline float mish_exp(float p) { return expf(fminf(p, 20.0f)); }

// act(p).
template <ActivationKind kKind>
__device__ inline float activate(float p, float parameter) {
  using K = ActivationKind;
  if constexpr (kKind == K::kRelu) return p <= 0 ? 0.0f : p;
  if constexpr (kKind == K::kLeakyRelu) return p > 0 ? p : p * parameter;
  if constexpr (kKind == K::kIdentity) return p;
  if constexpr (kKind == K::kRelu6) return p < 0 ? 0.0f : p > 6 ? 6.0f : p;  // NaN stays NaN
  if constexpr (kKind == K::kSilu) return p / (1.0f + expf(-p));
  if constexpr (kKind == K::kGelu) return p * 0.5f * (1.0f + erff(p * kSqrtHalf));
  if constexpr (kKind == K::kGeluTanh) {
    const float inner = kGeluTanhScale * (p + kGeluTanhCubic * p * p * p);
    return 0.5f * p * (1.0f + tanhf(inner));
  }
  if constexpr (kKind == K::kElu) return p > 0 ? p : expm1f(p) * parameter;
  if constexpr (kKind == K::kHardswish) {
    return p * fminf(fmaxf(p + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f);
  }
  if constexpr (kKind == K::kMish) {  // tanh(log1p(e)) = n / (n + 2) for n = e * (e + 2)
    const float e = mish_exp(p), n = e * (e + 2.0f);
    return p * (n / (n + 2.0f));
  }
  if constexpr (kKind == K::kSoftplus) {
    const float scaled = p * parameter;
    return scaled > kSoftplusThreshold ? p : log1pf(expf(scaled)) / parameter;
  }
  if constexpr (kKind == K::kSigmoid) return sigmoid(p);
  if constexpr (kKind == K::kTanh) return tanhf(p);
}

// dy * act'(p). Where act is constant the result is 0, and where its slope is 1 it is dy, without a
// product. A NaN takes the same side of each branch as in PyTorch's kernels for GPUs.
template <ActivationKind kKind>
__device__ inline float activation_gradient(float dy, float p, float parameter) {
  using K = ActivationKind;
  if constexpr (kKind == K::kRelu) return p <= 0 ? 0.0f : dy;
  if constexpr (kKind == K::kLeakyRelu) return p > 0 ? dy : dy * parameter;
  if constexpr (kKind == K::kIdentity) return dy;
  if constexpr (kKind == K::kRelu6) return p <= 0 || p >= 6 ? 0.0f : dy;
  if constexpr (kKind == K::kSilu) {
    const float s = sigmoid(p);
    return dy * (s * (1.0f + p * (1.0f - s)));
  }
  if constexpr (kKind == K::kGelu) {
    const float cdf = 0.5f * (1.0f + erff(p * kSqrtHalf));
    const float pdf = expf(-0.5f * p * p) * kNormalDensity;
    return dy * (cdf + p * pdf);
  }
  if constexpr (kKind == K::kGeluTanh) {
    const float square = p * p;
    const float t = tanhf(kGeluTanhScale * (p + kGeluTanhCubic * square * p));
    const float inner = kGeluTanhScale * (1.0f + 3.0f * kGeluTanhCubic * square);
    return dy * (0.5f * (1.0f + t) + 0.5f * p * (1.0f - t * t) * inner);
  }
  if constexpr (kKind == K::kElu) return p <= 0 ? dy * (parameter * expf(p)) : dy;
  if constexpr (kKind == K::kHardswish) {
    return p <= -3 ? 0.0f : p < 3 ? dy * (p * (1.0f / 3.0f) + 0.5f) : dy;
  }
  if constexpr (kKind == K::kMish) {  // sigmoid(p) * (1 - tanh^2) = 4 * e * (1 + e) / (n + 2)^2
    const float e = mish_exp(p), n = e * (e + 2.0f), inverse = 1.0f / (n + 2.0f);
    const float slope = p > 20 ? 0.0f : 4.0f * e * (1.0f + e) * inverse * inverse;
    const float gate = p > 20 ? 1.0f : n * inverse;
    return dy * (gate + p * slope);
  }
  if constexpr (kKind == K::kSoftplus) {
    const float scaled = p * parameter;
    const float e = expf(scaled);
    return scaled > kSoftplusThreshold ? dy : dy * (e / (e + 1.0f));
  }
  if constexpr (kKind == K::kSigmoid) {
    const float y = sigmoid(p);
    return dy * ((1.0f - y) * y);
  }
  if constexpr (kKind == K::kTanh) {
    const float y = tanhf(p);
    return dy * (1.0f - y * y);
  }
}

// Calls body(std::integral_constant<ActivationKind, kind>{}).
template <class Body>
__device__ inline void for_activation_kind(ActivationKind kind, const Body& body) {
#define PK_ACTIVATION_CASE(name) \
  case ActivationKind::name:     \
    return body(std::integral_constant<ActivationKind, ActivationKind::name>{})
  switch (kind) {
    PK_ACTIVATION_CASE(kRelu);
    PK_ACTIVATION_CASE(kLeakyRelu);
    PK_ACTIVATION_CASE(kIdentity);
    PK_ACTIVATION_CASE(kRelu6);
    PK_ACTIVATION_CASE(kSilu);
    PK_ACTIVATION_CASE(kGelu);
    PK_ACTIVATION_CASE(kGeluTanh);
    PK_ACTIVATION_CASE(kElu);
    PK_ACTIVATION_CASE(kHardswish);
    PK_ACTIVATION_CASE(kMish);
    PK_ACTIVATION_CASE(kSoftplus);
    PK_ACTIVATION_CASE(kSigmoid);
    PK_ACTIVATION_CASE(kTanh);
  }
#undef PK_ACTIVATION_CASE
}

// Replaces every p by act(p).
template <int kRows, int kColumns>
__device__ inline void activate(const KernelActivation& activation, float (&p)[kRows][kColumns]) {
  for_activation_kind(activation.kind, [&](auto kind) {
#pragma unroll
    for (int i = 0; i < kRows * kColumns; ++i) {
      float& at = p[i / kColumns][i % kColumns];
      at = activate<decltype(kind)::value>(at, activation.parameter);
    }
  });
}

// Replaces every dy by dy * act'(p).
template <int kRows, int kColumns>
__device__ inline void activation_gradient(const KernelActivation& activation,
                                           float (&dy)[kRows][kColumns],
                                           const float (&p)[kRows][kColumns]) {
  for_activation_kind(activation.kind, [&](auto kind) {
#pragma unroll
    for (int i = 0; i < kRows * kColumns; ++i) {
      float& at = dy[i / kColumns][i % kColumns];
      at = activation_gradient<decltype(kind)::value>(at, p[i / kColumns][i % kColumns],
                                                      activation.parameter);
    }
  });
}

}  // namespace preact_kernels::cuda
