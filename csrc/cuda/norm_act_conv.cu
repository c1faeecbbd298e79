// Launchers of BN-ReLU-Conv of narrow channels, and the weights that they serve.

// No kernels: nvcc's passes for each architecture have nothing to compile.
#if !defined(__CUDA_ARCH__)

#include "conv_launch.cuh"
#include "workspace.cuh"

namespace preact_kernels {

namespace cuda {

// Calls body(ConvTypes<T, X, Y>{}) for dtypes that `check_conv_is_served` accepts.
template <class Body>
auto for_conv_types(const ConvDtypes& dtypes, const Body& body) {
  return for_dtype(dtypes.products, [&](auto value) {
    using T = decltype(value);
    if constexpr (!std::is_same_v<T, float>) {
      if (dtypes.x != dtypes.products) return body(ConvTypes<T, float, T>{});
      if (dtypes.y != dtypes.products) return body(ConvTypes<T, T, float>{});
    }
    return body(ConvTypes<T, T, T>{});
  });
}

BackwardPlan plan_norm_act_conv_backward(const ConvSizes& conv, const ConvDtypes& dtypes,
                                         const BackwardTask& task) {
  return for_conv_types(
      dtypes, [&](auto types) { return plan_norm_act_conv_backward<decltype(types)>(conv, task); });
}

}  // namespace cuda

using namespace cuda;

namespace {

ForwardPlan plan_norm_act_conv_forward(const ConvSizes& conv, const ConvDtypes& dtypes) {
  return for_conv_types(
      dtypes, [&](auto types) { return cuda::plan_norm_act_conv_forward<decltype(types)>(conv); });
}

// Why the kernels do not serve a convolution, or null.
const char* refusal(const ConvSizes& conv, ScalarType dtype) {
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

// The tensor, or a copy if its memory is not aligned to 16 bytes.
Tensor aligned(const Tensor& t, Workspace& workspace) {
  if (reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0) return t;
  workspace.has_launched = false;  // the last launch is PyTorch's
  return allocated([&] { return torch::stable::clone(t); });
}
std::optional<Tensor> aligned(const std::optional<Tensor>& t, Workspace& workspace) {
  return t.has_value() ? std::optional<Tensor>(aligned(*t, workspace)) : std::nullopt;
}
Gradient aligned(Gradient gradient, Workspace& workspace) {
  gradient.g = aligned(gradient.g, workspace);
  if (gradient.step.has_value()) {
    gradient.step->x = aligned(gradient.step->x, workspace);
    gradient.step->skip = aligned(gradient.step->skip, workspace);
  }
  return gradient;
}

void check_norm_is_served(const Norm& norm) {
  PK_CHECK(norm.activation.kind == ActivationKind::kRelu && !norm.has_rows(),
           "activation: expected relu without rows in a convolution of the cuda backend");
}

void check_step_is_served(const Gradient& gradient) {
  PK_CHECK(!gradient.step.has_value() || !gradient.step->has_rows(),
           "step_sums: expected no rows in a convolution of the cuda backend");
}

int64_t bytes_of(const ImageSizes& size, ScalarType dtype) {
  return size.pixels() * size.channels * (dtype == ScalarType::Float ? 4 : 2);
}

}  // namespace

void check_conv_is_served(const char* name, const ConvSizes& conv, const ConvDtypes& dtypes,
                          const Tensor& conv_weight) {
  const auto is_operand = [&](ScalarType dtype) {
    return dtype == dtypes.products || dtype == ScalarType::Float;
  };
  PK_CHECK(is_served_dtype(dtypes.products), "dtype: expected ", kDtypes);
  PK_CHECK(is_operand(dtypes.x), "dtype: expected that of x, if x is not float32");
  PK_CHECK(is_operand(conv_weight.scalar_type()), name,
           ": expected the dtype of the convolution, or float32");
  PK_CHECK(is_operand(dtypes.y),
           "residual, g, step_x: expected the dtype of the convolution, or float32");
  PK_CHECK(dtypes.x == dtypes.products || dtypes.y == dtypes.products,
           "x: expected the dtype of the convolution, if the output is float32");
  PK_CHECK(conv.stride.h == 1 && conv.stride.w == 1, "stride: expected 1");
  const char* why = refusal(conv, dtypes.products);
  PK_CHECK(why == nullptr, name, ": ", why ? why : "");
  constexpr int64_t kMostPixels = int64_t(1) << 30;
  PK_CHECK(conv.pixels() <= kMostPixels, "x: expected at most ", kMostPixels, " pixels, got ",
           conv.pixels());
}

// Whether the kernels serve this weight on its device, for stride 1, one group and padding of half
// the kernel; if `float32_stream`, mixed with float32 x, and with float32 y.
bool norm_act_conv_is_served(const Tensor& conv_weight, bool float32_stream) {
  check_dtype("conv_weight", conv_weight);
  if (conv_weight.dim() != 4) return false;
  const auto size = conv_weight.sizes();
  const ConvSizes conv{1, 1, 1, size[1], size[0], size[2], size[3]};
  const ScalarType dtype = conv_weight.scalar_type(), stream = ScalarType::Float;
  if (refusal(conv, dtype) != nullptr) return false;
  const OnDeviceOf on(conv_weight);
  const auto fits = [&](const ConvDtypes& dtypes) {
    const int bytes =
        std::max(plan_norm_act_conv_forward(conv, dtypes).shared_bytes,
                 plan_norm_act_conv_backward(conv, dtypes, {3, true, true}).shared_bytes);
    return bytes <= most_shared_bytes();
  };
  if (!float32_stream) return fits({dtype, dtype, dtype});
  return fits({dtype, stream, dtype}) && fits({dtype, dtype, stream});
}

void launch_norm_act_conv_forward(const Unit& unit, const Inputs& inputs, const Epilogue& epilogue,
                                  const Output& output) {
  PK_CHECK(!epilogue.conv_bias.has_value(), "conv_bias: expected none on the cuda backend");
  check_norm_is_served(inputs.norm);
  const ConvSizes& conv = unit.conv;
  Workspace& workspace = *unit.workspace;
  const OnDeviceOf on(inputs.x);
  const Tensor x = aligned(inputs.x, workspace);
  const std::optional<Tensor> residual = aligned(epilogue.residual, workspace);
  const ForwardPlan plan = plan_norm_act_conv_forward(conv, unit.dtypes);
  const NormActConvForward params{data<char>(x),
                                  pointers(inputs.norm, conv.pixels()),
                                  workspace.weights[unit.weight],
                                  data<char>(residual),
                                  mutable_data<char>(output.y),
                                  output.statistics.moments,
                                  int(conv.in_channels),
                                  int(conv.out_channels),
                                  plan.grid,
                                  workspace.has_launched};
  launch("norm_act_conv_forward", plan.kernel, plan.thread_blocks, kThreads, plan.shared_bytes,
         on.stream, params, workspace.launch_kind());
  workspace.has_launched = true;
}

void launch_norm_act_conv_backward(const Unit& unit, const Gradient& given, const Inputs& inputs,
                                   const Gradients& gradients) {
  const Wanted& wanted = gradients.wanted;
  const ConvSizes& conv = unit.conv;
  const Norm& norm = inputs.norm;
  Workspace& workspace = *unit.workspace;
  const OnDeviceOf on(inputs.x);
  const Tensor x = aligned(inputs.x, workspace);
  const Gradient dy = aligned(given, workspace);
  const std::optional<AffineStep>& step = dy.step;
  check_norm_is_served(norm);
  check_step_is_served(dy);
  if (!wanted.g && !wanted.weight) {
    if (wanted.dy) launch_norm_input_gradient(conv.output(), dy, false, *gradients.dy);
    return;
  }
  NormActConvBackward params{data<char>(dy.g),
                             step.has_value() ? pointers(*step) : AffineStepPointers{},
                             data<char>(x),
                             pointers(norm, conv.pixels()),
                             workspace.weights[unit.weight],
                             wanted.g ? mutable_data<char>(*gradients.g) : nullptr,
                             wanted.dy ? mutable_data<char>(*gradients.dy) : nullptr,
                             gradients.accumulated,
                             nullptr,
                             int(conv.in_channels),
                             int(conv.out_channels),
                             step.has_value() ? 2 + step->skip.has_value() : 1,
                             {},
                             workspace.has_launched};
  const int64_t y_bytes = bytes_of(conv.output(), unit.dtypes.y);
  const int64_t g_bytes = bytes_of(conv.output(), unit.dtypes.products);
  const int64_t x_bytes = bytes_of(conv.input(), unit.dtypes.x);
  const bool stores_dy = wanted.g && wanted.dy;
  bool is_postponed = wanted.weight && !wanted.g;
  if (wanted.g) {
    BackwardTask task{params.tensors, true, wanted.weight};
    BackwardPlan plan = plan_norm_act_conv_backward(conv, unit.dtypes, task);
    // A separate kernel for the weight gradient reads x and dy again. It is cheaper if writing and
    // reading partial weight gradients would take more bytes.
    const int64_t dy_bytes =
        stores_dy || !step ? y_bytes : g_bytes + (params.tensors - 1) * y_bytes;
    const int64_t weights = conv.taps() * conv.in_channels * conv.out_channels;
    const int64_t partials_bytes = 2 * int64_t(sizeof(float)) * plan.thread_blocks * weights;
    is_postponed = wanted.weight && partials_bytes > x_bytes + dy_bytes;
    if (is_postponed) {
      task.of_weight = false;
      plan = plan_norm_act_conv_backward(conv, unit.dtypes, task);
    }
    params.grid = plan.grid;
    WeightGradientPartials partials{};
    std::optional<Tensor> memory;
    if (task.of_weight) {
      memory = allocate_partials(gradients.conv_weight, plan.thread_blocks, partials);
      params.partials = mutable_data<float>(*memory);
    }
    launch(task.of_weight ? "norm_act_conv_backward" : "norm_act_conv_backward_input", plan.kernel,
           plan.thread_blocks, kThreads, plan.shared_bytes, on.stream, params,
           workspace.launch_kind());
    workspace.has_launched = true;
    if (task.of_weight) keep_partials(workspace, partials, *memory, on.stream);
  }
  if (!is_postponed) return;
  std::vector<Tensor> owners{x, norm.mean, norm.var, norm.weight, *norm.bias};
  int64_t bytes = step.has_value() && !stores_dy ? g_bytes : y_bytes;
  if (unit.is_x_rebuilt) bytes += x_bytes;
  if (stores_dy) {
    params.dy = data<char>(*gradients.dy), params.step = {}, params.tensors = 1;
    owners.push_back(*gradients.dy);
  } else {
    owners.push_back(dy.g);
    if (step.has_value()) {
      const Norm& of_step = step->norm;
      owners.insert(owners.end(), {step->x, of_step.mean, of_step.var, of_step.weight, step->sums});
      if (step->skip.has_value()) owners.push_back(*step->skip);
    }
  }
  if (wanted.g) params.whole_dy = nullptr;
  postpone(workspace, {conv, unit.dtypes, params, owners, bytes, gradients.conv_weight}, on.stream);
}

}  // namespace preact_kernels

#endif
