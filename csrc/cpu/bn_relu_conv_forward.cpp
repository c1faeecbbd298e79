#include "batch_norm.h"
#include "conv_strips.h"
#include "isa.h"
#include "ops.h"
#include "tiles.h"

#define PK_KERNELS "bn_relu_conv_forward_kernels.h"
#include "for_each_isa.h"

namespace preact_kernels {

std::vector<BatchStatistics> empty_batch_statistics(const Tensor& x,
                                                    const std::vector<int64_t>& channels) {
  std::vector<BatchStatistics> results;
  for (const int64_t count : channels) {
    results.push_back({empty_statistics(x, count), empty_statistics(x, count)});
  }
  return results;
}

std::tuple<Tensor, Tensor, Tensor> bn_relu_conv_forward(const Tensor& x, const Tensor& mean,
                                                        const Tensor& var, const Tensor& bn_weight,
                                                        const Tensor& bn_bias, double eps,
                                                        const Tensor& conv_weight,
                                                        const std::optional<Tensor>& conv_bias,
                                                        const std::optional<Tensor>& residual,
                                                        bool with_stats) {
  const int64_t channels = with_stats ? conv_weight.sizes()[0] : 0;
  const BatchStatistics of_y = empty_batch_statistics(x, {channels})[0];
  return {bn_relu_conv_forward_into(of_y, x, mean, var, bn_weight, bn_bias, eps, conv_weight,
                                    conv_bias, residual, with_stats),
          of_y.mean, of_y.var};
}

Tensor bn_relu_conv_forward_into(const BatchStatistics& of_y, const Tensor& x, const Tensor& mean,
                                 const Tensor& var, const Tensor& bn_weight, const Tensor& bn_bias,
                                 double eps, const Tensor& conv_weight,
                                 const std::optional<Tensor>& conv_bias,
                                 const std::optional<Tensor>& residual, bool with_stats) {
  const ConvSize conv = check_conv(x, conv_weight);
  const Tensor y = empty_nhwc(x, {conv.images, conv.out_channels, conv.height, conv.width});
  if (residual.has_value()) check_like("residual", *residual, "y", y);
  if (conv_bias.has_value()) {
    STD_TORCH_CHECK(conv_bias->is_cpu() && conv_bias->is_contiguous() &&
                        conv_bias->numel() == conv.out_channels &&
                        conv_bias->scalar_type() == x.scalar_type(),
                    "conv_bias: expected ", conv.out_channels, " values in the dtype of x");
  }
  for_single_dtype(x.scalar_type(), [&](auto value) {
    using T = decltype(value);
    using A = Accumulate<T>;
    const Normalisation<A> norm(
        batch_norm<T>(x, mean, var, bn_weight, bn_bias, eps, conv.in_channels), conv.in_channels);
    const PackedWeights<A> packed = packed_weights<T>(conv, conv_weight, false);
    const T* from = data<T>(x);
    const T* bias = conv_bias.has_value() ? data<T>(*conv_bias) : nullptr;
    const T* added = residual.has_value() ? data<T>(*residual) : nullptr;
    T* to = mutable_data<T>(y);
    const Strips strips(conv, kStripValues);
    TileStatistics<A> statistics(with_stats ? strips.count : 0, conv.out_channels);
    for_tiles(strips.count, [&](int64_t index) {
      const Strip strip = strips[index];
      if (with_stats) statistics.pixels[index] = strip.rows * strip.width;
      PK_CALL(strip_forward, strip, conv, from, norm, packed, bias, added, to,
              with_stats ? statistics.tile(index) : nullptr,
              thread_buffer<A, Use::kScratch>(strips.scratch_values(conv.in_channels)));
    });
    if (with_stats) statistics.merge(mutable_data<A>(of_y.mean), mutable_data<A>(of_y.var));
  });
  return y;
}

}  // namespace preact_kernels
