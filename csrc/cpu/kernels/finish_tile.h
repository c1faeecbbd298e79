// Fused epilogues of forward and input gradient: from a tile of sums to memory.
#pragma once

#include "conv_product.h"

PK_BEGIN_ISA

// Begins the statistics of a tile of y with its first pixels, `channels` values apart.
template <class T, int kVectors>
PK_OUTLINE void begin_statistics(const T* y, int pixels, int64_t channels,
                                 Accumulate<T>* statistics) {
  using A = Accumulate<T>;
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = v * kLanes<A>;
    Vector<A> first = {}, s = {}, q = {};
    for (int i = 0; i < pixels; ++i) first += load(y + i * channels + at);
    const Vector<A> pivot = finite_or_zero(first * (A(1) / A(pixels)));
    for (int i = 0; i < pixels; ++i) {
      const Vector<A> d = load(y + i * channels + at) - pivot;
      s += d;
      q += d * d;
    }
    store(statistics + at, pivot);
    store(statistics + channels + at, s);
    store(statistics + 2 * channels + at, q);
  }
}

// y = acc [+ conv_bias] [+ residual] for pixels of a strip, and the TileStatistics of y as stored
// unless `statistics` is null. The first pixels of a tile must come first.
template <class T, class A>
struct FinishOutput {
  const ConvForward<T>& op;
  const Strip& strip;
  A* statistics;            // or null
  int64_t first_pixel = 0;  // where the tile of image 0 begins in the strip
  const T* added;
  T* out;

  PK_INLINE FinishOutput(const ConvForward<T>& op, const Strip& strip, A* statistics)
      : op(op), strip(strip), statistics(statistics) {
    const int64_t first = strip.out.first_pixel * op.conv.out_channels;
    added = op.residual == nullptr ? nullptr : op.residual + first;
    out = op.y + first;
  }

  // Finishes kRows pixels of `image`, from `pixel` of the strip on, and kVectors vectors of
  // channels, from k on.
  template <int kRows, int kVectors>
  PK_INLINE void operator()(Vector<A> (&acc)[kRows][kVectors], int64_t image, int64_t pixel,
                            int64_t k) const {
    const int64_t outputs = op.conv.out_channels;
    if (op.conv_bias != nullptr) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const Vector<A> b = load(op.conv_bias + k + v * kLanes<A>);
#pragma GCC unroll 32
        for (int i = 0; i < kRows; ++i) acc[i][v] += b;
      }
    }
    const int64_t ahead = kAhead * kRows * outputs;
    T* to = out + pixel * outputs + k;
    if (added == nullptr) {
#pragma GCC unroll 32
      for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) store(to + v * kLanes<A>, acc[i][v]);
        to = next_pixel(to, outputs);
      }
    } else {
      const T* from = added + pixel * outputs + k;
#pragma GCC unroll 32
      for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const int64_t at = v * kLanes<A>;
          __builtin_prefetch(from + ahead + at);
          __builtin_prefetch(to + ahead + at, 1);
          acc[i][v] += load(from + at);
          store(to + at, acc[i][v]);
        }
        from = next_pixel(from, outputs);
        to = next_pixel(to, outputs);
      }
    }
    if (statistics == nullptr) return;
    A* pivots = statistics + image * 3 * outputs;
    if (pixel == first_pixel + image * strip.tile_pixels()) {
      begin_statistics<T, kVectors>(out + pixel * outputs + k, kRows, outputs, pivots + k);
      return;
    }
    A* sum = pivots + outputs;
    A* square = sum + outputs;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = k + v * kLanes<A>;
      const Vector<A> pivot = load(pivots + at);
      Vector<A> s = {}, q = {};
      const T* y = out + pixel * outputs + at;
#pragma GCC unroll 32
      for (int i = 0; i < kRows; ++i) {
        Vector<A> d = acc[i][v] - pivot;
        if constexpr (!std::is_same_v<T, A>) {  // y as stored
          d = load(y) - pivot;
          y = next_pixel(y, outputs);
        }
        s += d;
        q += d * d;
      }
      store(sum + at, load(sum + at) + s);
      store(square + at, load(square + at) + q);
    }
  }
};

