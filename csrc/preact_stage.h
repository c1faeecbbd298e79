// Pre-activation blocks in a row, without a return to Python between their convolutions.
//
// `Ops` names the functions of one library: bn_stats, bn_relu_conv_forward_into,
// bn_relu_conv_backward_into, and those that allocate the small results of these.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "checks.h"

namespace preact_kernels {

// Where the tensors of unit i begin in a flat list: bn_weight, bn_bias, conv_weight; mean, var.
constexpr size_t kParameters = 3;
constexpr size_t kStatistics = 2;

inline void check_lists(const std::vector<Tensor>& parameters, const std::vector<double>& eps,
                        int64_t units_per_block) {
  STD_TORCH_CHECK(units_per_block > 0 && !eps.empty() && eps.size() % units_per_block == 0,
                  "eps: expected whole blocks of ", units_per_block, " units, got ", eps.size());
  STD_TORCH_CHECK(parameters.size() == kParameters * eps.size(), "parameters: expected ",
                  kParameters * eps.size(), " tensors, got ", parameters.size());
  for (size_t i = 0; i < eps.size(); ++i) {
    STD_TORCH_CHECK(parameters[kParameters * i + 2].dim() == 4,
                    "conv_weight: expected 4 dimensions");
  }
}

template <class Ops>
std::vector<Tensor> run_preact_stage_forward(
    const Tensor& x, const std::vector<Tensor>& x_statistics, const std::vector<Tensor>& parameters,
    const std::vector<Tensor>& known, const std::vector<double>& eps, int64_t units_per_block,
    bool with_stats, bool keep_inputs, bool keep_block_inputs) {
  check_lists(parameters, eps, units_per_block);
  STD_TORCH_CHECK(known.empty() || known.size() == kStatistics * eps.size(),
                  "known: expected no tensor or ", kStatistics * eps.size(), ", got ",
                  known.size());
  STD_TORCH_CHECK(x_statistics.empty() || x_statistics.size() == kStatistics,
                  "x_statistics: expected no tensor or 2, got ", x_statistics.size());
  std::vector<Tensor> inputs, statistics;
  Tensor h = x, shortcut = x, mean, var;
  if (!x_statistics.empty()) {
    mean = x_statistics[0], var = x_statistics[1];
  } else if (known.empty()) {
    std::tie(mean, var) = Ops::bn_stats(x);
  }
  const auto wants_statistics = [&](size_t unit) {
    return unit + 1 == eps.size() ? with_stats : known.empty();
  };
  // Small results ahead of large ones, which would otherwise leave holes of awkward sizes.
  std::vector<int64_t> channels(eps.size());
  for (size_t i = 0; i < eps.size(); ++i) {
    channels[i] = wants_statistics(i) ? parameters[kParameters * i + 2].sizes()[0] : 0;
  }
  const auto of_outputs = Ops::empty_batch_statistics(x, channels);
  for (size_t i = 0; i < eps.size(); ++i) {
    const size_t place = i % units_per_block;
    const bool ends_block = place + 1 == static_cast<size_t>(units_per_block);
    if (place == 0) shortcut = h;
    if (place == 0 ? keep_block_inputs : keep_inputs) inputs.push_back(h);
    if (known.empty()) {
      statistics.push_back(mean);
      statistics.push_back(var);
    } else {
      mean = known[kStatistics * i], var = known[kStatistics * i + 1];
    }
    const Tensor* p = &parameters[kParameters * i];
    h = Ops::bn_relu_conv_forward_into(of_outputs[i], h, mean, var, p[0], p[1], eps[i], p[2],
                                       ends_block ? std::optional<Tensor>(shortcut) : std::nullopt,
                                       wants_statistics(i));
    mean = of_outputs[i].mean, var = of_outputs[i].var;
  }
  std::vector<Tensor> results{h, mean, var};
  results.insert(results.end(), statistics.begin(), statistics.end());
  results.insert(results.end(), inputs.begin(), inputs.end());
  return results;
}

template <class Ops>
std::vector<Tensor> run_preact_stage_backward(
    const Tensor& dy, const std::optional<Tensor>& skip, const std::optional<Tensor>& z,
    const std::optional<Tensor>& z_mean, const std::optional<Tensor>& z_var,
    const std::optional<Tensor>& z_weight, double z_eps, const std::optional<Tensor>& z_sums,
    double z_inv_count, const std::vector<Tensor>& inputs, const std::vector<Tensor>& statistics,
    const std::vector<Tensor>& parameters, const std::vector<double>& eps, double inv_count,
    int64_t units_per_block, const std::optional<Tensor>& y, const std::vector<Tensor>& negated) {
  check_lists(parameters, eps, units_per_block);
  const size_t rebuilt = y.has_value() ? eps.size() / units_per_block : 0;
  const size_t kept = eps.size() - rebuilt;
  STD_TORCH_CHECK(kept > 0, "y: expected none beside blocks of one unit");
  STD_TORCH_CHECK(inputs.size() == kept, "inputs: expected ", kept, " tensors, got ",
                  inputs.size());
  STD_TORCH_CHECK(negated.size() == rebuilt, "negated: expected ", rebuilt, " tensors, got ",
                  negated.size());
  STD_TORCH_CHECK(statistics.size() == kStatistics * eps.size(), "statistics: expected ",
                  kStatistics * eps.size(), " tensors, got ", statistics.size());
  // Small results ahead of large ones, as in the forward.
  std::vector<Tensor> results(3);
  std::vector<decltype(Ops::empty_parameter_gradients(dy, dy, true, true))> gradients;
  for (size_t i = 0; i < eps.size(); ++i) {
    const Tensor& conv_weight = parameters[kParameters * i + 2];
    gradients.push_back(Ops::empty_parameter_gradients(dy, conv_weight, true, true));
    results.push_back(gradients[i].conv_weight);
    results.push_back(gradients[i].sums);
  }
  const auto no_statistics = Ops::empty_batch_statistics(dy, {0});
  Tensor g = dy, block_dy = dy, x = y.value_or(inputs[0]);
  size_t left = kept;
  auto fold = std::make_tuple(skip, z, z_mean, z_var, z_weight, z_eps, z_sums, z_inv_count);
  for (size_t i = eps.size(); i-- > 0;) {
    const size_t place = i % units_per_block;
    const bool ends_block = place + 1 == static_cast<size_t>(units_per_block);
    const bool needs_dz = ends_block && std::get<1>(fold).has_value();
    const Tensor &mean = statistics[kStatistics * i], &var = statistics[kStatistics * i + 1];
    const Tensor* p = &parameters[kParameters * i];
    if (ends_block && rebuilt) {  // up to here x is the output of this block
      x = Ops::bn_relu_conv_forward_into(no_statistics[0], inputs[left - 1], mean, var, p[0], p[1],
                                         eps[i], negated[i / units_per_block], x, false);
    }
    const Tensor& h = place == 0 && rebuilt ? x : inputs[--left];
    const auto [unit_g, dz] = std::apply(
        [&](const auto&... folded) {
          return Ops::bn_relu_conv_backward_into(gradients[i], g, folded..., h, mean, var, p[0],
                                                 p[1], eps[i], p[2], true, true, needs_dz);
        },
        fold);
    if (ends_block) block_dy = needs_dz ? dz : g;
    g = unit_g;
    fold = {place == 0 ? std::optional<Tensor>(block_dy) : std::nullopt,
            h,
            mean,
            var,
            p[0],
            eps[i],
            gradients[i].sums,
            inv_count};
  }
  results[0] = g;
  results[1] = block_dy;
  results[2] = rebuilt ? x : inputs[0];
  return results;
}

}  // namespace preact_kernels
