// The end of an input gradient: what happens to a tile of sums.
#pragma once

#include "conv_product.h"

PK_BEGIN_ISA

// g = acc * [p > 0] for the channels of some vectors from c on, and kRows pixels of x and g from
// `pixel` on, `step` values apart. Adds the sums of g as stored and of g * (x - mean) to
// sums[2][channels]. Stores relu(p) in `activation`, an Operand<T>* or nullptr_t, if
// `is_activation_stored`.
template <class T, class Activation, class A, int kRows, int kVectors>
PK_INLINE void finish_input_gradient(const Vector<A> (&acc)[kRows][kVectors], const T* x, T* g,
                                     int64_t pixel, int64_t c, int64_t channels, int64_t step,
                                     const Normalisation<A>& norm, A* sums,
                                     bool is_activation_stored, Activation activation) {
  constexpr bool kHasActivation = !std::is_null_pointer_v<Activation>;
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = c + v * kLanes<A>;
    const int64_t first = pixel * channels + at, ahead = kAhead * kRows * step;
    const T* x_pixel = x + first;
    T* g_pixel = g + first;
    Activation relu_pixel = activation;
    if constexpr (kHasActivation) relu_pixel += first;
    const Vector<A> m = load(norm.mean + at), b = load(norm.bias + at),
                    s = load(norm.scale.data() + at);
    Vector<A> sum = {}, product = {};
#pragma GCC unroll 32
    for (int i = 0; i < kRows; ++i) {
      __builtin_prefetch(x_pixel + ahead);
      __builtin_prefetch(g_pixel + ahead, 1);
      const Vector<A> d = load(x_pixel) - m;
      const Vector<A> p = d * s + b;
      if constexpr (kHasActivation) {
        if (is_activation_stored) store(relu_pixel, relu(p));
        relu_pixel = next_pixel(relu_pixel, step);
      }
      const Vector<A> masked = stored(g_pixel, where_active(p, acc[i][v]));
      sum += masked;
      product += masked * d;
      x_pixel = next_pixel(x_pixel, step);
      g_pixel = next_pixel(g_pixel, step);
    }
    A* to_product = sums + channels;
    store(sums + at, load(sums + at) + sum);
    store(to_product + at, load(to_product + at) + product);
  }
}

PK_END_ISA
