// BN-ReLU-Conv over a strip of pixels, forward. Included once for each instruction set.

#include "conv_product.h"
#include "finish_output.h"

// y = conv(relu(p)) [+ conv_bias] [+ residual] for one strip. Where `statistics` are given, also
// those of y as stored in the strip's tiles (TileStatistics), computed while y is in registers.
template <class T, class A>
void strip_forward(const ConvForward<T>& op, const Strip& strip, A* statistics, void* scratch) {
  using O = Operand<T>;
  const Conv& conv = op.conv;
  const Bordered operand = bordered_input(conv, strip.out.rows, strip.in.width);
  const int64_t channels = conv.in_channels;
  const T* x = op.x;
  O* activation = static_cast<O*>(scratch);
  fill_bordered(activation, operand, strip.in, strip.images, conv,
                [&](O* row, int64_t pixel) PK_LAMBDA {
                  normalise(x + pixel * channels, row, channels, strip.in.width, channels, op.norm);
                });
  const FinishOutput<T, A> finish(op, strip, statistics);
  finish.clear_statistics();
  strip_product(activation, output_pixels(conv, strip, operand), strip.images, conv, op.packed,
                finish);
}
