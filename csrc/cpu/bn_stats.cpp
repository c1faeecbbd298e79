#include "batch_norm.h"
#include "dtypes.h"
#include "kernels.h"
#include "parallel.h"
#include "planes.h"

namespace preact_kernels {

void launch_bn_stats(const ImageSizes& size, const Tensor& x, const Statistics& of_x) {
  if (is_planar(x)) return launch_planes_bn_stats(size, x, of_x);
  for_dtype(x.scalar_type(), [&](auto value) {
    using T = decltype(value);
    using A = Accumulate<T>;
    const T* from = data<T>(x);
    const PixelTiles tiles(size.pixels(), size.channels);
    TileStatistics<A> statistics(tiles.count, size.channels);
    for_tiles(tiles.count, [&](int64_t tile) {
      statistics.pixels[tile] = tiles.length(tile);
      PK_CALL(tile_statistics, from + tiles.first(tile) * size.channels, tiles.length(tile),
              size.channels, statistics.tile(tile));
    });
    statistics.merge(mutable_data<A>(of_x.mean), mutable_data<A>(of_x.var));
  });
}

void launch_group_stats(const ImageSizes& size, const Tensor& x, int64_t groups,
                        const Statistics& of_x) {
  if (is_planar(x)) return launch_planes_group_stats(size, x, groups, of_x);
  for_dtype(x.scalar_type(), [&](auto value) {
    using T = decltype(value);
    using A = Accumulate<T>;
    const int64_t channels = size.channels;
    const T* from = data<T>(x);
    A *mean = mutable_data<A>(of_x.mean), *var = mutable_data<A>(of_x.var);
    const BatchTiles tiles(size, true);
    const auto merge = [&](int64_t image, const A* of_image) {
      merge_groups(of_image, tiles.tiles, channels, groups, mean + image * channels,
                   var + image * channels);
    };
    const int64_t tile_values = 3 * channels;
    const bool is_whole = tiles.of_image == 1;
    A* partials = is_whole ? nullptr : thread_buffer<A, Use::kPartials>(tiles.count * tile_values);
    for_tiles(tiles.count, [&](int64_t tile) {
      A* statistics =
          is_whole ? thread_buffer<A, Use::kScratch>(tile_values) : partials + tile * tile_values;
      PK_CALL(tile_statistics, from + tiles.first(tile) * channels, tiles.length(tile), channels,
              statistics);
      if (is_whole) merge(tile, statistics);
    });
    if (is_whole) return;
    for_tiles(tiles.images, [&](int64_t image) {
      merge(image, partials + image * tiles.of_image * tile_values);
    });
  });
}

// running = (1 - momentum) * running + momentum * factor * batch, contiguous float32, for many
// vectors, each with a factor. The product with the factor is in float32, as in PyTorch's operator.
void scaled_running_stats_update(const std::vector<Tensor>& running,
                                 const std::vector<Tensor>& batch, double momentum,
                                 const std::vector<double>& factors) {
  PK_CHECK(running.size() == batch.size(), "batch: expected ", running.size(),
           " tensors to match running, got ", batch.size());
  PK_CHECK(running.size() == factors.size(), "factors: expected ", running.size(),
           " values to match running, got ", factors.size());
  for (size_t i = 0; i < running.size(); ++i) {  // check all before writing any
    check_tensor("running", running[i]);
    PK_CHECK(running[i].dim() == 1 && running[i].is_contiguous() &&
                 running[i].scalar_type() == ScalarType::Float,
             "running: expected contiguous float32 tensors [C]");
    check_statistics("batch", batch[i], running[i]);
    check_shape("batch", batch[i], {running[i].numel()});
  }
  for (size_t i = 0; i < running.size(); ++i) {
    float* to = mutable_data<float>(running[i]);
    const float* from = data<float>(batch[i]);
    const float factor = static_cast<float>(factors[i]);
    const int64_t channels = running[i].numel();
    for (int64_t c = 0; c < channels; ++c) {
      const float value = factor * from[c];
      to[c] = static_cast<float>(momentum * value + (1 - momentum) * to[c]);
    }
  }
}

}  // namespace preact_kernels
