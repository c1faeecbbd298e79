#include <cstring>
#include <memory>

#include "batch_norm.h"
#include "conv_strips.h"
#include "isa.h"
#include "ops.h"
#include "tiles.h"

#define PK_KERNELS "bn_relu_conv_backward_kernels.h"
#include "for_each_isa.h"

namespace preact_kernels {

namespace {

// The gradient of a weight [K, C, R, S], added up in partials [tap][narrow][wide] by runs of
// strips: `wide` are the input channels where they fill the vectors of a tile, so that rows leave
// as the weight has them, NHWC.
template <class T>
struct WeightGradient {
  using A = Accumulate<T>;
  const ConvSize& conv;
  const Tensor& out;
  const bool input_last;
  const int64_t weights, runs;
  A* partials;

  WeightGradient(const ConvSize& conv, const Tensor& out, int64_t strips)
      : conv(conv),
        out(out),
        input_last(conv.in_channels >= conv.out_channels ||
                   conv.in_channels * int64_t(sizeof(A)) >= 4 * vector_bytes(isa())),
        weights(conv.taps() * conv.in_channels * conv.out_channels),
        runs(run_count(strips)),
        partials(thread_buffer<A, Use::kWeightGradients>(runs * weights)) {}

  // More than threads, so that they can share evenly, where the partials stay in the caches.
  int64_t run_count(int64_t strips) const {
    constexpr int64_t kMostValues = 128 * 1024;
    const int64_t threads = torch::stable::get_num_threads();
    return std::min(strips, threads * std::clamp<int64_t>(kMostValues / (weights * threads), 1, 4));
  }

  A* cleared(int64_t run) const {
    A* partial = partials + run * weights;
    std::memset(partial, 0, weights * sizeof(A));
    return partial;
  }

