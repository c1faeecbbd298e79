#include "bn_stats.cuh"
#include "on_device.h"
#include "ops.h"

namespace preact_kernels::cuda {

std::tuple<Tensor, Tensor> bn_stats(const Tensor& x) {
  const Activation size = check_activation("x", x);
  const OnDeviceOf on(x);
  const Tensor mean = empty_statistics(x, size.channels);
  const Tensor var = empty_statistics(x, size.channels);
  for_dtype(x, [&](auto value) {
    using T = decltype(value);
    const T* from = data<T>(x);
    const bool vectors = fills_vectors<T>(size.channels, from);
    const Walk walk = walk_of_statistics<T>(size.pixels(), size.channels, vectors);
    const OwnedGridSums memory(x, walk.blocks, size.channels, on.stream);
    launch_bn_stats<T>(
        {walk.rows, from, {memory.sums, mutable_data<float>(mean), mutable_data<float>(var)}},
        walk.blocks, vectors, on.stream);
  });
  return {mean, var};
}

}  // namespace preact_kernels::cuda
