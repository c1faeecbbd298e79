// Activations and their derivatives, on vectors.
//
// exp, expm1, log1p, erf and tanh are within about 2 units in the last place. The formulas of the
// activations are PyTorch's: they decide what becomes of NaN and infinity.

#include <cmath>

#include "../kernels.h"
#include "simd.h"

PK_BEGIN_ISA

// Integers as wide as the lanes of V.
template <class V>
using Whole = decltype(V{} < V{});

template <class A>
struct FloatFormat;
template <>
struct FloatFormat<float> {
  static constexpr int kMantissaBits = 23, kBias = 127;
  static constexpr float kRounder = 0x1.8p23f;  // adding it rounds to an integer
  static constexpr float kLn2 = 0x1.63p-1f, kLn2Rest = -0x1.bd0106p-13f;  // n * kLn2 is exact
  static constexpr float kMostExp = 89, kLeastExp = -104;                 // infinite above, 0 below
};
template <>
struct FloatFormat<double> {
  static constexpr int kMantissaBits = 52, kBias = 1023;
  static constexpr double kRounder = 0x1.8p52;
  static constexpr double kLn2 = 0x1.62e42fee00000p-1, kLn2Rest = 0x1.a39ef35793c76p-33;
  static constexpr double kMostExp = 710, kLeastExp = -746;
};

// c[0] + c[1] * v + ..., from the highest power on.
template <class V, class A, size_t kCount>
PK_INLINE V polynomial(V v, const A (&c)[kCount]) {
  V sum = V{} + c[kCount - 1];
#pragma GCC unroll 16
  for (int i = static_cast<int>(kCount) - 2; i >= 0; --i) sum = sum * v + c[i];
  return sum;
}

// 2^n, for normal results.
template <class A>
PK_INLINE Vector<A> power_of_two(Whole<Vector<A>> n) {
  return reinterpret_cast<Vector<A>>((n + FloatFormat<A>::kBias) << FloatFormat<A>::kMantissaBits);
}

// exp(v) = 2^n * (1 + rest), with |rest| < 0.42.
template <class A>
struct ReducedExp {
  Whole<Vector<A>> n;
  Vector<A> rest;

  PK_INLINE explicit ReducedExp(Vector<A> v) {
    using Format = FloatFormat<A>;
    using V = Vector<A>;
    const V rounded = v * A(1.44269504088896340736) + Format::kRounder;
    const V whole = rounded - Format::kRounder;
    n = reinterpret_cast<Whole<V>>(rounded) - reinterpret_cast<Whole<V>>(V{} + Format::kRounder);
    const V r = (v - whole * Format::kLn2) - whole * Format::kLn2Rest;
    if constexpr (std::is_same_v<A, float>) {
      constexpr float kTerms[] = {1.f / 2, 1.f / 6, 1.f / 24, 1.f / 120, 1.f / 720, 1.f / 5040};
      rest = r + r * r * polynomial(r, kTerms);
    } else {
      constexpr double kTerms[] = {1. / 2,       1. / 6,        1. / 24,        1. / 120,
                                   1. / 720,     1. / 5040,     1. / 40320,     1. / 362880,
                                   1. / 3628800, 1. / 39916800, 1. / 479001600, 1. / 6227020800};
      rest = r + r * r * polynomial(r, kTerms);
    }
  }
};

template <class A>
PK_INLINE Vector<A> exp_of(Vector<A> v) {
  using Format = FloatFormat<A>;
  v = v < Format::kLeastExp ? Vector<A>{} + Format::kLeastExp : v;
  v = v > Format::kMostExp ? Vector<A>{} + Format::kMostExp : v;
  const ReducedExp<A> e(v);
  // In two steps: 2^n itself may be infinite or denormal.
  const Whole<Vector<A>> half = e.n >> 1;
  return (1 + e.rest) * power_of_two<A>(half) * power_of_two<A>(e.n - half);
}