  // out = the sum over runs, in order.
  void merge() const {
    const int64_t columns = input_last ? conv.in_channels : conv.out_channels;
    const int64_t rows = input_last ? conv.out_channels : conv.in_channels;
    const ConvWeight<T> layout(out, !input_last);  // of [rows][columns]
    T* first = mutable_data<T>(out);
    for_rows(conv.taps() * rows, columns, [&](int64_t row) {
      const int64_t tap = row / rows;
      A* sum = partials + row * columns;
      for (int64_t run = 1; run < runs; ++run) {
        const A* partial = sum + run * weights;
        for (int64_t c = 0; c < columns; ++c) sum[c] += partial[c];
      }
      T* to = first + layout.taps[input_last ? tap : conv.taps() - 1 - tap] +
              row % rows * layout.stride_k;
      if (layout.stride_c == 1) {
        for (int64_t c = 0; c < columns; ++c) to[c] = narrowed<T>(sum[c]);
      } else {
        for (int64_t c = 0; c < columns; ++c) to[c * layout.stride_c] = narrowed<T>(sum[c]);
      }
    });
  }
};

}  // namespace

ParameterGradients empty_parameter_gradients(const Tensor& x, const Tensor& conv_weight,
                                             bool needs_g, bool needs_conv_weight) {
  return {needs_conv_weight ? torch::stable::empty_like(conv_weight) : absent(x),
          needs_g ? empty_sums(x, conv_weight.sizes()[1]) : empty_statistics(x, 0)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bn_relu_conv_backward(
    const Tensor& dy, const std::optional<Tensor>& skip, const std::optional<Tensor>& z,
    const std::optional<Tensor>& z_mean, const std::optional<Tensor>& z_var,
    const std::optional<Tensor>& z_weight, double z_eps, const std::optional<Tensor>& z_sums,
    double z_inv_count, const Tensor& x, const Tensor& mean, const Tensor& var,
    const Tensor& bn_weight, const Tensor& bn_bias, double eps, const Tensor& conv_weight,
    bool needs_g, bool needs_conv_weight, bool needs_dz) {
  const ParameterGradients gradients =
      empty_parameter_gradients(x, conv_weight, needs_g, needs_conv_weight);
  const auto [g, dz] = bn_relu_conv_backward_into(
      gradients, dy, skip, z, z_mean, z_var, z_weight, z_eps, z_sums, z_inv_count, x, mean, var,
      bn_weight, bn_bias, eps, conv_weight, needs_g, needs_conv_weight, needs_dz);
  return {g, gradients.conv_weight, gradients.sums, dz};
}

std::tuple<Tensor, Tensor> bn_relu_conv_backward_into(
    const ParameterGradients& gradients, const Tensor& dy, const std::optional<Tensor>& skip,
    const std::optional<Tensor>& z, const std::optional<Tensor>& z_mean,
    const std::optional<Tensor>& z_var, const std::optional<Tensor>& z_weight, double z_eps,
    const std::optional<Tensor>& z_sums, double z_inv_count, const Tensor& x, const Tensor& mean,
    const Tensor& var, const Tensor& bn_weight, const Tensor& bn_bias, double eps,
    const Tensor& conv_weight, bool needs_g, bool needs_conv_weight, bool needs_dz) {
  const ConvSize conv = check_conv(x, conv_weight);
  const Activation out_size = check_activation("dy", dy);
  STD_TORCH_CHECK(out_size.images == conv.images && out_size.channels == conv.out_channels &&
                      out_size.height == conv.height && out_size.width == conv.width &&
                      dy.scalar_type() == x.scalar_type(),
                  "dy: expected the shape of the convolution's output and the dtype of x");
  if (z.has_value()) check_like("z", *z, "dy", dy);
  STD_TORCH_CHECK(!z.has_value() || (z_mean.has_value() && z_var.has_value() &&
                                     z_weight.has_value() && z_sums.has_value()),
                  "z: expected z_mean, z_var, z_weight and z_sums beside it");
  if (skip.has_value()) check_like("skip", *skip, "dy", dy);
  STD_TORCH_CHECK(z.has_value() || !(skip.has_value() || needs_dz),
                  "z: expected a tensor beside skip or needs_dz");
  const Tensor g =
      needs_g ? empty_nhwc(x, {conv.images, conv.in_channels, conv.height, conv.width}) : absent(x);
  const Tensor dz = needs_dz ? empty_nhwc(dy, out_size) : absent(x);
  for_single_dtype(x.scalar_type(), [&](auto value) {
    using T = decltype(value);
    using A = Accumulate<T>;
    const Normalisation<A> norm(
        batch_norm<T>(x, mean, var, bn_weight, bn_bias, eps, conv.in_channels), conv.in_channels);
    std::unique_ptr<InputGradient<A>> fold;
    if (z.has_value()) {
      check_statistics("z_sums", *z_sums, 2 * conv.out_channels, x);
      fold = std::make_unique<InputGradient<A>>(
          batch_norm<T>(x, *z_mean, *z_var, *z_weight, *z_weight, z_eps, conv.out_channels),
          data<A>(*z_sums), z_inv_count, conv.out_channels);
    }
    const PackedWeights<A> packed =
        needs_g ? packed_weights<T>(conv, conv_weight, true) : PackedWeights<A>{};
    const Arriving<T, A> arriving{data<T>(dy), skip.has_value() ? data<T>(*skip) : nullptr,
                                  z.has_value() ? data<T>(*z) : nullptr,
                                  needs_dz ? mutable_data<T>(dz) : nullptr, fold.get()};
    const T* from = data<T>(x);
    T* to = needs_g ? mutable_data<T>(g) : nullptr;
    // Long strips for a 1x1 kernel, whose weight's gradient has one product a pixel.
    const Strips strips(conv, conv.taps() == 1 ? 2 * kStripValues : kStripValues);
    TileSums<A> partial_sums(needs_g ? strips.count : 0, conv.in_channels);
    const int64_t scratch = strips.scratch_values(conv.in_channels) +
                            strips.scratch_values(conv.out_channels) + 2 * conv.in_channels;
    WeightGradient<T> dweight(conv, gradients.conv_weight, needs_conv_weight ? strips.count : 0);
    // Each run of strips adds up a gradient of the weight of its own.
    const int64_t runs = needs_conv_weight ? dweight.runs : strips.count;
    for_tiles(runs, [&](int64_t run) {
      A* partial = needs_conv_weight ? dweight.cleared(run) : nullptr;
      for (int64_t i = run * strips.count / runs; i < (run + 1) * strips.count / runs; ++i) {
        PK_CALL(strip_backward, strips[i], conv, arriving, from, norm, packed, to,
                needs_g ? partial_sums.tile(i) : nullptr, partial, dweight.input_last,
                thread_buffer<A, Use::kScratch>(scratch));
      }
    });
    if (needs_g) partial_sums.merge(norm, mutable_data<A>(gradients.sums));
    if (needs_conv_weight) dweight.merge();
  });
  return {g, dz};
}

}  // namespace preact_kernels
