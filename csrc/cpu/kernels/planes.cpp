// Norm and activation of tensors in NCHW order: each plane of pixels has one value of every table.

#include <algorithm>

#include "../kernels.h"
#include "simd.h"

PK_BEGIN_ISA

// Calls body(i, lanes) for the vectors of `count` values; `lanes` is a constant except for the
// last.
template <class A, class Body>
PK_INLINE void for_vectors(int64_t count, const Body& body) {
  constexpr int lanes = kLanes<A>;
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) body(i, std::integral_constant<int, lanes>{});
  if (i < count) body(i, static_cast<int>(count - i));
}

// v with 0 in the lanes from `lanes` on.
template <class A>
PK_INLINE Vector<A> first_lanes(Vector<A> v, int lanes) {
  for (int i = lanes; i < kLanes<A>; ++i) v[i] = 0;
  return v;
}
template <class A, int kCount>
PK_INLINE Vector<A> first_lanes(Vector<A> v, std::integral_constant<int, kCount>) {
  return v;
}

template <class A>
PK_INLINE double sum_of_lanes(Vector<A> v) {
  double sum = 0;
  for (int i = 0; i < kLanes<A>; ++i) sum += v[i];
  return sum;
}

// statistics = [pivot, sum(d), sum(d^2)] for d = x - pivot (TileStatistics).
template <class T>
void range_statistics(const T* x, int64_t count, Accumulate<T>* statistics) {
  using A = Accumulate<T>;
  constexpr int64_t kLeading = 16;
  const int64_t leading = std::min(kLeading, count);
  Vector<A> first = {};
  for (int64_t i = 0; i < leading; ++i) first[0] += upcast(x[i]);
  const A pivot = finite_or_zero(first * (A(1) / A(leading)))[0];
  constexpr int kSums = 4;
  Vector<A> sum[kSums] = {}, square[kSums] = {};
  const auto add = [&](int64_t i, int s, auto lanes) PK_LAMBDA {
    const Vector<A> d = first_lanes<A>(load(x + i, lanes) - pivot, lanes);
    sum[s] += d;
    square[s] += d * d;
  };
  constexpr int64_t kStep = kSums * kLanes<A>;
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
#pragma GCC unroll 4
    for (int s = 0; s < kSums; ++s) {
      add(i + s * kLanes<A>, s, std::integral_constant<int, kLanes<A>>{});
    }
  }
  for_vectors<A>(count - i, [&](int64_t at, auto lanes) PK_LAMBDA { add(i + at, 0, lanes); });
  statistics[0] = pivot;
  statistics[1] = static_cast<A>(sum_of_lanes<A>((sum[0] + sum[1]) + (sum[2] + sum[3])));
  statistics[2] =
      static_cast<A>(sum_of_lanes<A>((square[0] + square[1]) + (square[2] + square[3])));
}

// y = act(p) for planes of consecutive channels. `norm` begins with the first of them.
template <class T>
void planes_norm_act(const T* x, T* y, int64_t planes, int64_t pixels,
                     const NormRow<Accumulate<T>>& norm) {
  using A = Accumulate<T>;
  constexpr int64_t kPart = 2048;  // p stays in the first-level cache
  const bool is_relu = norm.activation.kind == ActivationKind::kRelu;
  int64_t activated = 0, done = 0;
  for (int64_t c = 0; c < planes; ++c) {
    const A mean = norm.mean[c], scale = norm.scale[c], bias = norm.bias[c];
    for (int64_t first = 0; first < pixels; first += kPart) {
      const int64_t count = std::min(kPart, pixels - first);
      const T* from = x + done;
      T* to = y + done;
      for_vectors<A>(count, [&](int64_t i, auto lanes) PK_LAMBDA {
        const Vector<A> p = (load(from + i, lanes) - mean) * scale + bias;
        store(to + i, is_relu ? relu(p) : as_stored(x, p), lanes);
      });
      done += count;
      if (!is_relu && done - activated >= kPart) {
        activate(norm.activation, y + activated, done - activated);
        activated = done;
      }
    }
  }
  if (!is_relu) activate(norm.activation, y + activated, done - activated);
}

// y = act(p + residual), with p and the sum rounded to T. The activation is ReLU or the identity.
template <class T>
void planes_norm_add_act(const T* x, const T* residual, T* y, int64_t planes, int64_t pixels,
                         const NormRow<Accumulate<T>>& norm) {
  using A = Accumulate<T>;
  const bool is_relu = norm.activation.kind == ActivationKind::kRelu;
  for (int64_t c = 0; c < planes; ++c) {
    const A mean = norm.mean[c], scale = norm.scale[c], bias = norm.bias[c];
    for_vectors<A>(pixels, [&](int64_t i, auto lanes) PK_LAMBDA {
      const int64_t at = c * pixels + i;
      const Vector<A> p = (load(x + at, lanes) - mean) * scale + bias;
      const Vector<A> sum = as_stored(x, p) + load(residual + at, lanes);
      store(y + at, is_relu ? relu(sum) : sum, lanes);
    });
  }
}

// The most pixels of a plane whose p and gradient are buffered.
constexpr int64_t kPlanePart = 512;

