#include "bn_relu.cuh"
#include "on_device.h"

namespace preact_kernels {

using namespace cuda;

void launch_bn_relu_forward(const Activation& size, const Tensor& x, const Norm& norm,
                            const Tensor& y) {
  const OnDeviceOf on(x);
  for_dtype(x, [&](auto value) {
    using T = decltype(value);
    BnReluParams<T> params{{}, data<T>(x), pointers(norm), mutable_data<T>(y)};
    const bool vectors = fills_vectors<T>(size.channels, params.x, params.y);
    const Grid grid = grid_of_bn_relu_forward<T>(size.pixels(), size.channels, vectors);
    params.rows = grid.rows;
    launch_bn_relu_forward<T>(params, grid.blocks, vectors, on.stream);
  });
}

void launch_bn_relu_backward_mask(const Activation& size, const Tensor& dy, const Tensor& x,
                                  const Norm& norm, const Tensor* g, const Tensor& sums) {
  const OnDeviceOf on(x);
  for_dtype(x, [&](auto value) {
    using T = decltype(value);
    T* stored = g == nullptr ? nullptr : mutable_data<T>(*g);
    BnReluMaskParams<T> params{
        {}, data<T>(dy), data<T>(x), pointers(norm), stored, {}, mutable_data<float>(sums)};
    const bool vectors = fills_vectors<T>(size.channels, params.dy, params.x, params.g);
    const Grid grid = grid_of_bn_relu_backward_mask<T>(size.pixels(), size.channels, vectors);
    const OwnedGridSums memory(x, grid.blocks, size.channels, on.stream);
    params.rows = grid.rows;
    params.memory = memory.sums;
    if (stored != nullptr) {
      launch_bn_relu_backward_mask<T, true>(params, grid.blocks, vectors, on.stream);
    } else {
      launch_bn_relu_backward_mask<T, false>(params, grid.blocks, vectors, on.stream);
    }
  });
}

void launch_bn_input_gradient(const Activation& size, const Tensor& g, const Fold& fold,
                              const Tensor& dx) {
  const OnDeviceOf on(g);
  for_dtype(g, [&](auto value) {
    using T = decltype(value);
    BnInputGradientParams<T> params{{}, data<T>(g), pointers(fold), mutable_data<T>(dx)};
    const T *skip = data<T>(fold.skip), *x = data<T>(fold.x);
    const bool vectors = fills_vectors<T>(size.channels, skip, params.g, x, params.dx);
    const Grid grid = grid_of_bn_input_gradient<T>(size.pixels(), size.channels, vectors);
    params.rows = grid.rows;
    if (fold.norm.bias.has_value()) {
      launch_bn_input_gradient<T, true, false>(params, grid.blocks, vectors, on.stream);
    } else if (skip != nullptr) {
      launch_bn_input_gradient<T, false, true>(params, grid.blocks, vectors, on.stream);
    } else {
      launch_bn_input_gradient<T, false, false>(params, grid.blocks, vectors, on.stream);
    }
  });
}

}  // namespace preact_kernels
