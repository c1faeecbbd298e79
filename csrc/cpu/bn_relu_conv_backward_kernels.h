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
  const Bordered dy_operand = bordered_output(conv, strip.out.rows, strip.out.width);
  const Bordered a_operand = bordered_input(conv, strip.out.rows, strip.in.width);
  A* sums = static_cast<A*>(scratch);
  O* operands = reinterpret_cast<O*>(sums + strip.images * 2 * channels);
  const O* gradient = operands;
  bool in_place = false;  // the product reads dy in the tensor, not in scratch memory
  if constexpr (std::is_same_v<T, O>) {
    const bool folded = op.dy.coefficients != nullptr;
    T* unfolded = op.dy.tensors.dx;
    in_place = conv.taps() == 1 && (!folded || unfolded != nullptr);
    if (in_place) {
      const int64_t at = strip.out.first_pixel * outputs;
      gradient = (folded ? unfolded : op.dy.tensors.g) + at;
      if (folded) {
        unfold(op.dy, false, unfolded + at, strip.out.first_pixel, strip.out.width, outputs);
      }
    }
  }
  if (!in_place) {
    const int64_t first = strip.out.first_pixel;
    const int64_t end = first + strip.images * strip.tile_pixels();
    fill_bordered(
        operands, dy_operand, strip.out, strip.images, conv, [&](O* row, int64_t pixel) PK_LAMBDA {
          unfold(op.dy, pixel >= first && pixel < end, row, pixel, strip.out.width, outputs);
        });
    operands += strip.images * dy_operand.values();
  }
  // The epilogue of a 1x1 kernel computes every p, and stores relu(p) here.
  O* activation = operands;
  const bool normalised = g != nullptr && conv.taps() == 1 && dweight != nullptr;
  if (g != nullptr) {
    const T* from = x + strip.in.first_pixel * channels;
    T* to = g + strip.in.first_pixel * channels;
    std::fill_n(sums, strip.images * 2 * channels, A(0));
    int64_t step = channels;  // from a pixel to the next, in x and g
    const auto finish = [&](auto vectors, auto count, auto& acc, int64_t image, int64_t pixel,
                            int64_t c) PK_LAMBDA {
      constexpr int kRows = decltype(count)::value;
#pragma GCC unroll 4
      for (int v = 0; v < decltype(vectors)::value; ++v) {
        const int64_t at = c + v * kLanes<A>;
        const int64_t first = pixel * channels + at, ahead = kAhead * kRows * step;
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
          x_pixel = next_pixel(x_pixel, step);
          g_pixel = next_pixel(g_pixel, step);
          relu_pixel = next_pixel(relu_pixel, step);
        }
        A* to_sum = sums + image * 2 * channels + at;
        A* to_product = to_sum + channels;
        store(to_sum, load(to_sum) + sum);
        store(to_product, load(to_product) + product);
      }
    };
    for (int64_t place = 0; place < conv.stride.h * conv.stride.w; ++place) {
      const int64_t row = place / conv.stride.w, column = place % conv.stride.w;
      const ProductPixels pixels = input_pixels(conv, strip, row, column);
      step = pixels.result_step.w * channels;
      strip_product(gradient, pixels, strip.images, conv, op.packed, finish);
    }
    std::copy_n(sums, strip.images * 2 * channels, tile_sums);
  }
  if (dweight == nullptr) return;
  if (!normalised) {
    fill_bordered(activation, a_operand, strip.in, strip.images, conv,
                  [&](O* row, int64_t pixel) PK_LAMBDA {
                    normalise(x + pixel * channels, row, strip.in.width, channels, norm);
                  });
  }
  O* pairs = activation + strip.images * a_operand.values();
  const PixelRows<O> a(activation, a_operand), dy_bordered(gradient, dy_operand);
  const PixelRows<O> dy = dy_bordered.from(conv.halo_h(), conv.halo_w());
  strip_weight_gradient(a, dy, strip, conv, op.input_last, pairs, dweight);
}
