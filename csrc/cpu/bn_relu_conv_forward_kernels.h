// BN-ReLU-Conv over a strip of pixels, forward. Included once for each instruction set.

#include "conv_product.h"

// y = conv(relu(p)) [+ conv_bias] [+ residual] for one strip. Where `statistics` are given, also
// those of y as stored in the strip's tiles (TileStatistics), computed while y is in registers.
template <class T, class A>
void strip_forward(const ConvForward<T>& op, const Strip& strip, A* statistics, void* scratch) {
  using O = Operand<T>;
  const Conv& conv = op.conv;
  const int64_t channels = conv.in_channels, outputs = conv.out_channels;
  const T *x = op.x, *bias = op.conv_bias;
  const ProductPixels pixels = output_pixels(conv, strip);
  O* activation = static_cast<O*>(scratch);
  fill_bordered(activation, pixels.operand, strip.in, strip.images, conv,
                [&](O* row, int64_t pixel) PK_LAMBDA {
                  normalise(x + pixel * channels, row, strip.in.width, channels, op.norm);
                });
  T* out = op.y + strip.out.first_pixel * outputs;
  if (statistics != nullptr) std::fill_n(statistics, strip.images * 3 * outputs, A(0));
  const T* added = op.residual == nullptr ? nullptr : op.residual + strip.out.first_pixel * outputs;
  strip_product(
      activation, pixels, strip.images, conv, op.packed,
      [&](auto vectors, auto count, auto& acc, int64_t image, int64_t pixel, int64_t k) PK_LAMBDA {
        constexpr int kRows = decltype(count)::value, kVectors = decltype(vectors)::value;
        if (bias != nullptr) {
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) {
            const Vector<A> b = load(bias + k + v * kLanes<A>);
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
        A* sum = pivots + outputs;
        A* square = sum + outputs;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          const int64_t at = k + v * kLanes<A>;
          if (pixel == image * strip.tile_pixels()) {
            Vector<A> first = {};
#pragma GCC unroll 32
            for (int i = 0; i < kRows; ++i) {
              first += as_stored(out, acc[i][v]);
            }
            store(pivots + at, finite_or_zero(first * (A(1) / A(kRows))));
          }
          const Vector<A> pivot = load(pivots + at);
          Vector<A> s = {}, q = {};
#pragma GCC unroll 32
          for (int i = 0; i < kRows; ++i) {
            const Vector<A> d = as_stored(out, acc[i][v]) - pivot;
            s += d;
            q += d * d;
          }
          store(sum + at, load(sum + at) + s);
          store(square + at, load(square + at) + q);
        }
      });
}
