// Norm, activation and convolution over a strip of pixels, backward.

#include "../kernels.h"
#include "amx_weight_gradient.h"
#include "conv_product.h"
#include "finish_tile.h"
#include "weight_gradient.h"
#include "winograd.h"

PK_BEGIN_ISA

// g = dgrad(dy) * act'(p) with its sums unless op.g is null, and the strip's part of the weight
// gradient unless `dweight` is null.
template <class T>
void strip_backward(const ConvBackward<T>& op, const Strip& strip, double* tile_sums,
                    Accumulate<T>* dweight, void* scratch) {
  using A = Accumulate<T>;
  using O = Operand<T>;
  const ConvSizes& conv = op.conv;
  const T* x = op.x;
  const int64_t channels = conv.in_channels, outputs = conv.out_channels;
  const Haloed dy_operand = haloed_output(conv, strip.out.rows, strip.out.width);
  const Haloed a_operand = haloed_input(conv, strip.out.rows, strip.in.width);
  A* sums = static_cast<A*>(scratch);
  O* memory = reinterpret_cast<O*>(sums + strip.images * 2 * channels);
  O* operands = memory + Winograd::values(conv);
  const O* gradient = operands;
  bool in_place = false;  // the product reads dy in the tensor, not in scratch memory
  if constexpr (std::is_same_v<T, O>) {
    const bool has_step = op.dy.coefficients != nullptr;
    T* whole = op.dy.tensors.dx;
    in_place = conv.taps() == 1 && (!has_step || whole != nullptr);
    if (in_place) {
      const int64_t at = strip.out.first_pixel * outputs;
      gradient = (has_step ? whole : op.dy.tensors.g) + at;
      if (has_step) {
        apply_step(op.dy, false, whole + at, outputs, strip.out.first_pixel, strip.out.width,
                   outputs, strip.first_image);
      }
    }
  }
  if (!in_place) {
    const int64_t first = strip.out.first_pixel;
    const int64_t end = first + strip.images * strip.tile_pixels();
    fill_haloed(operands, dy_operand, strip.out, strip.images, conv,
                [&](O* row, int64_t pixel, int64_t image) PK_LAMBDA {
                  const bool stores = pixel >= first && pixel < end;
                  apply_step(op.dy, stores, row, outputs, pixel, strip.out.width, outputs,
                             strip.first_image + image);
                });
    operands += strip.images * dy_operand.values();
  }
  // The epilogue of a 1x1 kernel computes every p, and stores act(p) here.
  O* activated = operands;
  const bool normalised = op.g != nullptr && conv.taps() == 1 && dweight != nullptr;
  if (op.g != nullptr) {
    std::fill_n(sums, strip.images * 2 * channels, A(0));
    const T* from = x + strip.in.first_pixel * channels;
    T* to = op.g + strip.in.first_pixel * channels;
    const int64_t step = conv.stride.w * channels;
    const Normalisation<A>& norm = op.norm;
    const int64_t first_image = strip.first_image;
    const auto finish = [=, &norm](const auto& acc, int64_t image, int64_t pixel,
                                   int64_t c) PK_LAMBDA {
      finish_input_gradient(acc, from, to, pixel, c, channels, step, norm.row(first_image + image),
                            sums + image * 2 * channels, normalised, activated);
    };
    for_served_images(conv, gradient, dy_operand, strip.images,
                      [&](int64_t first, int64_t count, bool is_served) PK_LAMBDA {
                        for (int64_t place = 0; place < conv.stride.h * conv.stride.w; ++place) {
                          const int64_t row = place / conv.stride.w, column = place % conv.stride.w;
                          images_product(gradient,
                                         input_pixels(conv, strip, dy_operand, row, column), first,
                                         count, is_served, conv, op.packed, memory, finish);
                        }
                      });
    std::copy_n(sums, strip.images * 2 * channels, tile_sums);
  }
  if (dweight == nullptr) return;
  if (!normalised) {
    fill_haloed(activated, a_operand, strip.in, strip.images, conv,
                [&](O* row, int64_t pixel, int64_t image) PK_LAMBDA {
                  normalise(x + pixel * channels, row, channels, strip.in.width, channels,
                            op.norm.row(strip.first_image + image));
                });
  }
  if constexpr (kHasWinograd<O>) {
    if (Winograd::serves(conv) && are_in_range(gradient, strip.images * dy_operand.values()) &&
        are_in_range(activated, strip.images * a_operand.values())) {
      winograd_weight_gradient(activated, a_operand, gradient, dy_operand, strip, conv, memory,
                               dweight + conv.taps() * channels * outputs);
      return;
    }
  }
  O* pairs = activated + strip.images * a_operand.values();
#ifdef PK_HAS_TILES
  if (amx_weight_gradient(activated, a_operand, gradient, dy_operand, strip, conv, op.input_last,
                          pairs, dweight)) {
    return;
  }
#endif
  const PixelRows<O> a(activated, a_operand), dy_haloed(gradient, dy_operand);
  const PixelRows<O> dy = dy_haloed.from(conv.halo_h(), conv.halo_w());
  strip_weight_gradient(a, dy, strip, conv, op.input_last, pairs, dweight);
}

template <class T>
void merge_parts(Accumulate<T>* sums, int64_t parts, int64_t part, int64_t step, int64_t channels) {
  if constexpr (kHasWinograd<Operand<T>>) merge_transformed(sums, parts, part, step, channels);
}

#define PK_INSTANTIATE(T)                                 \
  template decltype(strip_backward<T>) strip_backward<T>; \
  template decltype(merge_parts<T>) merge_parts<T>;
PK_FOR_CONV_DTYPES(PK_INSTANTIATE)

PK_END_ISA
