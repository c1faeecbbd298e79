// Batch norm and ReLU over a tile of pixels.
#pragma once

#include <algorithm>

#include "../kernels.h"
#include "normalise.h"

PK_BEGIN_ISA

// y = relu(p).
template <class T>
void tile_norm_act(const T* x, T* y, int64_t pixels, int64_t channels,
                   const Normalisation<Accumulate<T>>& norm) {
  normalise(x, y, channels, pixels, channels, norm);
}

// g = dy * [p > 0], stored with kStore, and the sums (TileSums) of g as stored: sums of few pixels
// in vectors, their sums in float64.
template <class T, bool kStore>
void tile_mask(std::bool_constant<kStore>, const T* dy, const T* x, T* g, int64_t pixels,
               int64_t channels, const Normalisation<Accumulate<T>>& norm, double* sums) {
  using A = Accumulate<T>;
  constexpr int64_t kShortSum = 16;
  std::fill(sums, sums + 2 * channels, 0.0);
  for_channel_blocks<A>(channels, [&](auto vectors, int64_t c, auto lanes) PK_LAMBDA {
    constexpr int kVectors = decltype(vectors)::value;
    const NormVectors<A, kVectors> n(norm, c, lanes, true);
    for (int64_t first = 0; first < pixels; first += kShortSum) {
      Vector<A> short_sum[kVectors] = {}, short_product[kVectors] = {};
      for (int64_t p = first; p < std::min(first + kShortSum, pixels); ++p) {
        for (int v = 0; v < kVectors; ++v) {
          const int64_t at = p * channels + c + v * kLanes<A>;
          const Vector<A> d = load(x + at, lanes) - n.mean[v];
          const Vector<A> masked =
              as_stored(x, where_active(d * n.scale[v] + n.bias[v], load(dy + at, lanes)));
          if constexpr (kStore) store(g + at, masked, lanes);
          short_sum[v] += masked;
          short_product[v] += masked * d;
        }
      }
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = c + v * kLanes<A>;
        for (int i = 0; i < lanes; ++i) {
          sums[at + i] += short_sum[v][i];
          sums[channels + at + i] += short_product[v][i];
        }
      }
    }
  });
}

// dx = [skip +] a*g + b*(x - mean) + c; with kMask, g is first set to 0 where p <= 0.
template <class T, bool kMask, bool kHasSkip>
void tile_input_gradient(std::bool_constant<kMask>, std::bool_constant<kHasSkip>,
                         const GradientPointers<T>& tile, int64_t pixels, int64_t channels,
                         const Normalisation<Accumulate<T>>& norm,
                         const InputGradient<Accumulate<T>>& gradient) {
  using A = Accumulate<T>;
  const T *skip = tile.skip, *g = tile.g, *x = tile.x;
  T* dx = tile.dx;
  for_channel_blocks<A>(channels, [&](auto vectors, int64_t first, auto lanes) PK_LAMBDA {
    constexpr int kVectors = decltype(vectors)::value;
    const NormVectors<A, kVectors> n(norm, first, lanes, kMask);
    Vector<A> a[kVectors], b[kVectors], c[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = first + v * kLanes<A>;
      a[v] = load(gradient.a.data() + at, lanes);
      b[v] = load(gradient.b.data() + at, lanes);
      c[v] = load(gradient.c.data() + at, lanes);
    }
    for (int64_t p = 0; p < pixels; ++p) {
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = p * channels + first + v * kLanes<A>;
        const Vector<A> d = load(x + at, lanes) - n.mean[v];
        Vector<A> masked = load(g + at, lanes);
        if constexpr (kMask) masked = where_active(d * n.scale[v] + n.bias[v], masked);
        Vector<A> result = a[v] * masked;
        if (gradient.in_training) result += b[v] * d + c[v];
        if constexpr (kHasSkip) result += load(skip + at, lanes);
        store(dx + at, result, lanes);
      }
    }
  });
}

#define PK_INSTANTIATE(T)                                                                     \
  template decltype(tile_norm_act<T>) tile_norm_act<T>;                                       \
  template decltype(tile_mask<T, true>) tile_mask<T, true>;                                   \
  template decltype(tile_mask<T, false>) tile_mask<T, false>;                                 \
  template decltype(tile_input_gradient<T, true, false>) tile_input_gradient<T, true, false>; \
  template decltype(tile_input_gradient<T, false, true>) tile_input_gradient<T, false, true>; \
  template decltype(tile_input_gradient<T, false, false>) tile_input_gradient<T, false, false>;
PK_FOR_DTYPES(PK_INSTANTIATE)

PK_END_ISA