// exp(v) - 1 for v <= 40.
template <class A>
PK_INLINE Vector<A> expm1_of(Vector<A> v) {
  v = v < -40 ? Vector<A>{} - 40 : v;  // -1
  const ReducedExp<A> e(v);
  const Vector<A> power = power_of_two<A>(e.n);
  return power * e.rest + (power - 1);
}

// log(1 + v) for v >= 0, finite: with 1 + v = 2^k * (1 + f), k * log(2) + 2 * atanh(f / (2 + f)).
template <class A>
PK_INLINE Vector<A> log1p_of(Vector<A> v) {
  using Format = FloatFormat<A>;
  using V = Vector<A>;
  using W = Whole<V>;
  const V least = V{} + A(0.70710678118654752440);  // f from -0.29 to 0.42
  const W k = (reinterpret_cast<W>(1 + v) - reinterpret_cast<W>(least)) >> Format::kMantissaBits;
  const V power = power_of_two<A>(-k);
  const V f = v * power + (power - 1);
  const V s = f / (2 + f), z = s * s;
  V terms;
  if constexpr (std::is_same_v<A, float>) {
    constexpr float kTerms[] = {2.f / 3, 2.f / 5, 2.f / 7, 2.f / 9};
    terms = polynomial(z, kTerms);
  } else {
    constexpr double kTerms[] = {2. / 3,  2. / 5,  2. / 7,  2. / 9,  2. / 11,
                                 2. / 13, 2. / 15, 2. / 17, 2. / 19, 2. / 21};
    terms = polynomial(z, kTerms);
  }
  const V whole = reinterpret_cast<V>(k + reinterpret_cast<W>(V{} + Format::kRounder));
  return (whole - Format::kRounder) * A(0.69314718055994530942) + (2 * s + s * z * terms);
}

// |v|; and `magnitude` with the sign of v.
template <class V>
PK_INLINE V magnitude_of(V v) {
  return reinterpret_cast<V>(reinterpret_cast<Whole<V>>(v) & ~reinterpret_cast<Whole<V>>(-V{}));
}
template <class V>
PK_INLINE V with_sign_of(V v, V magnitude) {
  const Whole<V> sign = reinterpret_cast<Whole<V>>(v) & reinterpret_cast<Whole<V>>(-V{});
  return reinterpret_cast<V>(reinterpret_cast<Whole<V>>(magnitude) | sign);
}

template <class A>
PK_INLINE Vector<A> tanh_of(Vector<A> v) {
  const Vector<A> twice = 2 * magnitude_of(v);
  const Vector<A> e = expm1_of<A>(twice > 40 ? Vector<A>{} + 40 : twice);
  return with_sign_of(v, e / (e + 2));
}

// v + v * P(v^2) for |v| <= 0.92, else sign(v) * (1 - exp(|v| * Q(|v|))), with minimax polynomials
// P and Q.
PK_INLINE Vector<float> erf_of(Vector<float> v) {
  constexpr float kP[] = {0.128379166314f,   -0.376126307681f,  0.112836519328f,
                          -0.0268570814656f, 0.00519550727215f, -0.000808238600336f,
                          8.12457244776e-5f};
  constexpr float kQ[] = {-1.12855174978f,   -0.635625261002f,   -0.105262725154f,
                          0.0226741676942f,  -0.00293017735588f, 4.95945044161e-5f,
                          4.55795456356e-5f, -4.93807019571e-6f};
  const Vector<float> t = magnitude_of(v), most = t > 4.1f ? Vector<float>{} + 4.1f : t;
  const Vector<float> far = 1 - exp_of<float>(most * polynomial(most, kQ));
  return t > 0.92f ? with_sign_of(v, far) : v + v * polynomial(v * v, kP);
}

PK_INLINE Vector<double> erf_of(Vector<double> v) {
  for (int i = 0; i < kLanes<double>; ++i) v[i] = std::erf(v[i]);
  return v;
}

template <class A>
PK_INLINE Vector<A> sigmoid_of(Vector<A> v) {
  return 1 / (1 + exp_of<A>(-v));
}

