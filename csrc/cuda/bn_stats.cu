#include "bn_stats.cuh"
#include "on_device.h"

namespace preact_kernels {

using namespace cuda;

void launch_bn_stats(const Activation& size, const Tensor& x, const BatchStatistics& of_x) {
  const OnDeviceOf on(x);
  for_dtype(x, [&](auto value) {
    using T = decltype(value);
    const T* from = data<T>(x);
    const bool vectors = fills_vectors<T>(size.channels, from);
    const Grid grid = grid_of_statistics<T>(size.pixels(), size.channels, vectors);
    const OwnedGridSums memory(x, grid.blocks, size.channels, on.stream);
    const StatisticsMemory statistics{memory.sums, mutable_data<float>(of_x.mean),
                                      mutable_data<float>(of_x.var)};
    launch_bn_stats<T>({grid.rows, from, statistics}, grid.blocks, vectors, on.stream);
  });
}

}  // namespace preact_kernels
