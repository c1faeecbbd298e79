// BN-ReLU-Conv over a strip of pixels, backward. Included once for each instruction set.

#include "conv_product.h"

// One operand of a product over pixels: rows of pixels that are `pitch` values apart.
template <class A>
struct PixelRows {
  const A* values;
  int64_t pitch, channels;

  PixelRows from(int64_t row, int64_t column) const {
    return {values + row * pitch + column * channels, pitch, channels};
  }
};

// partial[n][w] += sum over `rows` by `width` pixels of narrow[p][n] * wide[p][w].
template <class A>
PK_INLINE void strip_weight_gradient(const PixelRows<A>& narrow, const PixelRows<A>& wide,
                                     int64_t rows, int64_t width, A* partial) {
  for_vector_blocks<A>(wide.channels, kMaxVectors, [&](auto vectors, int64_t first) PK_LAMBDA {
    constexpr int kVectors = decltype(vectors)::value;
    int64_t s = 0;
    while (s < narrow.channels) {
      const int64_t tile = next_rows<max_tile_rows(kVectors)>(narrow.channels - s);
      with_rows<max_tile_rows(kVectors)>(tile, [&](auto count) PK_LAMBDA {
        constexpr int kRows = decltype(count)::value;
        Vector<A> acc[kRows][kVectors] = {};
        for (int64_t r = 0; r < rows; ++r) {
          const A* a = narrow.values + r * narrow.pitch + s;
          const A* b = wide.values + r * wide.pitch + first;
          for (int64_t p = 0; p < width; ++p) {
            Vector<A> w[kVectors];
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) w[v] = load(b + v * kLanes<A>);
#pragma GCC unroll 32
            for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
              for (int v = 0; v < kVectors; ++v) acc[i][v] += a[i] * w[v];
            }
            a += narrow.channels;
            b += wide.channels;
          }
        }
#pragma GCC unroll 32
        for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) {
            A* to = partial + (s + i) * wide.channels + first + v * kLanes<A>;
            store(to, load(to) + acc[i][v]);
          }
        }
      });
      s += tile;
    }
  });
}

// One strip of the backward: g = dgrad(dy) * [p > 0] with its sums where op.g is given, and the
// strip's part of the weight gradient where `dweight` is given.
template <class T, class A>
void strip_backward(const ConvBackward<T>& op, const Strip& strip, double* tile_sums, A* dweight,
                    A* scratch) {
  const Conv& conv = op.conv;
  const Normalisation<A>& norm = op.norm;
  const T* x = op.x;
  T* g = op.g;
  const int64_t channels = conv.in_channels, outputs = conv.out_channels;
  const int64_t dy_pitch = (strip.width + 2 * conv.halo_w()) * outputs;
  const int64_t a_pitch = (strip.width + 2 * conv.halo_w()) * channels;
  const A* gradient = scratch;
  bool in_place = false;  // the product reads dy in the tensor, not in scratch memory
  if constexpr (std::is_same_v<T, A>) {
    const bool folded = op.dy.coefficients != nullptr;
    T* unfolded = op.dy.tensors.dx;
    in_place = conv.taps() == 1 && (!folded || unfolded != nullptr);
    if (in_place) {
      const int64_t at = strip.first_pixel * outputs;
      gradient = (folded ? unfolded : op.dy.tensors.g) + at;
      if (folded) {
        unfold(op.dy, false, unfolded + at, strip.first_pixel, strip.width, outputs);
      }
    }
  }
  if (!in_place) {
    const int64_t end = strip.first_pixel + strip.rows * strip.width;
    fill_bordered(scratch, strip, conv, outputs, [&](A* row, int64_t pixel) PK_LAMBDA {
      unfold(op.dy, pixel >= strip.first_pixel && pixel < end, row, pixel, strip.width, outputs);
    });
    scratch += dy_pitch * (strip.rows + 2 * conv.halo_h());
  }
  // The epilogue of a 1x1 kernel computes every p, and stores relu(p) here.
  A* activation = scratch;
  const bool normalised = g != nullptr && conv.taps() == 1 && dweight != nullptr;
  if (g != nullptr) {
    const T* from = x + strip.first_pixel * channels;
    T* to = g + strip.first_pixel * channels;
    A* sums = scratch + a_pitch * (strip.rows + 2 * conv.halo_h());
    std::fill(sums, sums + 2 * channels, A(0));
    strip_product(gradient, strip, conv, op.packed,
                  [&](auto vectors, auto count, auto& acc, int64_t pixel, int64_t c) PK_LAMBDA {
#pragma GCC unroll 4
                    for (int v = 0; v < decltype(vectors)::value; ++v) {
                      const int64_t at = c + v * kLanes<A>;
                      const Vector<A> m = load(norm.mean + at), b = load(norm.bias + at),
                                      s = load(norm.scale.data() + at);
                      Vector<A> sum = {}, product = {};
#pragma GCC unroll 32
                      for (int i = 0; i < decltype(count)::value; ++i) {
                        const int64_t next =
                            (pixel + i + kAhead * decltype(count)::value) * channels + at;
                        __builtin_prefetch(from + next);
                        __builtin_prefetch(to + next, 1);
                        const Vector<A> d = load(from + (pixel + i) * channels + at) - m;
                        const Vector<A> p = d * s + b;
                        if (normalised) store(activation + (pixel + i) * channels + at, relu(p));
                        const Vector<A> masked = as_stored(to, where_active(p, acc[i][v]));
                        store(to + (pixel + i) * channels + at, masked);
                        sum += masked;
                        product += masked * d;
                      }
                      A* products = sums + channels;
                      store(sums + at, load(sums + at) + sum);
                      store(products + at, load(products + at) + product);
                    }
                  });
    std::copy(sums, sums + 2 * channels, tile_sums);
  }
  if (dweight == nullptr) return;
  if (!normalised) {
    fill_bordered(activation, strip, conv, channels, [&](A* row, int64_t pixel) PK_LAMBDA {
      normalise(x + pixel * channels, row, strip.width, channels, norm);
    });
  }
  const PixelRows<A> bordered{activation, a_pitch, channels};
  const PixelRows<A> dy{gradient + conv.halo_h() * dy_pitch + conv.halo_w() * outputs, dy_pitch,
                        outputs};
  for (int64_t t = 0; t < conv.taps(); ++t) {
    // 0 * NaN is NaN: only pixels where the tap falls inside the image, no border.
    const int64_t tap_row = t / conv.kernel_w, tap_column = t % conv.kernel_w;
    const int64_t down = strip.row + tap_row - conv.halo_h(), right = tap_column - conv.halo_w();
    const int64_t row = std::max<int64_t>(0, -down), column = std::max<int64_t>(0, -right);
    const int64_t rows = std::min(strip.rows, strip.image_rows - down) - row;
    const int64_t width = std::min(strip.width, strip.width - right) - column;
    if (rows <= 0 || width <= 0) continue;
    const PixelRows<A> a = bordered.from(row + tap_row, column + tap_column);
    const PixelRows<A> d = dy.from(row, column);
    strip_weight_gradient(op.input_last ? d : a, op.input_last ? a : d, rows, width,
                          dweight + t * channels * outputs);
  }
}
