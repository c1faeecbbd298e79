#include "../host/norm_act.h"

#include "dtypes.h"
#include "kernels.h"
#include "parallel.h"
#include "planes.h"

namespace preact_kernels {

void launch_norm_act_forward(const ImageSizes& size, const Tensor& x, const Norm& norm,
                             const Tensor* residual, const Tensor& y) {
  if (is_planar(x)) return launch_planes_norm_act_forward(size, x, norm, residual, y);
  for_dtype(x.scalar_type(), [&](auto value) {
    using T = decltype(value);
    const Normalisation<Accumulate<T>> normalisation(norm, size.channels);
    const T* from = data<T>(x);
    const T* addend = residual != nullptr ? data<T>(*residual) : nullptr;
    T* to = mutable_data<T>(y);
    const BatchTiles tiles(size, normalisation.has_rows);
    for_tiles(tiles.count, [&](int64_t tile) {
      const int64_t at = tiles.first(tile) * size.channels, pixels = tiles.length(tile);
      const auto row = normalisation.row(tiles.image(tile));
      if (addend != nullptr) {
        PK_CALL(tile_norm_add_act, from + at, addend + at, to + at, pixels, size.channels, row);
      } else {
        PK_CALL(tile_norm_act, from + at, to + at, pixels, size.channels, row);
      }
    });
  });
}

namespace {

// launch_norm_act_backward_mask, and a = act(p) unless `a` is null: x is then in the first-level
// cache.
void launch_backward(const ImageSizes& size, const Tensor& dy, const Tensor& x, const Norm& norm,
                     const Tensor* y, const Tensor* g, const Tensor* a, const Tensor& sums) {
  if (is_planar(x)) return launch_planes_norm_act_backward(size, dy, x, norm, y, g, a, sums);
  const auto launch_as = [&](auto stores_g, auto value) {
    using T = decltype(value);
    using A = Accumulate<T>;
    const Normalisation<A> normalisation(norm, size.channels);
    const T* gradient = data<T>(dy);
    const T* from = data<T>(x);
    const T* output = y != nullptr ? data<T>(*y) : nullptr;
    T* to = stores_g ? mutable_data<T>(*g) : nullptr;
    T* activated = a != nullptr ? mutable_data<T>(*a) : nullptr;
    const BatchTiles tiles(size, normalisation.has_rows);
    // The sums of a tile that is a whole image are complete.
    const bool is_whole = normalisation.has_rows && tiles.of_image == 1;
    TileSums<A> partial(is_whole ? 0 : tiles.count, size.channels);
    A* out = mutable_data<A>(sums);
    for_tiles(tiles.count, [&](int64_t tile) {
      const int64_t at = tiles.first(tile) * size.channels, image = tiles.image(tile);
      double* of_tile =
          is_whole ? thread_buffer<double, Use::kScratch>(2 * size.channels) : partial.tile(tile);
      const int64_t pixels = tiles.length(tile);
      const auto row = normalisation.row(image);
      T* stored = stores_g ? to + at : to;
      if (output != nullptr) {
        PK_CALL(tile_mask_from_y, stores_g, gradient + at, from + at, output + at, stored, pixels,
                size.channels, row, of_tile);
      } else {
        PK_CALL(tile_mask, stores_g, gradient + at, from + at, stored, pixels, size.channels, row,
                of_tile);
      }
      if (activated != nullptr) {
        PK_CALL(tile_norm_act, from + at, activated + at, pixels, size.channels, row);
      }
      if (!is_whole) return;
      A* sum = out + image * size.channels;
      merge_sums(of_tile, 1, size.channels, normalisation.rstd(image), sum,
                 sum + size.images * size.channels);
    });
    if (!is_whole) partial.merge(normalisation, size.images, out);
  };
  for_dtype(x.scalar_type(), [&](auto value) {
    g != nullptr ? launch_as(std::true_type{}, value) : launch_as(std::false_type{}, value);
  });
}

}  // namespace

void launch_norm_act_backward_mask(const ImageSizes& size, const Tensor& dy, const Tensor& x,
                                   const Norm& norm, const Tensor* y, const Tensor* g,
                                   const Tensor& sums) {
  launch_backward(size, dy, x, norm, y, g, nullptr, sums);
}

void launch_norm_act_recompute(const ImageSizes& size, const Tensor& dy, const Tensor& x,
                               const Norm& norm, const Tensor& a, const Tensor& sums) {
  launch_backward(size, dy, x, norm, nullptr, nullptr, &a, sums);
}

// norm_act_recompute, and dy becomes its g: used with convolutions that PyTorch computes.
std::tuple<Tensor, Tensor> norm_act_mask_recompute(const Tensor& dy, const Tensor& x,
                                                   PK_NORM_PARAMETERS) {
  const Norm norm = norm_of(PK_NORM_ARGUMENTS);
  const ImageSizes size = check_images("x", x);
  check_like("dy", dy, size, x);
  check_norm(norm, size, x);
  const Tensor a = empty_dense(x, size), sums = empty_sums(x, size, norm.has_rows());
  launch_backward(size, dy, x, norm, nullptr, &dy, &a, sums);
  return {a, sums};
}

void launch_norm_input_gradient(const ImageSizes& size, const Gradient& gradient, bool activated,
                                const Tensor& dx) {
  const AffineStep& step = *gradient.step;
  if (is_planar(step.x)) return launch_planes_input_gradient(size, gradient, activated, dx);
  const auto launch_as = [&](auto masks, auto has_skip, auto value) {
    using T = decltype(value);
    using A = Accumulate<T>;
    const Normalisation<A> normalisation(step.norm, size.channels);
    const InputGradient<A> coefficients(step, size.channels);
    const GradientPointers<T> all{data<T>(step.skip), data<T>(gradient.g), data<T>(step.x),
                                  mutable_data<T>(dx)};
    const BatchTiles tiles(size, step.has_rows());
    for_tiles(tiles.count, [&](int64_t tile) {
      const int64_t image = tiles.image(tile);
      PK_CALL(tile_input_gradient, masks, has_skip, all.from(tiles.first(tile) * size.channels),
              tiles.length(tile), size.channels, normalisation.row(image), coefficients.row(image));
    });
  };
  for_dtype(step.x.scalar_type(), [&](auto value) {
    constexpr std::true_type yes;
    constexpr std::false_type no;
    const bool masks = activated && step.norm.activation.kind != ActivationKind::kIdentity;
    if (step.skip.has_value()) {
      masks ? launch_as(yes, yes, value) : launch_as(no, yes, value);
    } else {
      masks ? launch_as(yes, no, value) : launch_as(no, no, value);
    }
  });
}

}  // namespace preact_kernels
