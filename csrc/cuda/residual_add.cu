#include "on_device.h"
#include "residual_add.cuh"

namespace preact_kernels {

using namespace cuda;

void launch_residual_add_forward(const Activation& size, const Tensor& x, const Tensor& branch,
                                 const Tensor& y, const BatchStatistics& of_y) {
  const OnDeviceOf on(x);
  for_dtype(x, [&](auto value) {
    using T = decltype(value);
    ResidualAddParams<T> params{{}, data<T>(x), data<T>(branch), mutable_data<T>(y), {}};
    const bool vectors = fills_vectors<T>(size.channels, params.x, params.branch, params.y);
    const Grid grid = grid_of_statistics<T>(size.pixels(), size.channels, vectors);
    params.rows = grid.rows;
    if (of_y.are_wanted) {
      const OwnedGridSums memory(x, grid.blocks, size.channels, on.stream);
      params.statistics = {memory.sums, mutable_data<float>(of_y.mean),
                           mutable_data<float>(of_y.var)};
      launch_residual_add_forward<T, true>(params, grid.blocks, vectors, on.stream);
    } else {
      launch_residual_add_forward<T, false>(params, grid.blocks, vectors, on.stream);
    }
  });
}

}  // namespace preact_kernels
