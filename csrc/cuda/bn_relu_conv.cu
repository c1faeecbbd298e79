// BN-ReLU-Conv of narrow channels, on tensors: checks, memory, launches.

#include "conv_launch.cuh"
#include "on_device.h"
#include "ops.h"
#include "sum_partials.cuh"

namespace preact_kernels::cuda {
namespace {

// Why the kernels do not take such a weight, or null.
const char* weight_refusal(const Tensor& conv_weight) {
  if (conv_weight.dim() != 4) return "expected 4 dimensions [K, C, R, S]";
  const auto size = conv_weight.sizes();
  const int64_t out_channels = size[0], channels = size[1], side = size[2];
  if (size[3] != side || (side != 1 && side != 3)) return "expected a 1x1 or a 3x3 kernel";
  if (side == 3) {
    if (channels != out_channels) return "expected as many output as input channels for 3x3";
    if (channels != 16 && channels != 32 && channels != 64) {
      return "expected 16, 32 or 64 channels for 3x3";
    }
    return nullptr;
  }
  for (const int64_t count : {channels, out_channels}) {
    if (count < 16 || count > 256 || count % 16) return "expected 16, 32, ... or 256 channels";
  }
  if (channels * out_channels > 64 * 256) return "expected no more than 64 * 256 values";
  return nullptr;
}

ConvShape conv_shape(const Activation& size, const Tensor& conv_weight) {
  return {size.images,
          size.height,
          size.width,
          static_cast<int>(conv_weight.sizes()[1]),
          static_cast<int>(conv_weight.sizes()[0]),
          static_cast<int>(conv_weight.sizes()[2])};
}

ConvShape check_conv(const Tensor& x, const Tensor& conv_weight) {
  const Activation size = check_activation("x", x);
  const char* refusal = weight_refusal(conv_weight);
  STD_TORCH_CHECK(refusal == nullptr, "conv_weight: ", refusal ? refusal : "");
  check_same_device("conv_weight", conv_weight, x);
  STD_TORCH_CHECK(conv_weight.scalar_type() == x.scalar_type(),
                  "conv_weight: expected the dtype of x");
  STD_TORCH_CHECK(conv_weight.sizes()[1] == size.channels, "conv_weight: expected ", size.channels,
                  " input channels, as x has, got ", conv_weight.sizes()[1]);
  constexpr int64_t kMostPixels = int64_t(1) << 30;
  STD_TORCH_CHECK(size.pixels() <= kMostPixels, "x: expected at most ", kMostPixels,
                  " pixels, got ", size.pixels());
  return conv_shape(size, conv_weight);
}

template <class T>
ConvWeight weight_of(const Tensor& t) {
  const auto stride = t.strides();
  bool has_vectors = stride[1] == 1 && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  for (const int axis : {0, 2, 3}) {
    has_vectors &= t.sizes()[axis] == 1 || stride[axis] % kFullWidth<T> == 0;
  }
  return {data<T>(t), stride[0], stride[1], stride[2], stride[3], has_vectors};
}

// The tensor, or a copy of it whose memory begins where 16-byte accesses may.
Tensor aligned(const Tensor& t) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  return is_aligned ? t : torch::stable::clone(t);
}
std::optional<Tensor> aligned(const std::optional<Tensor>& t) {
  return t.has_value() ? std::optional<Tensor>(aligned(*t)) : std::nullopt;
}

template <class T>
const T* data(const std::optional<Tensor>& t) {
  return t.has_value() ? preact_kernels::data<T>(*t) : nullptr;
}

}  // namespace

bool bn_relu_conv_is_served(const Tensor& conv_weight) {
  if (weight_refusal(conv_weight) != nullptr) return false;
  const OnDeviceOf on(conv_weight);
  const ConvShape shape = conv_shape({1, conv_weight.sizes()[1], 1, 1}, conv_weight);
  return for_dtype(conv_weight, [&](auto value) {
    using T = decltype(value);
    const int bytes = std::max(plan_bn_relu_conv_forward<T>(shape).shared_bytes,
                               plan_bn_relu_conv_backward<T>(shape, true).shared_bytes);
    return bytes <= most_shared_bytes();
  });
}

