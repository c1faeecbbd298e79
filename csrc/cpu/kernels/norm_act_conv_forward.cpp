// Norm, activation and convolution over a strip of pixels, forward.

#include "../kernels.h"
#include "conv_product.h"
#include "finish_tile.h"
#include "winograd.h"

PK_BEGIN_ISA

// y = conv(act(p)) [+ conv_bias] [+ residual], and the TileStatistics of y as stored unless
// `statistics` is null, computed while y is in registers.
template <class T>
void strip_forward(const ConvForward<T>& op, const Strip& strip, Accumulate<T>* statistics,
                   void* scratch) {
  using A = Accumulate<T>;
  using O = Operand<T>;
  const ConvSizes& conv = op.conv;
  const Haloed operand = haloed_input(conv, strip.out.rows, strip.in.width);
  const int64_t channels = conv.in_channels;
  const T* x = op.x;
  O* memory = static_cast<O*>(scratch);
  O* activated = memory + Winograd::values(conv);
  fill_haloed(activated, operand, strip.in, strip.images, conv,
              [&](O* row, int64_t pixel, int64_t image) PK_LAMBDA {
                normalise(x + pixel * channels, row, channels, strip.in.width, channels,
                          op.norm.row(strip.first_image + image));
              });
  const FinishOutput<T, A> finish(op, strip, statistics);
  const ProductPixels<Haloed> pixels = output_pixels(conv, strip, operand);
  for_served_images(conv, activated, operand, strip.images,
                    [&](int64_t first, int64_t count, bool is_served) PK_LAMBDA {
                      images_product(activated, pixels, first, count, is_served, conv, op.packed,
                                     memory, finish);
                    });
}

#define PK_INSTANTIATE(T) template decltype(strip_forward<T>) strip_forward<T>;
PK_FOR_CONV_DTYPES(PK_INSTANTIATE)

PK_END_ISA