// finish_input_gradient for any activation, with acc in memory: `rows` pixels of `width` channels.
// All pointers are to the first value.
template <class T, class Activated, class A>
PK_OUTLINE void finish_activation(A* acc, int rows, int width, const T* x, T* g, int64_t step,
                                  const NormRow<A>& norm, A* sum, A* product, Activated activated) {
  constexpr bool kStoresActivated = !std::is_null_pointer_v<Activated>;
  constexpr int lanes = kLanes<A>;
  alignas(64) A p_values[kRegisters * lanes] = {};
  for (int i = 0; i < rows; ++i) {
    for (int c = 0; c < width; c += lanes) {
      const Vector<A> d = load(x + i * step + c) - load(norm.mean + c);
      const Vector<A> p = d * load(norm.scale + c) + load(norm.bias + c);
      store(p_values + i * width + c, as_stored(x, p));
    }
  }
  multiply_by_derivative(norm.activation, p_values, acc, rows * width);
  for (int i = 0; i < rows; ++i) {
    for (int c = 0; c < width; c += lanes) {
      const Vector<A> d = load(x + i * step + c) - load(norm.mean + c);
      const Vector<A> masked = stored(g + i * step + c, load(acc + i * width + c));
      store(sum + c, load(sum + c) + masked);
      store(product + c, load(product + c) + masked * d);
    }
  }
  if constexpr (kStoresActivated) {
    if (activated == nullptr) return;
    activate(norm.activation, p_values, int64_t(rows) * width);
    for (int i = 0; i < rows; ++i) {
      for (int c = 0; c < width; c += lanes) {
        store(activated + i * step + c, load(p_values + i * width + c));
      }
    }
  }
}

// g = acc * act'(p) for some vectors of channels from c on, and kRows pixels of x and g from
// `pixel` on, `step` values apart. Adds the sums of g as stored and of g * (x - mean) to
// sums[2][channels]. Stores act(p) in `activated`, an Operand<T>* or nullptr_t, if
// `is_activated_stored`.
template <class T, class Activated, class A, int kRows, int kVectors>
PK_INLINE void finish_input_gradient(const Vector<A> (&acc)[kRows][kVectors], const T* x, T* g,
                                     int64_t pixel, int64_t c, int64_t channels, int64_t step,
                                     const NormRow<A>& norm, A* sums, bool is_activated_stored,
                                     Activated activated) {
  constexpr bool kStoresActivated = !std::is_null_pointer_v<Activated>;
  if (norm.activation.kind != ActivationKind::kRelu) {
    constexpr int kWidth = kVectors * kLanes<A>;
    alignas(64) A values[kRows * kWidth];
#pragma GCC unroll 32
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) store(values + i * kWidth + v * kLanes<A>, acc[i][v]);
    }
    const int64_t first = pixel * channels + c;
    if constexpr (kStoresActivated) activated = is_activated_stored ? activated + first : nullptr;
    const NormRow<A> row{norm.mean + c, norm.scale + c, norm.bias + c, norm.activation};
    finish_activation(values, kRows, kWidth, x + first, g + first, step, row, sums + c,
                      sums + channels + c, activated);
    return;
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = c + v * kLanes<A>;
    const int64_t first = pixel * channels + at, ahead = kAhead * kRows * step;
    const T* x_pixel = x + first;
    T* g_pixel = g + first;
    Activated relu_pixel = activated;
    if constexpr (kStoresActivated) relu_pixel += first;
    const Vector<A> m = load(norm.mean + at), b = load(norm.bias + at), s = load(norm.scale + at);
    Vector<A> sum = {}, product = {};
#pragma GCC unroll 32
    for (int i = 0; i < kRows; ++i) {
      __builtin_prefetch(x_pixel + ahead);
      __builtin_prefetch(g_pixel + ahead, 1);
      const Vector<A> d = load(x_pixel) - m;
      const Vector<A> p = d * s + b;
      if constexpr (kStoresActivated) {
        if (is_activated_stored) store(relu_pixel, relu(p));
        relu_pixel = next_pixel(relu_pixel, step);
      }
      const Vector<A> masked = stored(g_pixel, where_active<T>(p, acc[i][v]));
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
