// BN-ReLU-Conv over a strip of pixels, forward. Included once for each instruction set.

#include "conv_product.h"

// y = conv(relu(x * scale + shift)) [+ bias] [+ residual] for one strip, and where `mean` is given
// the strip's mean and sum of squared deviations of y as stored. Those are taken while y is in
// registers, around a pivot, the strip's first pixel: mean = pivot + sum(d) / n and
// squares = sum(d^2) - sum(d)^2 / n for d = y - pivot. As the pivot is one of the n samples, what
// is subtracted at the end is at most n times what remains, and usually about as much.
template <class T, class A>
void strip_forward(const Strip& strip, const ConvSize& conv, const T* x, const A* scale,
                   const A* shift, const A* packed, const T* bias, const T* residual, T* y, A* mean,
                   A* squares, A* scratch) {
  const int64_t channels = conv.in_channels, outputs = conv.out_channels;
  fill_bordered(scratch, strip, conv, channels, [&](A* row, int64_t pixel) PK_LAMBDA {
    normalise(x + pixel * channels, row, strip.width, channels, scale, shift);
  });
  const int64_t pitch = (strip.width + 2 * conv.halo_w()) * channels;
  const TapOffsets taps(conv, pitch, channels);
  T* out = y + strip.first_pixel * outputs;
  A* pivot = scratch + pitch * (strip.rows + 2 * conv.halo_h());
  A* sum = pivot + outputs;
  A* square = sum + outputs;
  if (mean != nullptr) std::fill(sum, square + outputs, A(0));
  const T* added = residual == nullptr ? nullptr : residual + strip.first_pixel * outputs;
  strip_product(scratch, pitch, strip, conv, taps.data(), channels, outputs, packed,
                [&](auto vectors, auto count, auto& acc, int64_t pixel, int64_t k) PK_LAMBDA {
                  if (bias != nullptr) {
#pragma GCC unroll 4
                    for (int v = 0; v < decltype(vectors)::value; ++v) {
                      const Vector<A> b = load(bias + k + v * kLanes<A>);
#pragma GCC unroll 32
                      for (int i = 0; i < decltype(count)::value; ++i) acc[i][v] += b;
                    }
                  }
                  if (added != nullptr) {
#pragma GCC unroll 32
                    for (int i = 0; i < decltype(count)::value; ++i) {
#pragma GCC unroll 4
                      for (int v = 0; v < decltype(vectors)::value; ++v) {
                        acc[i][v] += load(added + (pixel + i) * outputs + k + v * kLanes<A>);
                      }
                    }
                  }
#pragma GCC unroll 32
                  for (int i = 0; i < decltype(count)::value; ++i) {
#pragma GCC unroll 4
                    for (int v = 0; v < decltype(vectors)::value; ++v) {
                      store(out + (pixel + i) * outputs + k + v * kLanes<A>, acc[i][v]);
                    }
                  }
                  if (mean == nullptr) return;
#pragma GCC unroll 4
                  for (int v = 0; v < decltype(vectors)::value; ++v) {
                    const int64_t at = k + v * kLanes<A>;
                    if (pixel == 0) store(pivot + at, as_stored(out, acc[0][v]));
                    const Vector<A> centre = load(pivot + at);
                    Vector<A> s = load(sum + at), q = load(square + at);
#pragma GCC unroll 32
                    for (int i = 0; i < decltype(count)::value; ++i) {
                      const Vector<A> d = as_stored(out, acc[i][v]) - centre;
                      s += d;
                      q += d * d;
                    }
                    store(sum + at, s);
                    store(square + at, q);
                  }
                });
  if (mean == nullptr) return;
  const A count = A(strip.rows * strip.width);
  for (int64_t k = 0; k < outputs; ++k) {
    mean[k] = pivot[k] + sum[k] / count;
    squares[k] = std::max(A(0), square[k] - sum[k] * (sum[k] / count));
  }
}
