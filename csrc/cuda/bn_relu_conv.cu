// BN-ReLU-Conv of narrow channels on tensors: which weights are served, and the launches.

#include "conv_launch.cuh"
#include "run.cuh"

namespace preact_kernels {

using namespace cuda;

namespace {

// Why the kernels do not serve a convolution, or null.
const char* refusal(const Conv& conv, ScalarType dtype) {
  const int64_t channels = conv.in_channels, out_channels = conv.out_channels;
  if (conv.kernel_h != conv.kernel_w || (conv.kernel_h != 1 && conv.kernel_h != 3)) {
    return "expected a 1x1 or a 3x3 kernel";
  }
  if (conv.kernel_h == 3) {
    if (channels != out_channels) return "expected as many output as input channels for 3x3";
    if (channels != 16 && channels != 32 && channels != 64) {
      return "expected 16, 32 or 64 channels for 3x3";
    }
    if (dtype == ScalarType::Float && channels > kMostChannels3x3<float>) {
      return "expected 16 or 32 channels for 3x3 in float32";
    }
    return nullptr;
  }
  for (const int64_t count : {channels, out_channels}) {
    if (count < 16 || count > 256 || count % 16) return "expected 16, 32, ... or 256 channels";
  }
  if (channels * out_channels > 64 * 256) return "expected no more than 64 * 256 values";
  return nullptr;
}

// The tensor, or a copy of it where its memory is not aligned to 16 bytes.
Tensor aligned(const Tensor& t) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  return is_aligned ? t : torch::stable::clone(t);
}
std::optional<Tensor> aligned(const std::optional<Tensor>& t) {
  return t.has_value() ? std::optional<Tensor>(aligned(*t)) : std::nullopt;
}

// Memory for the weight gradients of `blocks` blocks, whose sum goes to `conv_weight`.
Tensor allocate_partials(const Tensor& like, const Tensor& conv_weight, int blocks,
                         WeightGradientPartials& partials) {
  const auto size = conv_weight.sizes(), stride = conv_weight.strides();
  partials = {nullptr,
              blocks,
              mutable_data<void>(conv_weight),
              conv_weight.scalar_type() == ScalarType::Float,
              int(size[0]),
              int(size[1]),
              int(size[3]),
              stride[0],
              stride[1],
              stride[2],
              stride[3]};
  const Tensor memory = empty_bytes(like, int64_t(blocks) * partials.values() * 4);
  partials.partials = data<float>(memory);
  return memory;
}

// Whether the weight gradients of the blocks of `plan`, written and read, are more bytes than x and
// the `tensors` of dy, which a kernel of their own would read again.
bool costs_less_apart(const Conv& conv, const ConvLaunch& plan, int tensors, size_t itemsize) {
  const int64_t weights = conv.taps() * conv.in_channels * conv.out_channels;
  const int64_t partials = 2 * int64_t(sizeof(float)) * plan.blocks * weights;
  const int64_t again =
      conv.pixels() * (conv.in_channels + tensors * conv.out_channels) * int64_t(itemsize);
  return partials > again;
}

// Whether to compute the weight gradients that were postponed, which keep their dy: an eighth of
// the run's, if they are not small.
bool are_enough(const Run& run) {
  constexpr int64_t kSmallBytes = 64 << 20;
  const size_t count = run.postponed.size();
  return count == kMostWeightGradients ||
         (count >= run.weights.size() / 8 && run.postponed_bytes >= kSmallBytes);
}

}  // namespace

void check_conv_is_served(const Conv& conv, const Tensor& x, const Tensor& conv_weight) {
  const ScalarType dtype = conv_weight.scalar_type();
  STD_TORCH_CHECK(dtype == x.scalar_type() || dtype == ScalarType::Float,
                  "conv_weight: expected the dtype of x, or float32");
  const char* why = refusal(conv, x.scalar_type());
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
  if (refusal(conv, conv_weight.scalar_type()) != nullptr) return false;
  const OnDeviceOf on(conv_weight);
  return for_dtype(conv_weight, [&](auto value) {
    using T = decltype(value);
    const int bytes = std::max(plan_bn_relu_conv_forward<T>(conv).shared_bytes,
                               plan_bn_relu_conv_backward<T>(conv, 3, true, true).shared_bytes);
    return bytes <= most_shared_bytes();
  });
}

