#include "batch_norm.h"
#include "isa.h"
#include "ops.h"
#include "tiles.h"

#define PK_KERNELS "bn_stats_kernels.h"
#include "for_each_isa.h"

namespace preact_kernels {

std::tuple<Tensor, Tensor> bn_stats(const Tensor& x) {
  const Activation size = check_activation("x", x);
  const Tensor mean = empty_statistics(x, size.channels);
  const Tensor var = empty_statistics(x, size.channels);
  for_dtype(x.scalar_type(), [&](auto value) {
    using T = decltype(value);
    using A = Accumulate<T>;
    const T* from = data<T>(x);
    const PixelTiles tiles(size.pixels(), size.channels);
    TileStatistics<A> statistics(tiles.count, size.channels);
    for_tiles(tiles.count, [&](int64_t tile) {
      statistics.pixels[tile] = tiles.length(tile);
      PK_CALL(tile_statistics, from + tiles.first(tile) * size.channels, tiles.length(tile),
              size.channels, statistics.mean(tile), statistics.squares(tile));
    });
    statistics.merge(mutable_data<A>(mean), mutable_data<A>(var));
  });
  return {mean, var};
}

}  // namespace preact_kernels
