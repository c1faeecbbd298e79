// Activations and their gradients, by PyTorch's formulas.
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

// The structs of PK_FOR_EACH_ACTIVATION: value(p) = act(p) and gradient(dy, p) = dy * act'(p). The
// member of a struct is the parameter of the activation. Where act is constant the gradient is 0,
// and where its slope is 1 it is dy, without a product. A NaN takes the same side of each branch as
// in PyTorch's kernels for GPUs.
namespace activations {

struct Relu {
  __device__ float value(float p) const { return p <= 0 ? 0.0f : p; }
  __device__ float gradient(float dy, float p) const { return p <= 0 ? 0.0f : dy; }
};

struct LeakyRelu {
  float slope;
  __device__ float value(float p) const { return p > 0 ? p : p * slope; }
  __device__ float gradient(float dy, float p) const { return p > 0 ? dy : dy * slope; }
};

struct Identity {
  __device__ float value(float p) const { return p; }
  __device__ float gradient(float dy, float) const { return dy; }
};

struct Relu6 {
  // NaN stays NaN.
  __device__ float value(float p) const { return p < 0 ? 0.0f : p > 6 ? 6.0f : p; }
  __device__ float gradient(float dy, float p) const { return p <= 0 || p >= 6 ? 0.0f : dy; }
};

struct Silu {
  __device__ float value(float p) const { return p / (1.0f + expf(-p)); }
  __device__ float gradient(float dy, float p) const {
    const float s = sigmoid(p);
    return dy * (s * (1.0f + p * (1.0f - s)));
  }
};

struct Gelu {
  __device__ float value(float p) const { return p * 0.5f * (1.0f + erff(p * kSqrtHalf)); }
  __device__ float gradient(float dy, float p) const {
    const float cdf = 0.5f * (1.0f + erff(p * kSqrtHalf));
    const float pdf = expf(-0.5f * p * p) * kNormalDensity;
    return dy * (cdf + p * pdf);
  }
};

struct GeluTanh {
  __device__ float value(float p) const {
    const float inner = kGeluTanhScale * (p + kGeluTanhCubic * p * p * p);
    return 0.5f * p * (1.0f + tanhf(inner));
  }
  __device__ float gradient(float dy, float p) const {
    const float square = p * p;
    const float t = tanhf(kGeluTanhScale * (p + kGeluTanhCubic * square * p));
    const float inner = kGeluTanhScale * (1.0f + 3.0f * kGeluTanhCubic * square);
    return dy * (0.5f * (1.0f + t) + 0.5f * p * (1.0f - t * t) * inner);
  }
};

struct Elu {
  float alpha;
  __device__ float value(float p) const { return p > 0 ? p : expm1f(p) * alpha; }
  __device__ float gradient(float dy, float p) const {
    return p <= 0 ? dy * (alpha * expf(p)) : dy;
  }
};

struct Hardswish {
  __device__ float value(float p) const {
    return p * fminf(fmaxf(p + 3.0f, 0.0f), 6.0f) * (1.0f / 6.0f);
  }
  __device__ float gradient(float dy, float p) const {
    return p <= -3 ? 0.0f : p < 3 ? dy * (p * (1.0f / 3.0f) + 0.5f) : dy;
  }
};

// tanh(log1p(e)) = n / (n + 2) for n = e * (e + 2), and sigmoid(p) * (1 - tanh^2) =
// 4 * e * (1 + e) / (n + 2)^2.
struct Mish {
  __device__ float value(float p) const {
    const float e = mish_exp(p), n = e * (e + 2.0f);
    return p * (n / (n + 2.0f));
  }
  __device__ float gradient(float dy, float p) const {
    const float e = mish_exp(p), n = e * (e + 2.0f), inverse = 1.0f / (n + 2.0f);
    const float slope = p > 20 ? 0.0f : 4.0f * e * (1.0f + e) * inverse * inverse;
    const float gate = p > 20 ? 1.0f : n * inverse;
    return dy * (gate + p * slope);
  }
};

struct Softplus {
  float beta;
  __device__ float value(float p) const {
    const float scaled = p * beta;
    return scaled > kSoftplusThreshold ? p : log1pf(expf(scaled)) / beta;
  }
  __device__ float gradient(float dy, float p) const {
    const float scaled = p * beta;
    const float e = expf(scaled);
    return scaled > kSoftplusThreshold ? dy : dy * (e / (e + 1.0f));
  }
};

struct Sigmoid {
  __device__ float value(float p) const { return sigmoid(p); }
  __device__ float gradient(float dy, float p) const {
    const float y = sigmoid(p);
    return dy * ((1.0f - y) * y);
  }
};

struct Tanh {
  __device__ float value(float p) const { return tanhf(p); }
  __device__ float gradient(float dy, float p) const {
    const float y = tanhf(p);
    return dy * (1.0f - y * y);
  }
};

struct Softsign {
  __device__ float value(float p) const { return p / (1.0f + fabsf(p)); }
  // Infinity gives NaN, from 0 * p.
  __device__ float gradient(float dy, float p) const {
    const float inverse = (1.0f + 0.0f * p) / (1.0f + fabsf(p));
    return dy * inverse * inverse;
  }
};

}  // namespace activations

// A function with this parameter, if it has one.
template <class Function>
__device__ inline Function with_parameter(float parameter) {
  if constexpr (std::is_empty_v<Function>) {
    return {};
  } else {
    return {parameter};
  }
}

// Calls body(function) with one of these structs.
template <class Body>
__device__ inline void with_activation(const KernelActivation& activation, const Body& body) {
  switch (activation.kind) {
#define PK_CASE(Name, name)     \
  case ActivationKind::k##Name: \
    return body(with_parameter<activations::Name>(activation.parameter));
    PK_FOR_EACH_ACTIVATION(PK_CASE)
#undef PK_CASE
  }
}

}  // namespace preact_kernels::cuda