void launch_bn_relu_conv_forward(const Conv& conv, const Tensor& x_, const Norm& norm,
                                 const Tensor& conv_weight, const std::optional<Tensor>& conv_bias,
                                 const std::optional<Tensor>& residual_, const Tensor& y,
                                 const BatchStatistics& of_y, UnitOfRun unit) {
  STD_TORCH_CHECK(!conv_bias.has_value(), "conv_bias: expected none on the cuda backend");
  const OnDeviceOf on(x_);
  const Tensor x = aligned(x_);
  const std::optional<Tensor> residual = aligned(residual_);
  for_dtype(x, [&](auto value) {
    using T = decltype(value);
    const ConvLaunch plan = plan_bn_relu_conv_forward<T>(conv);
    const BnReluConvForward params{data<T>(x),
                                   pointers(norm, conv.pixels()),
                                   unit.run.weights[unit.weight],
                                   data<T>(residual),
                                   mutable_data<T>(y),
                                   of_y.moments,
                                   int(conv.in_channels),
                                   int(conv.out_channels),
                                   plan.grid,
                                   unit.run.has_launched};
    launch_bn_relu_conv_forward<T>(conv, plan, params, on.stream);
    unit.run.has_launched = true;
  });
}

void launch_bn_relu_conv_backward(const Conv& conv, const Tensor& dy_,
                                  const std::optional<Fold>& fold_, const Tensor& x_,
                                  const Norm& norm, const Tensor& conv_weight,
                                  const UnitGradients& gradients, UnitOfRun unit) {
  const Wanted& wanted = gradients.wanted;
  const OnDeviceOf on(x_);
  const Tensor x = aligned(x_), dy = aligned(dy_);
  std::optional<Fold> fold = fold_;
  if (fold.has_value()) fold->x = aligned(fold->x), fold->skip = aligned(fold->skip);
  if (!wanted.g && !wanted.weight) {
    if (wanted.dy) launch_bn_input_gradient(conv.output(), dy, *fold, *gradients.dy);
    return;
  }
  Run& run = unit.run;
  for_dtype(x, [&](auto value) {
    using T = decltype(value);
    BnReluConvBackward params{data<T>(dy),
                              fold.has_value() ? pointers(*fold) : FoldPointers{},
                              data<T>(x),
                              pointers(norm, conv.pixels()),
                              run.weights[unit.weight],
                              wanted.g ? mutable_data<T>(*gradients.g) : nullptr,
                              wanted.dy ? mutable_data<T>(*gradients.dy) : nullptr,
                              gradients.accumulated,
                              nullptr,
                              run.partials,
                              int(conv.in_channels),
                              int(conv.out_channels),
                              fold.has_value() ? 2 + fold->skip.has_value() : 1,
                              {},
                              run.has_launched};
    bool is_postponed = wanted.weight && !wanted.g;
    if (wanted.g) {
      ConvLaunch plan = plan_bn_relu_conv_backward<T>(conv, params.tensors, true, wanted.weight);
      is_postponed =
          wanted.weight && costs_less_apart(conv, plan, wanted.dy ? 1 : params.tensors, sizeof(T));
      const bool of_weight = wanted.weight && !is_postponed;
      if (is_postponed) {
        plan = plan_bn_relu_conv_backward<T>(conv, params.tensors, true, false);
      }
      WeightGradientPartials partials{};
      std::optional<Tensor> memory;
      if (of_weight) {
        memory = allocate_partials(x, gradients.conv_weight, plan.blocks, partials);
        params.partials = mutable_data<float>(*memory);
      }
      params.grid = plan.grid;
      launch_bn_relu_conv_backward<T>(conv, plan, params, of_weight, on.stream);
      run.partials = partials, run.partials_owner = memory, run.has_launched = true;
    }
    if (is_postponed) {
      std::vector<Tensor> owners{x, dy, norm.mean, norm.var, norm.weight, *norm.bias};
      if (wanted.g && wanted.dy) {  // dy was stored, unfolded
        params.dy = data<T>(*gradients.dy), params.fold = {}, params.tensors = 1;
        owners[1] = *gradients.dy;
      } else if (fold.has_value()) {
        for (const Tensor& t : {fold->x, fold->norm.mean, fold->norm.var, fold->norm.weight}) {
          owners.push_back(t);
        }
        owners.push_back(fold->sums);
        if (fold->skip.has_value()) owners.push_back(*fold->skip);
      }
      if (wanted.g) params.unfolded_dy = nullptr;
      const ConvLaunch plan = plan_bn_relu_conv_backward<T>(conv, params.tensors, false, true);
      WeightGradientPartials partials{};
      owners.push_back(allocate_partials(x, gradients.conv_weight, plan.blocks, partials));
      params.partials = mutable_data<float>(owners.back());
      params.grid = plan.grid, params.earlier = {}, params.is_dependent = false;
      run.postponed.push_back({conv, params, partials, owners});
      run.postponed_bytes += conv.pixels() * conv.out_channels * int64_t(sizeof(T));
      if (are_enough(run)) finish_postponed(run, x);
    }
  });
}

}  // namespace preact_kernels
