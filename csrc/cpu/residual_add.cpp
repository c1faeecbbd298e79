#include "batch_norm.h"
#include "dtypes.h"
#include "kernels.h"
#include "parallel.h"

namespace preact_kernels {

void launch_residual_add_forward(const ImageSizes& size, const Tensor& x, const Tensor& branch,
                                 const Output& output) {
  const Statistics& of_y = output.statistics;
  for_dtype(x.scalar_type(), [&](auto value) {
    using T = decltype(value);
    using A = Accumulate<T>;
    const T* from = data<T>(x);
    const T* added = data<T>(branch);
    T* to = mutable_data<T>(output.y);
    const PixelTiles tiles(size.pixels(), size.channels);
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
