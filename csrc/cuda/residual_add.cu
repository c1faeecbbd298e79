#include "on_device.h"
#include "ops.h"
#include "residual_add.cuh"

namespace preact_kernels::cuda {

std::tuple<Tensor, Tensor, Tensor> residual_add_forward(const Tensor& x, const Tensor& branch,
                                                        bool with_stats) {
  const Activation size = check_activation("x", x);
  check_like("branch", branch, "x", x);
  const OnDeviceOf on(x);
  const Tensor y = empty_nhwc(x, size);
  const Tensor mean = empty_statistics(x, with_stats ? size.channels : 0);
  const Tensor var = empty_statistics(x, with_stats ? size.channels : 0);
  for_dtype(x, [&](auto value) {
    using T = decltype(value);
    ResidualAddParams<T> params{{}, data<T>(x), data<T>(branch), mutable_data<T>(y), {}};
    const bool vectors = fills_vectors<T>(size.channels, params.x, params.branch, params.y);
    const Walk walk = walk_of_statistics<T>(size.pixels(), size.channels, vectors);
    params.rows = walk.rows;
    if (with_stats) {
      const OwnedGridSums memory(x, walk.blocks, size.channels, on.stream);
      params.statistics = {memory.sums, mutable_data<float>(mean), mutable_data<float>(var)};
      launch_residual_add_forward<T, true>(params, walk.blocks, vectors, on.stream);
    } else {
      launch_residual_add_forward<T, false>(params, walk.blocks, vectors, on.stream);
    }
  });
  return {y, mean, var};
}

}  // namespace preact_kernels::cuda