std::vector<BatchStatistics> empty_batch_statistics(const Tensor& x,
                                                    const std::vector<int64_t>& channels) {
  const OnDeviceOf on(x);
  int64_t bytes = 0;
  for (const int64_t count : channels) bytes += count ? sizeof(unsigned) : 0;
  const Tensor counters = empty_bytes(x, bytes);
  unsigned* counter = static_cast<unsigned*>(counters.mutable_data_ptr());
  if (bytes) fill_zeros(counter, bytes, on.stream);
  std::vector<BatchStatistics> results;
  for (const int64_t count : channels) {
    results.push_back({empty_statistics(x, count), empty_statistics(x, count), counters, counter});
    if (count) ++counter;
  }
  return results;
}

Tensor bn_relu_conv_forward_into(const BatchStatistics& of_y, const Tensor& x_, const Tensor& mean,
                                 const Tensor& var, const Tensor& bn_weight, const Tensor& bn_bias,
                                 double eps, const Tensor& conv_weight,
                                 const std::optional<Tensor>& residual_, bool with_stats) {
  const ConvShape shape = check_conv(x_, conv_weight);
  const BatchNorm norm = batch_norm(x_, mean, var, bn_weight, &bn_bias, eps, shape.in_channels);
  const OnDeviceOf on(x_);
  const Tensor y = empty_nhwc(x_, {shape.images, shape.out_channels, shape.height, shape.width});
  if (residual_.has_value()) check_like("residual", *residual_, "y", y);
  const Tensor x = aligned(x_);
  const std::optional<Tensor> residual = aligned(residual_);
  for_dtype(x, [&](auto value) {
    using T = decltype(value);
    const ConvLaunch plan = plan_bn_relu_conv_forward<T>(shape);
    BnReluConvForward params{
        data<T>(x),         norm, weight_of<T>(conv_weight), data<T>(residual),
        mutable_data<T>(y), {},   shape.in_channels,         shape.out_channels,
        plan.grid};
    const int64_t floats = int64_t(plan.blocks) * (3 * shape.out_channels + 1);
    const Tensor memory = empty_bytes(x, with_stats ? 4 * floats : 0);
    if (with_stats) {
      params.statistics = {static_cast<float*>(memory.mutable_data_ptr()), of_y.counter,
                           mutable_data<float>(of_y.mean), mutable_data<float>(of_y.var)};
    }
    launch_bn_relu_conv_forward<T>(shape, plan, params, on.stream);
  });
  return y;
}

std::tuple<Tensor, Tensor, Tensor> bn_relu_conv_forward(const Tensor& x, const Tensor& mean,
                                                        const Tensor& var, const Tensor& bn_weight,
                                                        const Tensor& bn_bias, double eps,
                                                        const Tensor& conv_weight,
                                                        const std::optional<Tensor>& residual,
                                                        bool with_stats) {
  check_conv(x, conv_weight);
  const int64_t channels = with_stats ? conv_weight.sizes()[0] : 0;
  const BatchStatistics of_y = empty_batch_statistics(x, {channels})[0];
  const Tensor y = bn_relu_conv_forward_into(of_y, x, mean, var, bn_weight, bn_bias, eps,
                                             conv_weight, residual, with_stats);
  return {y, of_y.mean, of_y.var};
}

ParameterGradients empty_parameter_gradients(const Tensor& x, const Tensor& conv_weight,
                                             bool needs_g, bool needs_conv_weight) {
  return {needs_conv_weight ? torch::stable::empty_like(conv_weight) : absent(x),
          needs_g ? empty_sums(x, conv_weight.sizes()[1]) : empty_statistics(x, 0)};
}

