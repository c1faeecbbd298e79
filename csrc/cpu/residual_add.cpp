#include "batch_norm.h"
#include "isa.h"
#include "ops.h"
#include "tiles.h"

#define PK_KERNELS "residual_add_kernels.h"
#include "for_each_isa.h"

namespace preact_kernels {

std::tuple<Tensor, Tensor, Tensor> residual_add_forward(const Tensor& x, const Tensor& branch,
                                                        bool with_stats) {
  const Activation size = check_activation("x", x);
  check_like("branch", branch, "x", x);
  const Tensor y = empty_nhwc(x, size);
  const Tensor mean = empty_statistics(x, with_stats ? size.channels : 0);
  const Tensor var = empty_statistics(x, with_stats ? size.channels : 0);
  for_dtype(x.scalar_type(), [&](auto value) {
    using T = decltype(value);
    using A = Accumulate<T>;
    const T* from = data<T>(x);
    const T* added = data<T>(branch);
    T* to = mutable_data<T>(y);
    const PixelTiles tiles(size.pixels(), size.channels);
    TileStatistics<A> statistics(with_stats ? tiles.count : 0, size.channels);
    for_tiles(tiles.count, [&](int64_t tile) {
      const int64_t at = tiles.first(tile) * size.channels;
      PK_CALL(tile_residual_add, from + at, added + at, to + at,
              tiles.length(tile) * size.channels);
      if (with_stats) {
        statistics.pixels[tile] = tiles.length(tile);
        PK_CALL(tile_statistics, to + at, tiles.length(tile), size.channels, statistics.tile(tile));
      }
    });
    if (with_stats) statistics.merge(mutable_data<A>(mean), mutable_data<A>(var));
  });
  return {y, mean, var};
}

}  // namespace preact_kernels
