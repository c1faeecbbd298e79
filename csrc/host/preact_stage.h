// Pre-activation blocks in a row, with no return to Python between their convolutions.
#pragma once

#include "bn_relu.h"
#include "bn_relu_conv.h"

namespace preact_kernels {

// Tensors of each unit in a flat list: bn_weight, bn_bias, conv_weight, or mean, var.
constexpr size_t kParameters = 3;
constexpr size_t kStatistics = 2;

inline void check_count(const char* name, const std::vector<Tensor>& tensors, size_t expected) {
  STD_TORCH_CHECK(tensors.size() == expected, name, ": expected ", expected, " tensors, got ",
                  tensors.size());
}

inline void check_units(const std::vector<Tensor>& parameters, const std::vector<double>& eps,
                        int64_t units_per_block) {
  STD_TORCH_CHECK(units_per_block > 0 && !eps.empty() && eps.size() % units_per_block == 0,
                  "eps: expected whole blocks of ", units_per_block, " units, got ", eps.size());
  check_count("parameters", parameters, kParameters * eps.size());
}

// The weight of each unit's convolution.
inline std::vector<Tensor> conv_weights(const std::vector<Tensor>& parameters) {
  std::vector<Tensor> found;
  for (size_t i = 2; i < parameters.size(); i += kParameters) found.push_back(parameters[i]);
  return found;
}

// Blocks of `units_per_block` units with identity shortcuts, as ops/preact_stage.py runs them.
//   parameters    bn_weight, bn_bias and conv_weight of every unit
//   known         mean and var of every unit; none where each unit uses those of its batch
//   x_statistics  mean and var of x where the caller has them; none with `known`
//   dtype         of the convolutions; none for that of their operands
// Returns y and its mean and var (without values unless `with_stats`); mean and var of every unit
// unless they are known; the inputs of the first units of blocks where `keep_block_inputs`, and of
// all other units where `keep_inputs`. The first unit's are x and x_statistics themselves.
inline std::vector<Tensor> preact_stage_forward(
    const Tensor& x, const std::vector<Tensor>& x_statistics, const std::vector<Tensor>& parameters,
    const std::vector<Tensor>& known, const std::vector<double>& eps, int64_t units_per_block,
    bool with_stats, bool keep_inputs, bool keep_block_inputs, std::optional<ScalarType> dtype) {
  check_activation("x", x);  // before memory on its device is written
  check_units(parameters, eps, units_per_block);
  if (!known.empty()) check_count("known", known, kStatistics * eps.size());
  if (!x_statistics.empty()) check_count("x_statistics", x_statistics, kStatistics);
  std::vector<Tensor> inputs, statistics;
  Tensor h = x, shortcut = x, mean, var;
  if (!x_statistics.empty()) {
    mean = x_statistics[0], var = x_statistics[1];
  } else if (known.empty()) {
    std::tie(mean, var) = bn_stats(x);
  }
  std::vector<bool> are_wanted(eps.size(), known.empty());
  are_wanted.back() = with_stats;
  ForwardRun run(x, conv_weights(parameters), are_wanted, dtype);
  Accumulators moments;
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
    const BatchStatistics& of_output = run.statistics[i];
    h = bn_relu_conv_forward(h, {mean, var, p[0], p[1], eps[i], moments}, p[2], std::nullopt,
                             ends_block ? std::optional<Tensor>(shortcut) : std::nullopt, of_output,
                             run.unit(i));
    mean = of_output.mean, var = of_output.var, moments = of_output.moments;
  }
  run.finish();
  std::vector<Tensor> results{h, mean, var};
  results.insert(results.end(), statistics.begin(), statistics.end());
  results.insert(results.end(), inputs.begin(), inputs.end());
  return results;
}

// What the backward of a stage keeps or was given.
struct StageTensors {
  std::vector<Tensor> inputs, statistics, parameters;
  std::vector<double> eps;
  double inv_count;
  int64_t units_per_block;
  std::optional<Tensor> y;      // the output; the inputs of blocks are then rebuilt: x = y - F(x)
  std::vector<Tensor> negated;  // with y: the weight of each block's last unit, its sign changed
};