// The structs of PK_FOR_EACH_ACTIVATION: value(p) = act(p) and gradient(p, dy) = dy * act'(p). The
// member of a struct is the parameter of the activation.
template <class A>
struct Relu {
  using V = Vector<A>;
  PK_INLINE V value(V p) const { return relu(p); }
  PK_INLINE V gradient(V p, V dy) const { return where_active<A>(p, dy); }
};

template <class A>
struct LeakyRelu {
  using V = Vector<A>;
  A slope;
  PK_INLINE V value(V p) const { return p > 0 ? p : slope * p; }
  PK_INLINE V gradient(V p, V dy) const { return p > 0 ? dy : slope * dy; }
};

template <class A>
struct Identity {
  using V = Vector<A>;
  PK_INLINE V value(V p) const { return p; }
  PK_INLINE V gradient(V, V dy) const { return dy; }
};

template <class A>
struct Relu6 {
  using V = Vector<A>;
  PK_INLINE V value(V p) const {
    p = p < 0 ? V{} : p;
    return p > 6 ? V{} + 6 : p;
  }
  // NaN gives 0.
  PK_INLINE V gradient(V p, V dy) const { return (p > 0) & (p < 6) ? dy : V{}; }
};

template <class A>
struct Silu {
  using V = Vector<A>;
  PK_INLINE V value(V p) const { return p / (1 + exp_of<A>(-p)); }
  PK_INLINE V gradient(V p, V dy) const {
    const V s = sigmoid_of<A>(p);
    return dy * s * (1 + p * (1 - s));
  }
};

template <class A>
struct Gelu {
  using V = Vector<A>;
  static PK_INLINE V twice_cdf(V p) { return 1 + erf_of(p * A(0.70710678118654752440)); }
  PK_INLINE V value(V p) const { return p * A(0.5) * twice_cdf(p); }
  PK_INLINE V gradient(V p, V dy) const {
    const V density = exp_of<A>(p * p * A(-0.5)) * A(0.39894228040143267794);
    return dy * (A(0.5) * twice_cdf(p) + p * density);
  }
};

template <class A>
struct GeluTanh {
  using V = Vector<A>;
  static constexpr A kBeta = 0.79788456080286535588, kKappa = 0.044715;
  static PK_INLINE V tanh_inner(V p) { return tanh_of<A>(kBeta * (p + kKappa * (p * p * p))); }
  PK_INLINE V value(V p) const { return A(0.5) * p * (1 + tanh_inner(p)); }
  PK_INLINE V gradient(V p, V dy) const {
    const V t = tanh_inner(p), inner_derivative = kBeta * (1 + 3 * kKappa * (p * p));
    return dy * (A(0.5) * (1 + t) + A(0.5) * p * (1 - t * t) * inner_derivative);
  }
};

template <class A>
struct Elu {
  using V = Vector<A>;
  A alpha;
  PK_INLINE V value(V p) const { return p < 0 ? alpha * expm1_of<A>(p) : p; }
  PK_INLINE V gradient(V p, V dy) const { return p > 0 ? dy : dy * (alpha * exp_of<A>(p)); }
};

template <class A>
struct Hardswish {
  using V = Vector<A>;
  PK_INLINE V value(V p) const {
    V gate = p + 3;
    gate = gate < 0 ? V{} : gate;
    gate = gate > 6 ? V{} + 6 : gate;
    return p * gate / 6;
  }
  PK_INLINE V gradient(V p, V dy) const {
    const V inner = p >= 3 ? dy : dy * (p / 3 + A(0.5));
    return p <= -3 ? V{} : inner;
  }
};

// tanh(log(1 + e)) = n / (n + 2) for e = exp(p) and n = e * (e + 2), and its square is
// 1 - 4 * (n + 1) / (n + 2)^2.
template <class A>
struct Mish {
  using V = Vector<A>;
  PK_INLINE V value(V p) const {
    const V e = exp_of<A>(p), n = e * (e + 2);
    return p > 20 ? p : p * (n / (n + 2));
  }
  PK_INLINE V gradient(V p, V dy) const {
    const V e = exp_of<A>(p > 20 ? V{} + 20 : p), n = e * (e + 2), inverse = 1 / (n + 2);
    const V derivative = n * inverse + p * (e / (1 + e)) * (4 * (n + 1) * inverse * inverse);
    return dy * (p > 20 ? 1 + 0 * p : derivative);
  }
};

