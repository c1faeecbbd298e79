#include "batch_norm.h"
#include "isa.h"
#include "ops.h"
#include "tiles.h"

#define PK_KERNELS "bn_relu_kernels.h"
#include "for_each_isa.h"

namespace preact_kernels {

Tensor bn_relu_forward(const Tensor& x, const Tensor& mean, const Tensor& var,
                       const Tensor& bn_weight, const Tensor& bn_bias, double eps) {
  const Activation size = check_activation("x", x);
  const Tensor y = empty_nhwc(x, size);
  for_dtype(x.scalar_type(), [&](auto value) {
    using T = decltype(value);
    const Normalisation<Accumulate<T>> norm(
        batch_norm<T>(x, mean, var, bn_weight, bn_bias, eps, size.channels), size.channels);
    const T* from = data<T>(x);
    T* to = mutable_data<T>(y);
    const PixelTiles tiles(size.pixels(), size.channels);
    for_tiles(tiles.count, [&](int64_t tile) {
      const int64_t at = tiles.first(tile) * size.channels;
      PK_CALL(tile_bn_relu, from + at, to + at, tiles.length(tile), size.channels, norm);
    });
  });
  return y;
}

namespace {

// Sums of g = dy * [p > 0] into `sums` [2, C], and g itself where it is wanted.
template <bool kStore>
void masked_sums(const Tensor& dy, const Tensor& x, const Tensor* g, const Tensor& sums,
                 const Tensor& mean, const Tensor& var, const Tensor& bn_weight,
                 const Tensor& bn_bias, double eps) {
  const Activation size = check_activation("x", x);
  check_like("dy", dy, "x", x);
  for_dtype(x.scalar_type(), [&](auto value) {
    using T = decltype(value);
    using A = Accumulate<T>;
    const Normalisation<A> norm(batch_norm<T>(x, mean, var, bn_weight, bn_bias, eps, size.channels),
                                size.channels);
    const T* gradient = data<T>(dy);
    const T* from = data<T>(x);
    T* to = kStore ? mutable_data<T>(*g) : nullptr;
    const PixelTiles tiles(size.pixels(), size.channels);
    TileSums<A> partial(tiles.count, size.channels);
    for_tiles(tiles.count, [&](int64_t tile) {
      const int64_t at = tiles.first(tile) * size.channels;
      PK_CALL(tile_mask, std::bool_constant<kStore>{}, gradient + at, from + at,
              kStore ? to + at : to, tiles.length(tile), size.channels, norm, partial.tile(tile));
    });
    partial.merge(norm, mutable_data<A>(sums));
  });
}

}  // namespace

Tensor bn_relu_backward_sums(const Tensor& dy, const Tensor& x, const Tensor& mean,
                             const Tensor& var, const Tensor& bn_weight, const Tensor& bn_bias,
                             double eps) {
  const Tensor sums = empty_sums(x, x.sizes()[1]);
  masked_sums<false>(dy, x, nullptr, sums, mean, var, bn_weight, bn_bias, eps);
  return sums;
}

std::tuple<Tensor, Tensor> bn_relu_backward_mask(const Tensor& dy, const Tensor& x,
                                                 const Tensor& mean, const Tensor& var,
                                                 const Tensor& bn_weight, const Tensor& bn_bias,
                                                 double eps) {
  const Tensor g = empty_nhwc(x, check_activation("x", x));
  const Tensor sums = empty_sums(x, x.sizes()[1]);
  masked_sums<true>(dy, x, &g, sums, mean, var, bn_weight, bn_bias, eps);
  return {g, sums};
}

namespace {

template <bool kMask, bool kAdd>
Tensor input_gradient(const Tensor* dy, const Tensor& g, const Tensor& x, const Tensor& mean,
                      const Tensor& var, const Tensor& bn_weight, const Tensor* bn_bias, double eps,
                      const Tensor& sums, double inv_count) {
  const Activation size = check_activation("x", x);
  check_like("g", g, "x", x);
  if constexpr (kAdd) check_like("dy", *dy, "x", x);
  const Tensor dx = empty_nhwc(x, size);
  for_dtype(x.scalar_type(), [&](auto value) {
    using T = decltype(value);
    using A = Accumulate<T>;
    check_statistics("sums", sums, 2 * size.channels, x);
    // Without a mask the bias is not read; any vector of its size stands in.
    const auto bn =
        batch_norm<T>(x, mean, var, bn_weight, kMask ? *bn_bias : bn_weight, eps, size.channels);
    const Normalisation<A> norm(bn, size.channels);
    const InputGradient<A> gradient(bn, data<A>(sums), inv_count, size.channels);
    const T* added = kAdd ? data<T>(*dy) : nullptr;
    const T* masked = data<T>(g);
    const T* from = data<T>(x);
    T* to = mutable_data<T>(dx);
    const PixelTiles tiles(size.pixels(), size.channels);
    for_tiles(tiles.count, [&](int64_t tile) {
      const int64_t at = tiles.first(tile) * size.channels;
      PK_CALL(tile_input_gradient, std::bool_constant<kMask>{}, std::bool_constant<kAdd>{},
              kAdd ? added + at : added, masked + at, from + at, to + at, tiles.length(tile),
              size.channels, norm, gradient);
    });
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

}  // namespace preact_kernels