// The backward of a stage. With a fold, `dy` is the g that the fold applies to.
// stage.inputs are the inputs of all units, or, where blocks are rebuilt, of all but their first.
// Returns g of the first unit and dy of the first block, where dx = dy + the input gradient of the
// first batch norm; the input of the first block; dconv_weight and the sums of every unit.
inline std::vector<Tensor> preact_stage_backward(const Tensor& dy, std::optional<Fold> fold,
                                                 const StageTensors& stage) {
  const size_t units = stage.eps.size();
  check_units(stage.parameters, stage.eps, stage.units_per_block);
  const size_t rebuilt = stage.y.has_value() ? units / stage.units_per_block : 0;
  const size_t kept = units - rebuilt;
  STD_TORCH_CHECK(kept > 0, "y: expected none beside blocks of one unit");
  check_count("inputs", stage.inputs, kept);
  check_count("negated", stage.negated, rebuilt);
  check_count("statistics", stage.statistics, kStatistics * units);
  check_activation("dy", dy);
  std::vector<Tensor> weights = conv_weights(stage.parameters);
  weights.insert(weights.end(), stage.negated.begin(), stage.negated.end());
  BackwardRun run(dy, weights, std::vector<Wanted>(units, {true, true, false}), stage.inputs);
  std::vector<Tensor> results(3);
  for (const UnitGradients& unit : run.gradients) {
    results.push_back(unit.conv_weight);
    results.push_back(unit.sums);
  }
  const auto conv_of = [&](size_t unit) -> Conv {
    const auto size = dy.sizes(), weight = weights[unit].sizes();
    return {size[0], size[2], size[3], weight[1], weight[0], weight[2], weight[3]};
  };
  const BatchStatistics no_statistics = empty_batch_statistics(dy, false, 0);
  Tensor g = dy, block_dy = dy, x = stage.y.value_or(stage.inputs[0]);
  std::optional<RecomputedG> recomputed_g;  // where the g of the fold was not stored
  size_t left = kept;
  for (size_t i = units; i-- > 0;) {
    const size_t place = i % stage.units_per_block;
    const bool ends_block = place + 1 == static_cast<size_t>(stage.units_per_block);
    const Tensor* p = &stage.parameters[kParameters * i];
    const Tensor* moments = &stage.statistics[kStatistics * i];
    const Norm norm{moments[0], moments[1], p[0], p[1], stage.eps[i]};
    if (ends_block && rebuilt) {  // x is the output of this block
      const size_t block = i / stage.units_per_block;
      x = bn_relu_conv_forward(stage.inputs[left - 1], norm, stage.negated[block], std::nullopt, x,
                               no_statistics, run.unit(units + block));
    }
    const Tensor& h = place == 0 && rebuilt ? x : stage.inputs[--left];
    UnitGradients& unit = run.gradients[i];
    unit.wanted.dy = ends_block && fold.has_value();
    bool is_recomputed = false;
    if (place == 0 && i > 0 && !ends_block) {
      const Tensor& x_of_previous = stage.inputs[left - 1];  // of unit i - 1, the last of its block
      is_recomputed =
          recomputes_g(conv_of(i - 1), conv_of(i),
                       {run.dtype, x_of_previous.scalar_type(), h.scalar_type()}, x_of_previous);
    }
    unit.wanted.stores_g = !is_recomputed;
    bn_relu_conv_backward(g, fold, recomputed_g, h, norm, p[2], unit,
                          run.unit(i, place == 0 && rebuilt));
    if (ends_block) block_dy = unit.wanted.dy ? *unit.dy : g;
    recomputed_g = std::nullopt;
    if (is_recomputed) {
      recomputed_g = {*fold, *norm.bias, i};  // whose fold applies to g, which stays as it is
    } else {
      g = *unit.g;
    }
    unit.g = unit.dy = std::nullopt;
    fold = {place == 0 ? std::optional<Tensor>(block_dy) : std::nullopt,
            h,
            {norm.mean, norm.var, norm.weight, std::nullopt, norm.eps},
            unit.sums,
            stage.inv_count,
            unit.accumulated};
  }
  run.finish(dy);
  results[0] = g;
  results[1] = block_dy;
  results[2] = rebuilt ? x : stage.inputs[0];
  return results;
}

}  // namespace preact_kernels