template <class A>
struct Softplus {
  using V = Vector<A>;
  A beta;
  PK_INLINE V value(V p) const {
    const V scaled = p * beta;
    return scaled > 20 ? p : log1p_of<A>(exp_of<A>(scaled)) / beta;
  }
  PK_INLINE V gradient(V p, V dy) const {
    const V scaled = p * beta, e = exp_of<A>(scaled);
    return scaled > 20 ? dy : dy * e / (e + 1);
  }
};

template <class A>
struct Sigmoid {
  using V = Vector<A>;
  PK_INLINE V value(V p) const { return sigmoid_of<A>(p); }
  PK_INLINE V gradient(V p, V dy) const {
    const V s = sigmoid_of<A>(p);
    return dy * (1 - s) * s;
  }
};

template <class A>
struct Tanh {
  using V = Vector<A>;
  PK_INLINE V value(V p) const { return tanh_of<A>(p); }
  PK_INLINE V gradient(V p, V dy) const {
    const V t = tanh_of<A>(p);
    return dy * (1 - t * t);
  }
};

template <class A>
struct Softsign {
  using V = Vector<A>;
  PK_INLINE V value(V p) const { return p / (1 + magnitude_of(p)); }
  // Infinity gives NaN, from 0 * p.
  PK_INLINE V gradient(V p, V dy) const {
    const V inverse = (1 + 0 * p) / (1 + magnitude_of(p));
    return dy * inverse * inverse;
  }
};

// A function with this parameter, if it has one.
template <class Function, class A>
PK_INLINE Function with_parameter(A parameter) {
  if constexpr (std::is_empty_v<Function>) {
    return {};
  } else {
    return {parameter};
  }
}

// Calls body(function) with one of these structs.
template <class A, class Body>
PK_INLINE void with_activation(const Activation& activation, const Body& body) {
  const A parameter = static_cast<A>(activation.parameter);
  switch (activation.kind) {
#define PK_CASE(Name, name)     \
  case ActivationKind::k##Name: \
    return body(with_parameter<Name<A>>(parameter));
    PK_FOR_EACH_ACTIVATION(PK_CASE)
#undef PK_CASE
  }
}

// values = act(values).
template <class T>
void activate(const Activation& activation, T* values, int64_t count) {
  using A = Accumulate<T>;
  with_activation<A>(activation, [&](const auto& function) PK_LAMBDA {
    int64_t i = 0;
    for (; i + kLanes<A> <= count; i += kLanes<A>) {
      store(values + i, function.value(load(values + i)));
    }
    if (i == count) return;
    const int rest = static_cast<int>(count - i);
    store(values + i, function.value(load(values + i, rest)), rest);
  });
}

// gradient *= act'(p). `count` is a multiple of the lanes.
template <class A>
void multiply_by_derivative(const Activation& activation, const A* p, A* gradient, int64_t count) {
  with_activation<A>(activation, [&](const auto& function) PK_LAMBDA {
    for (int64_t i = 0; i < count; i += kLanes<A>) {
      store(gradient + i, function.gradient(load(p + i), load(gradient + i)));
    }
  });
}

#define PK_INSTANTIATE(T) template decltype(activate<T>) activate<T>;
PK_FOR_DTYPES(PK_INSTANTIATE)
#ifdef PK_HAS_DOT  // finish_activation keeps p in float32
PK_INSTANTIATE(float)
#endif
#undef PK_INSTANTIATE
#define PK_INSTANTIATE(A) template decltype(multiply_by_derivative<A>) multiply_by_derivative<A>;
PK_FOR_SUM_TYPES(PK_INSTANTIATE)

PK_END_ISA
