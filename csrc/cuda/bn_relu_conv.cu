// BN-ReLU-Conv of narrow channels on tensors: which weights are served, and the launches.

#include "conv_launch.cuh"
#include "on_device.h"
#include "sum_partials.cuh"

namespace preact_kernels {

using namespace cuda;

namespace {

// Why the kernels do not serve a convolution, or null.
const char* refusal(const Conv& conv) {
  const int64_t channels = conv.in_channels, out_channels = conv.out_channels;
  if (conv.kernel_h != conv.kernel_w || (conv.kernel_h != 1 && conv.kernel_h != 3)) {
    return "expected a 1x1 or a 3x3 kernel";
  }
  if (conv.kernel_h == 3) {
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

template <class T>
ConvWeight weight_of(const Tensor& t) {
  const auto stride = t.strides();
  bool has_vectors = stride[1] == 1 && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  for (const int axis : {0, 2, 3}) {
    has_vectors &= t.sizes()[axis] == 1 || stride[axis] % kFullWidth<T> == 0;
  }
  return {data<T>(t), stride[0], stride[1], stride[2], stride[3], has_vectors};
}

// The tensor, or a copy of it where its memory is not aligned to 16 bytes.
Tensor aligned(const Tensor& t) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  return is_aligned ? t : torch::stable::clone(t);
}
std::optional<Tensor> aligned(const std::optional<Tensor>& t) {
  return t.has_value() ? std::optional<Tensor>(aligned(*t)) : std::nullopt;
}

}  // namespace

void check_conv_is_served(const Conv& conv) {
  const char* why = refusal(conv);
  STD_TORCH_CHECK(why == nullptr, "conv_weight: ", why ? why : "");
  constexpr int64_t kMostPixels = int64_t(1) << 30;
  STD_TORCH_CHECK(conv.pixels() <= kMostPixels, "x: expected at most ", kMostPixels,
                  " pixels, got ", conv.pixels());
}

// Whether the kernels serve such a weight on its device, for stride 1, one group, and the padding
// that keeps the size of the image.
bool bn_relu_conv_is_served(const Tensor& conv_weight) {
  if (conv_weight.dim() != 4) return false;
  const auto size = conv_weight.sizes();
  const Conv conv{1, 1, 1, size[1], size[0], size[2], size[3]};
  if (refusal(conv) != nullptr) return false;
  const OnDeviceOf on(conv_weight);
  return for_dtype(conv_weight, [&](auto value) {
    using T = decltype(value);
    const int bytes = std::max(plan_bn_relu_conv_forward<T>(conv).shared_bytes,
                               plan_bn_relu_conv_backward<T>(conv, true).shared_bytes);
    return bytes <= most_shared_bytes();
  });
}

void allocate_counters(const Tensor& like, std::vector<BatchStatistics>& statistics) {
  int64_t bytes = 0;
  for (const BatchStatistics& s : statistics) bytes += s.are_wanted ? sizeof(unsigned) : 0;
  if (bytes == 0) return;
  const OnDeviceOf on(like);
  const Tensor counters = empty_bytes(like, bytes);
  unsigned* next = static_cast<unsigned*>(counters.mutable_data_ptr());
  fill_zeros(next, bytes, on.stream);
  for (BatchStatistics& s : statistics) {
    if (s.are_wanted) s.counter = next++, s.counter_owner = counters;
  }
}

void launch_bn_relu_conv_forward(const Conv& conv, const Tensor& x_, const Norm& norm,
                                 const Tensor& conv_weight, const std::optional<Tensor>& conv_bias,
                                 const std::optional<Tensor>& residual_, const Tensor& y,
                                 const BatchStatistics& of_y) {
  STD_TORCH_CHECK(!conv_bias.has_value(), "conv_bias: expected none on the cuda backend");
  const OnDeviceOf on(x_);
  const Tensor x = aligned(x_);
  const std::optional<Tensor> residual = aligned(residual_);
  for_dtype(x, [&](auto value) {
    using T = decltype(value);
    const ConvLaunch plan = plan_bn_relu_conv_forward<T>(conv);
    BnReluConvForward params{data<T>(x),
                             pointers(norm),
                             weight_of<T>(conv_weight),
                             data<T>(residual),
                             mutable_data<T>(y),
                             {},
                             int(conv.in_channels),
                             int(conv.out_channels),
                             plan.grid};
    const int64_t floats = int64_t(plan.blocks) * (3 * conv.out_channels + 1);
    const Tensor memory = empty_bytes(x, of_y.are_wanted ? 4 * floats : 0);
    if (of_y.are_wanted) {
      params.statistics = {static_cast<float*>(memory.mutable_data_ptr()), of_y.counter,
                           mutable_data<float>(of_y.mean), mutable_data<float>(of_y.var)};
    }
    launch_bn_relu_conv_forward<T>(conv, plan, params, on.stream);
  });
}

void launch_bn_relu_conv_backward(const Conv& conv, const Tensor& dy_,
                                  const std::optional<Fold>& fold_, const Tensor& x_,
                                  const Norm& norm, const Tensor& conv_weight,
                                  const UnitGradients& gradients) {
  const Wanted& wanted = gradients.wanted;
  const OnDeviceOf on(x_);
  const Tensor x = aligned(x_), dy = aligned(dy_);
  std::optional<Fold> fold = fold_;
  if (fold.has_value()) fold->x = aligned(fold->x), fold->skip = aligned(fold->skip);
  for_dtype(x, [&](auto value) {
    using T = decltype(value);
    const ConvLaunch plan = plan_bn_relu_conv_backward<T>(conv, wanted.weight);
    BnReluConvBackward params{data<T>(dy),
                              fold.has_value() ? pointers(*fold) : FoldPointers{},
                              data<T>(x),
                              pointers(norm),
                              weight_of<T>(conv_weight),
                              wanted.g ? mutable_data<T>(*gradients.g) : nullptr,
                              wanted.dy ? mutable_data<T>(*gradients.dy) : nullptr,
                              nullptr,
                              wanted.weight,
                              int(conv.in_channels),
                              int(conv.out_channels),
                              plan.grid};
    const int width = params.partial_values(int(conv.taps()));
    const Tensor memory = empty_bytes(x, int64_t(plan.blocks) * width * 4);
    params.partials = static_cast<float*>(memory.mutable_data_ptr());
    launch_bn_relu_conv_backward<T>(conv, plan, params, on.stream);
    SumPartials partials{params.partials, plan.blocks, width,
                         wanted.g ? 2 * params.in_channels : 0};
    partials.weight_values -= partials.sum_values;
    partials.out_channels = params.out_channels, partials.channels = params.in_channels;
    partials.side = int(conv.kernel_w);
    if (wanted.g) partials.sums = mutable_data<float>(gradients.sums);
    if (wanted.weight) {
      const auto stride = gradients.conv_weight.strides();
      partials.dconv_weight = mutable_data<T>(gradients.conv_weight);
      partials.stride_k = stride[0], partials.stride_c = stride[1];
      partials.stride_r = stride[2], partials.stride_s = stride[3];
    }
    launch_sum_partials<T>(partials, on.stream);
  });
}

}  // namespace preact_kernels
