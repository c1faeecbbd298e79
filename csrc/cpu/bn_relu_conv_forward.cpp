#include "conv_weights.h"
#include "dtypes.h"
#include "kernels.h"
#include "parallel.h"
#include "weight_stationary.h"

namespace preact_kernels {

void launch_bn_relu_conv_forward(const Unit& unit, const UnitInputs& inputs,
                                 const Epilogue& epilogue, const Output& output) {
  const ConvSizes& conv = unit.conv;
  const Statistics& of_y = output.statistics;
  for_single_dtype(unit.dtypes.products, [&](auto value) {
    using T = decltype(value);
    using A = Accumulate<T>;
    const Normalisation<A> normalisation(inputs.norm, conv.in_channels);
    const bool stationary = is_weight_stationary(conv);
    const ConvForward<T> op{
        conv,
        data<T>(inputs.x),
        normalisation,
        stationary ? PackedWeights{} : packed_weights<T>(conv, inputs.conv_weight, false),
        data<T>(epilogue.conv_bias),
        data<T>(epilogue.residual),
        mutable_data<T>(output.y)};
    if (stationary) return stationary_forward(op, inputs.conv_weight, of_y);
    const Strips strips(conv);
    TileStatistics<A> statistics(of_y.are_wanted ? strips.tiles() : 0, conv.out_channels);
    for_tiles(strips.count, [&](int64_t index) {
      const Strip strip = strips[index];
      if (of_y.are_wanted) {
        std::fill_n(statistics.pixels.begin() + strip.first_tile, strip.images,
                    strip.tile_pixels());
      }
      PK_CALL_PRODUCT(T, strip_forward, op, strip,
                      of_y.are_wanted ? statistics.tile(strip.first_tile) : nullptr,
                      thread_buffer<A, Use::kScratch>(strips.input_values()));
    });
    if (of_y.are_wanted) statistics.merge(mutable_data<A>(of_y.mean), mutable_data<A>(of_y.var));
  });
}

}  // namespace preact_kernels
