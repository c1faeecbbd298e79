// Activations and their gradients, by PyTorch's formulas.
//
// The kind is an argument of a kernel: all threads take the same branch, once for several numbers.
// In float32, functions that use expf and the like are accurate to about two units in the last
// place. In half precision they use approximations: their float32 results are within 2^-19 of exact
// ones for float16 and 2^-17 for bfloat16, relative to a value, or to a derivative or 1 if that is
// larger. Half a unit in the last place is 2^-12 and 2^-9.
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
constexpr float kLog2E = 1.4426950408889634f;  // log2(e)
constexpr float kLn2 = 0.69314718055994531f;   // log(2)

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

// The same for half precision, by instructions that approximate 2^x, 1/x and log2(x).
namespace approximate {

// exp(p) for p < 64, also where it is subnormal.
__device__ inline float exp_of(float p) {
  return approximate_exp2(fmaf(p, kLog2E, 24.0f)) * 0x1p-24f;
}

// sigmoid(|p|), and 1 - sigmoid(|p|) without cancellation.
struct Logistic {
  float large, small;

  __device__ explicit Logistic(float p) {
    const float e = exp_of(-fabsf(p));
    large = approximate_reciprocal(1.0f + e);
    small = e * large;
  }
  __device__ float at(float p) const { return p >= 0 ? large : small; }
  __device__ float at_minus(float p) const { return p >= 0 ? small : large; }
};

using activations::Hardswish;
using activations::Identity;
using activations::LeakyRelu;
using activations::Relu;
using activations::Relu6;

struct Silu {
  __device__ float value(float p) const { return p * Logistic(p).at(p); }
  __device__ float gradient(float dy, float p) const {
    const Logistic sigmoid(p);
    return dy * (sigmoid.at(p) * fmaf(p, sigmoid.at_minus(p), 1.0f));
  }
};

struct Gelu {
  // The normal distribution: exp(-p^2 / 2) and the probability of less than p. That of less than
  // -|p| is exp(-p^2 / 2) times a polynomial in 1 / (1 + 5/16 |p|), within 2^-22 of it.
  struct Normal {
    float exponential, probability;