std::tuple<Tensor, Tensor> bn_relu_conv_backward_into(
    const ParameterGradients& gradients, const Tensor& dy_, const std::optional<Tensor>& skip_,
    const std::optional<Tensor>& z_, const std::optional<Tensor>& z_mean,
    const std::optional<Tensor>& z_var, const std::optional<Tensor>& z_weight, double z_eps,
    const std::optional<Tensor>& z_sums, double z_inv_count, const Tensor& x_, const Tensor& mean,
    const Tensor& var, const Tensor& bn_weight, const Tensor& bn_bias, double eps,
    const Tensor& conv_weight, bool needs_g, bool needs_conv_weight, bool needs_dz) {
  const ConvShape shape = check_conv(x_, conv_weight);
  const Activation out_size = check_activation("dy", dy_);
  check_same_device("dy", dy_, x_);
  STD_TORCH_CHECK(out_size.images == shape.images && out_size.channels == shape.out_channels &&
                      out_size.height == shape.height && out_size.width == shape.width &&
                      dy_.scalar_type() == x_.scalar_type(),
                  "dy: expected the shape of the convolution's output and the dtype of x");
  if (z_.has_value()) check_like("z", *z_, "dy", dy_);
  STD_TORCH_CHECK(!z_.has_value() || (z_mean.has_value() && z_var.has_value() &&
                                      z_weight.has_value() && z_sums.has_value()),
                  "z: expected z_mean, z_var, z_weight and z_sums beside it");
  if (skip_.has_value()) check_like("skip", *skip_, "dy", dy_);
  STD_TORCH_CHECK(z_.has_value() || !(skip_.has_value() || needs_dz),
                  "z: expected a tensor beside skip or needs_dz");
  const BatchNorm norm = batch_norm(x_, mean, var, bn_weight, &bn_bias, eps, shape.in_channels);
  const OnDeviceOf on(x_);
  const Tensor x = aligned(x_), dy = aligned(dy_);
  const std::optional<Tensor> z = aligned(z_), skip = aligned(skip_);
  const Tensor g = needs_g
                       ? empty_nhwc(x, {shape.images, shape.in_channels, shape.height, shape.width})
                       : absent(x);
  const Tensor dz = needs_dz ? empty_nhwc(dy, out_size) : absent(x);
  for_dtype(x, [&](auto value) {
    using T = decltype(value);
    Fold fold{};
    if (z.has_value()) {
      const InputGradientSums sums =
          input_gradient_sums(dy, *z_sums, z_inv_count, shape.out_channels);
      fold = {data<T>(z), data<T>(skip),
              batch_norm(*z, *z_mean, *z_var, *z_weight, nullptr, z_eps, shape.out_channels), sums};
    }
    const ConvLaunch plan = plan_bn_relu_conv_backward<T>(shape, needs_conv_weight);
    BnReluConvBackward params{data<T>(dy),
                              fold,
                              data<T>(x),
                              norm,
                              weight_of<T>(conv_weight),
                              needs_g ? mutable_data<T>(g) : nullptr,
                              needs_dz ? mutable_data<T>(dz) : nullptr,
                              nullptr,
                              needs_conv_weight,
                              shape.in_channels,
                              shape.out_channels,
                              plan.grid};
    const int taps = shape.side * shape.side, width = params.partial_values(taps);
    const Tensor memory = empty_bytes(x, int64_t(plan.blocks) * width * 4);
    params.partials = static_cast<float*>(memory.mutable_data_ptr());
    launch_bn_relu_conv_backward<T>(shape, plan, params, on.stream);
    SumPartials partials{};
    partials.partials = params.partials;
    partials.rows = plan.blocks;
    partials.sum_values = needs_g ? 2 * shape.in_channels : 0;
    partials.weight_values = width - partials.sum_values;
    partials.out_channels = shape.out_channels;
    partials.channels = shape.in_channels;
    partials.side = shape.side;
    if (needs_g) partials.sums = mutable_data<float>(gradients.sums);
    if (needs_conv_weight) {
      const auto stride = gradients.conv_weight.strides();
      partials.dconv_weight = mutable_data<T>(gradients.conv_weight);
      partials.stride_k = stride[0], partials.stride_c = stride[1];
      partials.stride_r = stride[2], partials.stride_s = stride[3];
    }
    launch_sum_partials<T>(partials, on.stream);
  });
  return {g, dz};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bn_relu_conv_backward(
    const Tensor& dy, const std::optional<Tensor>& skip, const std::optional<Tensor>& z,
    const std::optional<Tensor>& z_mean, const std::optional<Tensor>& z_var,
    const std::optional<Tensor>& z_weight, double z_eps, const std::optional<Tensor>& z_sums,
    double z_inv_count, const Tensor& x, const Tensor& mean, const Tensor& var,
    const Tensor& bn_weight, const Tensor& bn_bias, double eps, const Tensor& conv_weight,
    bool needs_g, bool needs_conv_weight, bool needs_dz) {
  check_conv(x, conv_weight);
  const ParameterGradients gradients =
      empty_parameter_gradients(x, conv_weight, needs_g, needs_conv_weight);
  const auto [g, dz] = bn_relu_conv_backward_into(
      gradients, dy, skip, z, z_mean, z_var, z_weight, z_eps, z_sums, z_inv_count, x, mean, var,
      bn_weight, bn_bias, eps, conv_weight, needs_g, needs_conv_weight, needs_dz);
  return {g, gradients.conv_weight, gradients.sums, dz};
}

}  // namespace preact_kernels::cuda