// gradient = dy * act'(p) for at most kPlanePart values; the rest of the last vector is 0.
template <class T, class A>
PK_INLINE void plane_gradient(const T* dy, const T* x, int64_t count, A mean, A scale, A bias,
                              const Activation& activation, A* gradient) {
  alignas(64) A p_values[kPlanePart];
  const bool is_relu = activation.kind == ActivationKind::kRelu;
  for_vectors<A>(count, [&](int64_t i, auto lanes) PK_LAMBDA {
    const Vector<A> p = (load(x + i, lanes) - mean) * scale + bias, g = load(dy + i, lanes);
    if (is_relu) {
      store(gradient + i, where_active<T>(p, g));
    } else {
      store(p_values + i, as_stored(x, p));
      store(gradient + i, g);
    }
  });
  constexpr int64_t kMask = kLanes<A> - 1;
  if (!is_relu) multiply_by_derivative(activation, p_values, gradient, (count + kMask) & ~kMask);
}

// gradient = 0 where y <= 0, else dy, for at most kPlanePart values; the rest of the last vector is
// 0.
template <class T, class A>
PK_INLINE void plane_gradient_from(const T* y, const T* dy, int64_t count, A* gradient) {
  for_vectors<A>(count, [&](int64_t i, auto lanes) PK_LAMBDA {
    store(gradient + i, where_active<A>(load(y + i, lanes), load(dy + i, lanes)));
  });
}

// g = dy * act'(p), or, unless y is null, 0 where y <= 0, else dy. Stored unless g is null. And its
// sums for each plane: sums[c] = sum(g) and sums[stride + c] = sum(g * (x - mean)), of g as stored.
template <class T>
void planes_mask(const T* dy, const T* x, const T* y, T* g, int64_t planes, int64_t pixels,
                 const NormRow<Accumulate<T>>& norm, double* sums, int64_t stride) {
  using A = Accumulate<T>;
  alignas(64) A gradient[kPlanePart];
  for (int64_t c = 0; c < planes; ++c) {
    const A mean = norm.mean[c], scale = norm.scale[c], bias = norm.bias[c];
    double of_g = 0, of_product = 0;
    for (int64_t first = 0; first < pixels; first += kPlanePart) {
      const int64_t at = c * pixels + first, count = std::min(kPlanePart, pixels - first);
      if (y != nullptr) {
        plane_gradient_from(y + at, dy + at, count, gradient);
      } else {
        plane_gradient(dy + at, x + at, count, mean, scale, bias, norm.activation, gradient);
      }
      Vector<A> sum = {}, product = {};
      for_vectors<A>(count, [&](int64_t i, auto lanes) PK_LAMBDA {
        const Vector<A> d = load(x + at + i, lanes) - mean;
        const Vector<A> masked = first_lanes<A>(as_stored(x, load(gradient + i)), lanes);
        if (g != nullptr) store(g + at + i, masked, lanes);
        sum += masked;
        product += first_lanes<A>(masked * d, lanes);
      });
      of_g += sum_of_lanes<A>(sum);
      of_product += sum_of_lanes<A>(product);
    }
    sums[c] = of_g;
    sums[stride + c] = of_product;
  }
}

// dx = [skip +] a*g + b*(x - mean) + c; if `activated`, g is first multiplied by act'(p).
template <class T>
void planes_input_gradient(const GradientPointers<T>& tensors, bool activated, int64_t planes,
                           int64_t pixels, const NormRow<Accumulate<T>>& norm,
                           const GradientRow<Accumulate<T>>& row) {
  using A = Accumulate<T>;
  alignas(64) A gradient[kPlanePart];
  const bool has_skip = tensors.skip != nullptr;
  for (int64_t c = 0; c < planes; ++c) {
    const A mean = row.mean[c], a_of_plane = row.a[c], b_of_plane = row.b[c], rest = row.c[c];
    for (int64_t first = 0; first < pixels; first += kPlanePart) {
      const int64_t count = std::min(kPlanePart, pixels - first);
      const GradientPointers<T> part = tensors.from(c * pixels + first);
      if (activated) {
        plane_gradient(part.g, part.x, count, mean, norm.scale[c], norm.bias[c], norm.activation,
                       gradient);
      }
      for_vectors<A>(count, [&](int64_t i, auto lanes) PK_LAMBDA {
        const Vector<A> g = activated ? load(gradient + i) : load(part.g + i, lanes);
        Vector<A> result = a_of_plane * g;
        if (row.in_training) {
          result += b_of_plane * (load(part.x + i, lanes) - mean) + rest;
        }
        if (has_skip) result += load(part.skip + i, lanes);
        store(part.dx + i, result, lanes);
      });
    }
  }
}

#define PK_INSTANTIATE(T)                                           \
  template decltype(range_statistics<T>) range_statistics<T>;       \
  template decltype(planes_norm_act<T>) planes_norm_act<T>;         \
  template decltype(planes_norm_add_act<T>) planes_norm_add_act<T>; \
  template decltype(planes_mask<T>) planes_mask<T>;                 \
  template decltype(planes_input_gradient<T>) planes_input_gradient<T>;
PK_FOR_DTYPES(PK_INSTANTIATE)

PK_END_ISA
