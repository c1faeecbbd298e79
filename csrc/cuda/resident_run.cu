// The ops that run bottlenecks in few launches, and the runs that they serve.

#include "../host/block_run.h"
#include "resident_backward.cuh"
#include "resident_forward.cuh"
#include "workspace.cuh"

namespace preact_kernels {

using namespace cuda;

namespace {

struct ResidentPlan {
  int side, threads, forward_bytes, backward_bytes;  // bytes of shared memory
  void (*forward)(ResidentForward);
  void (*backward)(ResidentBackward);
};

// The plan for a run with so many inner channels, which `refusal` has accepted.
ResidentPlan plan_resident_run(int64_t channels, ScalarType dtype) {
  const auto of = [](auto value, auto c) {
    using T = decltype(value);
    constexpr int C = decltype(c)::value;
    using Shared = ResidentShared<T, C>;
    return ResidentPlan{ResidentShape<C>::kSide,       ResidentShape<C>::kThreads,
                        Shared::kForwardBytes,         Shared::kBackwardBytes,
                        resident_forward_kernel<T, C>, resident_backward_kernel<T, C>};
  };
  const auto with = [&](auto value) {
    if (channels == 16) return of(value, std::integral_constant<int, 16>());
    if (channels == 32) return of(value, std::integral_constant<int, 32>());
    return of(value, std::integral_constant<int, 64>());
  };
  return dtype == ScalarType::Half ? with(Half{}) : with(BFloat16{});
}

// Why the kernels do not run these bottlenecks on `x`, or backward on a gradient `x` of their
// output; empty if they do. `name` is the argument's.
std::string refusal(const char* name, const Tensor& x, const std::vector<Tensor>& conv_weights,
                    int64_t units_per_block, ScalarType dtype, bool is_backward) {
  const ImageSizes size = check_images(name, x);
  if (dtype != ScalarType::Half && dtype != ScalarType::BFloat16) {
    return "dtype: expected float16 or bfloat16";
  }
  if (x.scalar_type() != dtype) {
    return std::string(name) + ": expected the dtype of the convolutions";
  }
  if (units_per_block != kUnits) return "units_per_block: expected 3";
  if (!is_backward && conv_weights.size() > size_t(kUnits * kMostForwardBlocks)) {
    return "conv_weights: expected no more than 256 blocks";
  }
  const int64_t channels = size.channels / 4;
  if (size.channels != 64 && size.channels != 128 && size.channels != 256) {
    return std::string(name) + ": expected 64, 128 or 256 channels";
  }
  const ResidentPlan plan = plan_resident_run(channels, dtype);
  if (size.height != plan.side || size.width != plan.side) {
    return std::string(name) +
           ": expected images of 32x32 pixels for 64 channels, 16x16 for 128, 8x8 for 256";
  }
  for (size_t i = 0; i < conv_weights.size(); ++i) {
    check_tensor("conv_weights", conv_weights[i]);
    const int64_t side = i % kUnits == 1 ? 3 : 1;
    const int64_t expected[] = {i % kUnits == 2 ? 4 * channels : channels,
                                i % kUnits == 0 ? 4 * channels : channels, side, side};
    const auto shape = conv_weights[i].sizes();
    if (!std::equal(shape.begin(), shape.end(), expected, expected + 4)) {
      return "conv_weights: expected the weights of bottlenecks, a quarter as wide inside";
    }
  }
  const OnDeviceOf on(x);
  if (size.images > multiprocessors()) {
    return std::string(name) + ": expected no more images than multiprocessors";
  }
  const int bytes = is_backward ? plan.backward_bytes : plan.forward_bytes;
  if (bytes > most_shared_bytes()) {
    return std::string(name) + ": expected a GPU with more shared memory";
  }
  return "";
}

Tensor aligned(const Tensor& t) {
  if (reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0) return t;
  return allocated([&] { return torch::stable::clone(t); });
}

// The units of a run, and the sizes of the inputs of first and of other units.
struct ResidentUnits {
  ImageSizes wide, narrow;
  std::vector<Unit> units;

