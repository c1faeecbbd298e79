// The end of a forward: what happens to a tile of sums.
#pragma once

#include "conv_product.h"

PK_BEGIN_ISA

// Begins the statistics of a tile of y: of some channels of its first pixels, `channels` values
// apart in memory.
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

// y = acc [+ conv_bias] [+ residual] for pixels of a strip. Where `statistics` are given, writes
// those of y as stored in the strip's tiles (TileStatistics), whose first pixels come first.
template <class T, class A>
struct FinishOutput {
  const ConvForward<T>& op;
  const Strip& strip;
  A* statistics;            // or null
  int64_t first_pixel = 0;  // of the tile of image 0, in the strip
  const T* added;
  T* out;

  PK_INLINE FinishOutput(const ConvForward<T>& op, const Strip& strip, A* statistics)
      : op(op), strip(strip), statistics(statistics) {
    const int64_t first = strip.out.first_pixel * op.conv.out_channels;
    added = op.residual == nullptr ? nullptr : op.residual + first;
    out = op.y + first;
  }

  // For the channels of some vectors from k on, and kRows pixels from `pixel` of the strip on, in
  // the image of this number.
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

PK_END_ISA
