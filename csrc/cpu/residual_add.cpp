#include "batch_norm.h"
#include "dtypes.h"
#include "kernels.h"
#include "parallel.h"

namespace preact_kernels {

void launch_residual_add_forward(const ImageSizes& size, const Tensor& x, const Tensor& branch,
                                 const Tensor* bias, const Output& output) {
  const Statistics& of_y = output.statistics;
  for_dtype(x.scalar_type(), [&](auto value) {
    using T = decltype(value);
    using A = Accumulate<T>;
    const T* from = data<T>(x);
    const T* added = data<T>(branch);
    T* to = mutable_data<T>(output.y);
    const PixelTiles tiles(size.pixels(), size.channels);
    if (bias != nullptr) {  // branch + bias is a norm without an activation
      const std::vector<A> zeros(size.channels, A(0)), ones(size.channels, A(1));
      std::vector<A> wide(size.channels);
      for (int64_t c = 0; c < size.channels; ++c) wide[c] = upcast(data<T>(*bias)[c]);
      const NormRow<A> row{zeros.data(), ones.data(), wide.data(), {ActivationKind::kIdentity, 0}};
      for_tiles(tiles.count, [&](int64_t tile) {
        const int64_t at = tiles.first(tile) * size.channels;
        PK_CALL(tile_norm_add_act, added + at, from + at, to + at, tiles.length(tile),
                size.channels, row);
      });
      return;
    }
    TileStatistics<A> statistics(of_y.are_wanted ? tiles.count : 0, size.channels);
    for_tiles(tiles.count, [&](int64_t tile) {
      const int64_t at = tiles.first(tile) * size.channels;
      PK_CALL(tile_residual_add, from + at, added + at, to + at,
              tiles.length(tile) * size.channels);
      if (of_y.are_wanted) {
        statistics.pixels[tile] = tiles.length(tile);
        PK_CALL(tile_statistics, to + at, tiles.length(tile), size.channels, statistics.tile(tile));
      }
    });
    if (of_y.are_wanted) statistics.merge(mutable_data<A>(of_y.mean), mutable_data<A>(of_y.var));
  });
}

}  // namespace preact_kernels