  ResidentUnits(const BlockRun& run, const Tensor& like)
      : wide(check_images("x", like)), narrow(wide) {
    narrow.channels /= 4;
    for (size_t i = 0; i < run.units(); ++i) {
      units.push_back(run.unit(i, run.conv_weights[i], input(run, i), run.dtype, like));
    }
  }
  const ImageSizes& input(const BlockRun& run, size_t i) const {
    return run.starts_block(i) ? wide : narrow;
  }
};

}  // namespace

// Whether `resident_run_forward`, or `_backward`, serves a run of bottlenecks with such weights on
// x, or on the gradient of its output.
bool resident_run_is_served(const Tensor& x, const std::vector<Tensor>& conv_weights,
                            int64_t units_per_block, ScalarType dtype, bool is_backward) {
  return refusal("x", x, conv_weights, units_per_block, dtype, is_backward).empty();
}

// block_run_forward in one launch, for runs that compute the statistics of their units.
std::vector<Tensor> resident_run_forward(const Tensor& x, PK_RUN_PARAMETERS, bool with_stats,
                                         const std::vector<int64_t>& kept_blocks,
                                         bool keep_unit_inputs) {
  const BlockRun run{PK_RUN_ARGUMENTS};
  check_run(run);
  const std::string why = refusal("x", x, conv_weights, units_per_block, dtype, false);
  PK_CHECK(why.empty(), why);
  const std::vector<bool> keeps = are_kept(run, kept_blocks);
  if (!means.empty()) check_count("means", means, 1);
  ResidentUnits of(run, x);
  Statistics of_x;
  if (means.empty()) {
    std::tie(of_x.mean, of_x.var) = bn_stats(x);
  } else {
    of_x = {means[0], variances[0]};
  }
  std::vector<bool> are_wanted(run.units(), true);
  are_wanted.back() = with_stats;
  RunStatistics results(x, of.units, conv_weights, are_wanted);

  const OnDeviceOf on(x);
  ResidentForward params{};
  std::vector<Tensor> inputs;
  const Tensor counter = empty_bytes(x, sizeof(unsigned));
  const Tensor y = new_like(x);
  for (size_t i = 0; i < run.units(); ++i) {
    const Statistics& of_input = i == 0 ? of_x : results.of_outputs[i - 1];
    const Norm norm = run.norm(i, of_input.mean, of_input.var);
    const bool starts_block = run.starts_block(i);
    const ImageSizes& size = of.input(run, i);
    check_norm(norm, size, x, kRunNames.norm);
    ResidentForwardUnit& unit = params.units[i / kUnits][i % kUnits];
    unit.bn_weight = data<float>(norm.weight), unit.bn_bias = data<float>(norm.bias);
    unit.weight = results.workspace->weights[i];
    unit.eps = static_cast<float>(norm.eps);
    if (starts_block ? keeps[i / kUnits] : keep_unit_inputs) {
      inputs.push_back(i == 0 ? x : empty_nhwc(x, size));
      if (i > 0) unit.input = mutable_data<char>(inputs.back());
    }
  }
  const Tensor from = aligned(x);
  params.x = data<char>(from), params.y = mutable_data<char>(y);
  params.mean = data<float>(of_x.mean), params.var = data<float>(of_x.var);
  params.sums = results.of_outputs[0].moments;
  params.arrived = mutable_data<unsigned>(counter);
  params.pixels = Count(double(of.wide.pixels()));
  params.blocks = int(keeps.size());
  params.with_statistics = with_stats;
  fill_zeros(params.arrived, sizeof(unsigned), on.stream);
  const ResidentPlan plan = plan_resident_run(of.narrow.channels, dtype);
  launch("resident_run_forward", plan.forward, unsigned(of.wide.images), plan.threads,
         plan.forward_bytes, on.stream, params, LaunchKind::kCooperative);
  results.finish();

  std::vector<Tensor> found{y, results.of_outputs.back().mean, results.of_outputs.back().var};
  found.push_back(of_x.mean);
  for (size_t i = 0; i + 1 < run.units(); ++i) found.push_back(results.of_outputs[i].mean);
  found.push_back(of_x.var);
  for (size_t i = 0; i + 1 < run.units(); ++i) found.push_back(results.of_outputs[i].var);
  found.insert(found.end(), inputs.begin(), inputs.end());
  return found;
}

// block_run_backward for runs that keep all inputs and use batch statistics. A launch computes the
// gradients of the inputs of as many blocks as kMostBytes allows, and keeps until then what the
// gradients of weights need.
std::vector<Tensor> resident_run_backward(PK_GRADIENT_PARAMETERS, PK_RUN_PARAMETERS,
                                          const std::vector<Tensor>& inputs,
                                          const std::vector<int64_t>& kept_blocks, double inv_count,
                                          const std::optional<Tensor>& y,
                                          const std::vector<Tensor>& negated) {
  const Gradient gradient = gradient_of(PK_GRADIENT_ARGUMENTS);
  const BlockRun run{PK_RUN_ARGUMENTS};
  check_run(run);
  const std::string why = refusal("g", g, conv_weights, units_per_block, dtype, true);
  PK_CHECK(why.empty(), why);
  const size_t blocks = run.units() / kUnits;
  PK_CHECK(kept_blocks.size() == blocks, "kept_blocks: expected all ", blocks, " blocks, got ",
           kept_blocks.size());
  PK_CHECK(!y.has_value(), "y: expected none, as no input is rebuilt");
  check_count("negated", negated, 0);
  are_kept(run, kept_blocks);
  check_count("inputs", inputs, run.units());
  check_count("means", means, run.units());
  PK_CHECK(inv_count > 0, "inv_count: expected one over the pixels of the batch, got ", inv_count);
  ResidentUnits of(run, g);
  if (gradient.step.has_value()) check_step(*gradient.step, of.wide, g);
  std::vector<Norm> norms;
  std::vector<Tensor> aligned_inputs, transposed;
  for (size_t i = 0; i < run.units(); ++i) {
    norms.push_back(run.norm(i, means[i], variances[i]));
    check_inputs(of.units[i], {inputs[i], norms[i], conv_weights[i]}, kRunNames);
    aligned_inputs.push_back(aligned(inputs[i]));
    transposed.push_back(torch::stable::transpose(conv_weights[i], 0, 1));
  }
  const std::vector<Wanted> wanted(run.units(), {true, true, false});
  RunGradients results(g, of.units, conv_weights, wanted, transposed);
  std::vector<Tensor> found(4);
  for (const Gradients& unit : results.of_units) found.push_back(unit.conv_weight);
  for (const Tensor& of_norm : results.of_norms()) found.push_back(of_norm);

  const OnDeviceOf on(g);
  Workspace& workspace = *results.workspace;
  Tensor dy;  // gradient of the output of the last remaining block
  if (gradient.step.has_value()) {
    dy = empty_nhwc(g, of.wide);
    launch_norm_input_gradient(of.wide, gradient, false, dy);
  } else {
    dy = aligned(g);
  }
  const ResidentPlan plan = plan_resident_run(of.narrow.channels, dtype);
  const int64_t wide_bytes = of.wide.pixels() * of.wide.channels * 2;
  const int64_t narrow_bytes = wide_bytes / 4;
  const size_t most =
      std::clamp<int64_t>(kMostBytes / (wide_bytes + 2 * narrow_bytes), 1, kMostBackwardBlocks);
  const size_t launches = (blocks + most - 1) / most;
  const Tensor counters = empty_bytes(g, launches * sizeof(unsigned));
  unsigned* arrived = mutable_data<unsigned>(counters);
  fill_zeros(arrived, launches * sizeof(unsigned), on.stream);
  for (size_t end = blocks; end > 0;) {
    const size_t begin = end > most ? end - most : 0;
    make_room(workspace, int64_t(end - begin) * (wide_bytes + 2 * narrow_bytes), on.stream);
    ResidentBackward params{};
    params.dy = data<char>(dy);
    params.arrived = arrived++;
    params.inv_count = static_cast<float>(inv_count);
    params.blocks = int(end - begin);
    std::vector<Tensor> gradients(kUnits * (end - begin));  // gradients of the outputs of units
    for (size_t j = gradients.size(); j-- > 0;) {
      const size_t i = kUnits * begin + j;
      const bool is_given = j + 1 == gradients.size();
      gradients[j] = is_given ? dy : empty_nhwc(g, run.ends_block(i) ? of.wide : of.narrow);
      params.units[j / kUnits][j % kUnits] = {data<float>(norms[i].mean),
                                              data<float>(norms[i].var),
                                              data<float>(norms[i].weight),
                                              data<float>(norms[i].bias),
                                              workspace.weights[i],
                                              data<char>(aligned_inputs[i]),
                                              is_given ? nullptr : mutable_data<char>(gradients[j]),
                                              results.of_units[i].accumulated,
                                              static_cast<float>(norms[i].eps)};
    }
    const Tensor dx = empty_nhwc(g, of.wide);
    (begin == 0 ? params.g : params.dx) = mutable_data<char>(dx);
    launch("resident_run_backward", plan.backward, unsigned(of.wide.images), plan.threads,
           plan.backward_bytes, on.stream, params, LaunchKind::kCooperative);
    workspace.has_launched = false;
    for (size_t j = gradients.size(); j-- > 0;) {
      const size_t i = kUnits * begin + j;
      const Tensor& x = aligned_inputs[i];
      const Norm& norm = norms[i];
      NormActConvBackward of_weight{};
      of_weight.dy = data<char>(gradients[j]), of_weight.x = data<char>(x);
      of_weight.norm = pointers(norm, of.wide.pixels());
      of_weight.in_channels = int(of.units[i].conv.in_channels);
      of_weight.out_channels = int(of.units[i].conv.out_channels);
      of_weight.tensors = 1;
      postpone(workspace,
               {of.units[i].conv,
                of.units[i].dtypes,
                of_weight,
                {gradients[j], x, norm.mean, norm.var, norm.weight, *norm.bias},
                run.ends_block(i) ? wide_bytes : narrow_bytes,
                results.of_units[i].conv_weight},
               on.stream);
    }
    if (begin == 0) found[0] = dx, found[1] = gradients[kUnits - 1];
    dy = dx;
    end = begin;
  }
  results.finish(g);
  found[2] = inputs[0];
  found[3] = results.sums_of_unit(0);
  return found;
}

}  // namespace preact_kernels
