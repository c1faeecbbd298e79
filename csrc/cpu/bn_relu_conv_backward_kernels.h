// BN-ReLU-Conv over a strip of pixels, backward. Included once for each instruction set.

#include "weight_gradient.h"

// One strip of the backward: g = dgrad(dy) * [p > 0] with its sums where op.g is given, and the
// strip's part of the weight gradient where `dweight` is given.
template <class T, class A>
void strip_backward(const ConvBackward<T>& op, const Strip& strip, double* tile_sums, A* dweight,
                    void* scratch) {
  using O = Operand<T>;
  const Conv& conv = op.conv;
  const Normalisation<A>& norm = op.norm;
  const T* x = op.x;
  T* g = op.g;
  const int64_t channels = conv.in_channels, outputs = conv.out_channels;
  const int64_t dy_pitch = (strip.width + 2 * conv.halo_w()) * outputs;
  const int64_t a_pitch = (strip.width + 2 * conv.halo_w()) * channels;
  const int64_t dy_image = dy_pitch * (strip.rows + 2 * conv.halo_h());
  const int64_t a_image = a_pitch * (strip.rows + 2 * conv.halo_h());
  A* sums = static_cast<A*>(scratch);
  O* operands = reinterpret_cast<O*>(sums + strip.images * 2 * channels);
  const O* gradient = operands;
  bool in_place = false;  // the product reads dy in the tensor, not in scratch memory
  if constexpr (std::is_same_v<T, O>) {
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
    const int64_t end = strip.first_pixel + strip.pixels();
    fill_bordered(operands, strip, conv, outputs, [&](O* row, int64_t pixel) PK_LAMBDA {
      unfold(op.dy, pixel >= strip.first_pixel && pixel < end, row, pixel, strip.width, outputs);
    });
    operands += strip.images * dy_image;
  }
  // The epilogue of a 1x1 kernel computes every p, and stores relu(p) here.
  O* activation = operands;
  const bool normalised = g != nullptr && conv.taps() == 1 && dweight != nullptr;
  if (g != nullptr) {
    const T* from = x + strip.first_pixel * channels;
    T* to = g + strip.first_pixel * channels;
    std::fill_n(sums, strip.images * 2 * channels, A(0));
    strip_product(
        gradient, strip, conv, op.packed,
        [&](auto vectors, auto count, auto& acc, int64_t tile, int64_t pixel, int64_t c) PK_LAMBDA {
          constexpr int kRows = decltype(count)::value;
#pragma GCC unroll 4
          for (int v = 0; v < decltype(vectors)::value; ++v) {
            const int64_t at = c + v * kLanes<A>;
            const int64_t first = pixel * channels + at, ahead = kAhead * kRows * channels;
            const T* x_pixel = from + first;
            T* g_pixel = to + first;
            O* relu_pixel = activation + first;
            const Vector<A> m = load(norm.mean + at), b = load(norm.bias + at),
                            s = load(norm.scale.data() + at);
            Vector<A> sum = {}, product = {};
#pragma GCC unroll 32
            for (int i = 0; i < kRows; ++i) {
              __builtin_prefetch(x_pixel + ahead);
              __builtin_prefetch(g_pixel + ahead, 1);
              const Vector<A> d = load(x_pixel) - m;
              const Vector<A> p = d * s + b;
              if (normalised) store(relu_pixel, relu(p));
              const Vector<A> masked = as_stored(to, where_active(p, acc[i][v]));
              store(g_pixel, masked);
              sum += masked;
              product += masked * d;
              x_pixel = next_pixel(x_pixel, channels);
              g_pixel = next_pixel(g_pixel, channels);
              relu_pixel = next_pixel(relu_pixel, channels);
            }
            A* to_sum = sums + tile * 2 * channels + at;
            A* to_product = to_sum + channels;
            store(to_sum, load(to_sum) + sum);
            store(to_product, load(to_product) + product);
          }
        });
    std::copy_n(sums, strip.images * 2 * channels, tile_sums);
  }
  if (dweight == nullptr) return;
  if (!normalised) {
    fill_bordered(activation, strip, conv, channels, [&](O* row, int64_t pixel) PK_LAMBDA {
      normalise(x + pixel * channels, row, strip.width, channels, norm);
    });
  }
  O* pairs = activation + strip.images * a_image;
  const PixelRows<O> a{activation, a_image, a_pitch, channels};
  const PixelRows<O> dy{gradient + conv.halo_h() * dy_pitch + conv.halo_w() * outputs, dy_image,
                        dy_pitch, outputs};
  strip_weight_gradient(a, dy, strip, conv, op.input_last, pairs, dweight);
}