    __device__ explicit Normal(float p) {
      exponential = approximate_exp2(p * p * (-0.5f * kLog2E));
      const float t = approximate_reciprocal(fmaf(0.3125f, fabsf(p), 1.0f));
      float tail = 0.0351427081f;
      tail = fmaf(tail, t, -0.13499562f);
      tail = fmaf(tail, t, 0.138899751f);
      tail = fmaf(tail, t, -0.00311141093f);
      tail = fmaf(tail, t, 0.104613816f);
      tail = fmaf(tail, t, 0.109925078f);
      tail = fmaf(tail, t, 0.124860473f);
      tail = fmaf(tail, t, 0.124665304f);
      tail = tail * t * exponential;
      probability = p > 0 ? 1.0f - tail : tail;
    }
  };
  __device__ float value(float p) const { return p * Normal(p).probability; }
  __device__ float gradient(float dy, float p) const {
    const Normal normal(p);
    return dy * fmaf(p, normal.exponential * kNormalDensity, normal.probability);
  }
};

// (1 + tanh(u)) / 2 = sigmoid(2 u), and 1 - tanh(u)^2 = 4 * sigmoid(2 u) * sigmoid(-2 u).
struct GeluTanh {
  __device__ float value(float p) const {
    return p * Logistic(2.0f * kGeluTanhScale * p * fmaf(kGeluTanhCubic, p * p, 1.0f)).at(p);
  }
  __device__ float gradient(float dy, float p) const {
    const float square = p * p;
    const Logistic sigmoid(2.0f * kGeluTanhScale * p * fmaf(kGeluTanhCubic, square, 1.0f));
    const float inner = 2.0f * kGeluTanhScale * fmaf(3.0f * kGeluTanhCubic, square, 1.0f);
    return dy * fmaf(p * (sigmoid.large * sigmoid.small), inner, sigmoid.at(p));
  }
};

struct Elu {
  float alpha;
  __device__ float value(float p) const {
    float near_zero = fmaf(0.0068076051f, p, 0.0410424804f);  // (exp(p) - 1) / p, within 2^-23
    near_zero = fmaf(near_zero, p, 0.166563598f);
    near_zero = fmaf(near_zero, p, 0.49999463f);
    near_zero = p * fmaf(near_zero, p, 1.0f);
    const float result = p > -0.5f ? near_zero : approximate_exp2(p * kLog2E) - 1.0f;
    return p > 0 ? p : result * alpha;
  }
  __device__ float gradient(float dy, float p) const {
    return p <= 0 ? dy * (alpha * exp_of(p)) : dy;
  }
};

// See activations::Mish.
struct Mish {
  __device__ float value(float p) const {
    const float e = exp_of(fminf(p, 20.0f)), n = e * (e + 2.0f);
    return p * (n * approximate_reciprocal(n + 2.0f));
  }
  __device__ float gradient(float dy, float p) const {
    const float e = exp_of(fminf(p, 20.0f)), n = e * (e + 2.0f);
    const float inverse = approximate_reciprocal(n + 2.0f);
    const float slope = p > 20 ? 0.0f : 4.0f * e * (1.0f + e) * inverse * inverse;
    const float gate = p > 20 ? 1.0f : n * inverse;
    return dy * (gate + p * slope);
  }
};

struct Softplus {
  float beta;
  __device__ float value(float p) const {
    const float scaled = p * beta, e = exp_of(scaled);
    float near_zero = fmaf(0.125460151f, e, -0.235977386f);  // log(1 + e) / e, within 2^-22
    near_zero = fmaf(near_zero, e, 0.332233675f);
    near_zero = fmaf(near_zero, e, -0.499972563f);
    near_zero = e * fmaf(near_zero, e, 1.0f);
    const float log = e < 0.25f ? near_zero : approximate_log2(1.0f + e) * kLn2;
    return scaled > kSoftplusThreshold ? p : log * (1.0f / beta);
  }
  __device__ float gradient(float dy, float p) const {
    const float scaled = p * beta;
    return scaled > kSoftplusThreshold ? dy : dy * Logistic(scaled).at(scaled);
  }
};

struct Sigmoid {
  __device__ float value(float p) const { return Logistic(p).at(p); }
  __device__ float gradient(float dy, float p) const {
    const Logistic sigmoid(p);
    return dy * (sigmoid.large * sigmoid.small);
  }
};

struct Tanh {
  __device__ float value(float p) const {
    const float square = p * p, e = approximate_exp2(-2.0f * kLog2E * fabsf(p));
    float near_zero = fmaf(-0.0477942038f, square, 0.132776287f);  // tanh(p) / p, within 2^-23
    near_zero = fmaf(near_zero, square, -0.333318822f);
    near_zero = p * fmaf(near_zero, square, 1.0f);
    const float far = copysignf((1.0f - e) * approximate_reciprocal(1.0f + e), p);
    return fabsf(p) < 0.4f ? near_zero : far;
  }
  __device__ float gradient(float dy, float p) const {
    const Logistic sigmoid(2.0f * p);
    return dy * (4.0f * sigmoid.large * sigmoid.small);
  }
};

// Multiplied by 1/4: the reciprocals of numbers above 2^126 are subnormal.
struct Softsign {
  __device__ float value(float p) const {
    return 0.25f * p * approximate_reciprocal(fmaf(0.25f, fabsf(p), 0.25f));
  }
  __device__ float gradient(float dy, float p) const {
    const float inverse =
        fmaf(0.0f, p, 0.25f) * approximate_reciprocal(fmaf(0.25f, fabsf(p), 0.25f));
    return dy * inverse * inverse;
  }
};

}  // namespace approximate

// A function with this parameter, if it has one.
template <class Function>
__device__ inline Function with_parameter(float parameter) {
  if constexpr (std::is_empty_v<Function>) {
    return {};
  } else {
    return {parameter};
  }
}

// Calls body(function) with the struct for numbers of type T.
template <class T, class Body>
__device__ inline void with_activation(const KernelActivation& activation, const Body& body) {
  constexpr bool kExact = std::is_same_v<T, float>;
  switch (activation.kind) {
#define PK_CASE(Name, name)                                                                       \
  case ActivationKind::k##Name:                                                                   \
    return body(with_parameter<std::conditional_t<kExact, activations::Name, approximate::Name>>( \
        activation.parameter));
    PK_FOR_EACH_ACTIVATION(PK_CASE)
#undef PK_CASE
  }
}

}  // namespace preact_kernels::cuda
