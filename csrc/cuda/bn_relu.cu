#include "bn_relu.cuh"
#include "on_device.h"
#include "ops.h"

namespace preact_kernels::cuda {

Tensor bn_relu_forward(const Tensor& x, const Tensor& mean, const Tensor& var,
                       const Tensor& bn_weight, const Tensor& bn_bias, double eps) {
  const Activation size = check_activation("x", x);
  const BatchNorm bn = batch_norm(x, mean, var, bn_weight, &bn_bias, eps, size.channels);
  const OnDeviceOf on(x);
  const Tensor y = empty_nhwc(x, size);
  for_dtype(x, [&](auto value) {
    using T = decltype(value);
    BnReluParams<T> params{{}, data<T>(x), bn, mutable_data<T>(y)};
    const bool vectors = fills_vectors<T>(size.channels, params.x, params.y);
    const Walk walk = walk_of_bn_relu_forward<T>(size.pixels(), size.channels, vectors);
    params.rows = walk.rows;
    launch_bn_relu_forward<T>(params, walk.blocks, vectors, on.stream);
  });
  return y;
}

namespace {

// Sums of g = dy * [p > 0], and g itself into `g` where that is given.
template <bool kStore>
Tensor masked_sums(const Tensor& dy, const Tensor& x, const Tensor* g, const Tensor& mean,
                   const Tensor& var, const Tensor& bn_weight, const Tensor& bn_bias, double eps) {
  const Activation size = check_activation("x", x);
  check_like("dy", dy, "x", x);
  const BatchNorm bn = batch_norm(x, mean, var, bn_weight, &bn_bias, eps, size.channels);
  const OnDeviceOf on(x);
  const Tensor sums = empty_sums(x, size.channels);
  for_dtype(x, [&](auto value) {
    using T = decltype(value);
    T* stored = kStore ? mutable_data<T>(*g) : nullptr;
    BnReluMaskParams<T> params{
        {}, data<T>(dy), data<T>(x), bn, stored, {}, mutable_data<float>(sums)};
    const bool vectors = fills_vectors<T>(size.channels, params.da, params.x, params.g);
    const Walk walk = walk_of_bn_relu_backward_mask<T>(size.pixels(), size.channels, vectors);
    const OwnedGridSums memory(x, walk.blocks, size.channels, on.stream);
    params.rows = walk.rows;
    params.memory = memory.sums;
    launch_bn_relu_backward_mask<T, kStore>(params, walk.blocks, vectors, on.stream);
  });
  return sums;
}

}  // namespace

Tensor bn_relu_backward_sums(const Tensor& dy, const Tensor& x, const Tensor& mean,
                             const Tensor& var, const Tensor& bn_weight, const Tensor& bn_bias,
                             double eps) {
  return masked_sums<false>(dy, x, nullptr, mean, var, bn_weight, bn_bias, eps);
}

std::tuple<Tensor, Tensor> bn_relu_backward_mask(const Tensor& dy, const Tensor& x,
                                                 const Tensor& mean, const Tensor& var,
                                                 const Tensor& bn_weight, const Tensor& bn_bias,
                                                 double eps) {
  const Tensor g = empty_nhwc(x, check_activation("x", x));
  return {g, masked_sums<true>(dy, x, &g, mean, var, bn_weight, bn_bias, eps)};
}

namespace {

template <bool kMask, bool kAdd>
Tensor input_gradient(const Tensor* dy, const Tensor& g, const Tensor& x, const Tensor& mean,
                      const Tensor& var, const Tensor& bn_weight, const Tensor* bn_bias, double eps,
                      const Tensor& sums, double inv_count) {
  const Activation size = check_activation("x", x);
  check_like("g", g, "x", x);
  if constexpr (kAdd) check_like("dy", *dy, "x", x);
  const BatchNorm bn = batch_norm(x, mean, var, bn_weight, bn_bias, eps, size.channels);
  const InputGradientSums gradient = input_gradient_sums(x, sums, inv_count, size.channels);
  const OnDeviceOf on(x);
  const Tensor dx = empty_nhwc(x, size);
  for_dtype(x, [&](auto value) {
    using T = decltype(value);
    const T* added = kAdd ? data<T>(*dy) : nullptr;
    BnInputGradientParams<T> params{{}, added,    data<T>(g),         data<T>(x),
                                    bn, gradient, mutable_data<T>(dx)};
    const bool vectors = fills_vectors<T>(size.channels, params.dy, params.g, params.x, params.dx);
    const Walk walk = walk_of_bn_input_gradient<T>(size.pixels(), size.channels, vectors);
    params.rows = walk.rows;
    launch_bn_input_gradient<T, kMask, kAdd>(params, walk.blocks, vectors, on.stream);
  });
  return dx;
}

}  // namespace

Tensor bn_relu_backward_input(const Tensor& dy, const Tensor& x, const Tensor& mean,
                              const Tensor& var, const Tensor& bn_weight, const Tensor& bn_bias,
                              double eps, const Tensor& sums, double inv_count) {
  return input_gradient<true, false>(nullptr, dy, x, mean, var, bn_weight, &bn_bias, eps, sums,
                                     inv_count);
}

Tensor bn_input_gradient(const std::optional<Tensor>& dy, const Tensor& g, const Tensor& x,
                         const Tensor& mean, const Tensor& var, const Tensor& bn_weight, double eps,
                         const Tensor& sums, double inv_count) {
  if (!dy.has_value()) {
    return input_gradient<false, false>(nullptr, g, x, mean, var, bn_weight, nullptr, eps, sums,
                                        inv_count);
  }
  return input_gradient<false, true>(&*dy, g, x, mean, var, bn_weight, nullptr, eps, sums,
                                     inv_count);
}

}  // namespace preact_kernels::cuda
