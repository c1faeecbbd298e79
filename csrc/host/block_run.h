// Consecutive residual blocks with identity shortcuts, in one native call.
#pragma once

#include "norm_act.h"
#include "norm_act_conv.h"

namespace preact_kernels {

// A BlockRun of kernels/contract.py. Lists have an entry per unit.
struct BlockRun {
  const std::vector<Tensor>&bn_weights, &bn_biases, &conv_weights;
  const std::vector<Tensor>&means, &variances;  // for all units, for x alone, or empty
  const std::vector<double>& eps;
  size_t units_per_block;
  ScalarType dtype;  // the dtype of products

  size_t units() const { return conv_weights.size(); }
  bool starts_block(size_t i) const { return i % units_per_block == 0; }
  bool ends_block(size_t i) const { return (i + 1) % units_per_block == 0; }

  Norm norm(size_t i, const Tensor& mean, const Tensor& var) const {
    const Norm norm{mean, var, bn_weights[i], bn_biases[i], eps[i]};
    PK_CHECK(!norm.has_rows(), "means, variances, bn_weights, bn_biases: expected tensors [C]");
    return norm;
  }

  // Unit i. `stream` is the dtype of the inputs and outputs of blocks, which have as many channels
  // as `like`.
  Unit unit(size_t i, const Tensor& weight, const ImageSizes& size, ScalarType stream,
            const Tensor& like, const char* name = kRunNames.conv_weight) const {
    const ConvDtypes dtypes{dtype, starts_block(i) ? stream : dtype,
                            ends_block(i) ? stream : dtype};
    const ConvSizes conv = check_conv(size, weight, {}, dtypes, like, name);
    PK_CHECK(!ends_block(i) || conv.out_channels == like.sizes()[1], name, ": expected ",
             like.sizes()[1], " channels after the last unit of a block, got ", conv.out_channels);
    return {conv, dtypes, i};
  }
};

inline void check_count(const char* name, const std::vector<Tensor>& tensors, size_t expected) {
  PK_CHECK(tensors.size() == expected, name, ": expected ", expected, " tensors, got ",
           tensors.size());
}

inline void check_run(const BlockRun& run) {
  check_count("bn_weights", run.bn_weights, run.units());
  check_count("bn_biases", run.bn_biases, run.units());
  check_count("variances", run.variances, run.means.size());
  PK_CHECK(run.eps.size() == run.units(), "eps: expected ", run.units(), " values, got ",
           run.eps.size());
  PK_CHECK(run.units_per_block > 0 && run.units() > 0 && run.units() % run.units_per_block == 0,
           "units_per_block: expected a divisor of ", run.units(), " units, got ",
           static_cast<int64_t>(run.units_per_block));
}

// Whether the input of each block is kept.
inline std::vector<bool> are_kept(const BlockRun& run, const std::vector<int64_t>& kept_blocks) {
  const int64_t blocks = static_cast<int64_t>(run.units() / run.units_per_block);
  std::vector<bool> found(blocks);
  int64_t before = -1;
  for (const int64_t block : kept_blocks) {
    PK_CHECK(before < block && block < blocks, "kept_blocks: expected ascending indices below ",
             blocks, ", got ", block);
    found[block] = true;
    before = block;
  }
  return found;
}

// Returns y; its mean and var, empty unless `with_stats`; means and variances of all units, unless
// all were given; the inputs of the first units of `kept_blocks`, and of all other units if
// `keep_unit_inputs`. Computes statistics that were not given.
inline std::vector<Tensor> run_forward(const Tensor& x, const BlockRun& run, bool with_stats,
                                       const std::vector<int64_t>& kept_blocks,
                                       bool keep_unit_inputs) {
  ImageSizes size = check_images("x", x);  // before memory on its device is written
  check_run(run);
  const std::vector<bool> keeps = are_kept(run, kept_blocks);
  const bool are_given = run.means.size() == run.units();
  if (!are_given && !run.means.empty()) check_count("means", run.means, 1);
  Statistics statistics;
  if (!run.means.empty()) {
    statistics = {run.means[0], run.variances[0]};
  } else {
    std::tie(statistics.mean, statistics.var) = bn_stats(x);
  }
  std::vector<Unit> units;
  for (size_t i = 0; i < run.units(); ++i) {
    units.push_back(run.unit(i, run.conv_weights[i], size, x.scalar_type(), x));
    size = units[i].conv.output();
  }
  std::vector<bool> are_wanted(run.units(), !are_given);
  are_wanted.back() = with_stats;
  RunStatistics results(x, units, run.conv_weights, are_wanted);
  std::vector<Tensor> means, variances, inputs;
  Tensor h = x, shortcut = x;
  for (size_t i = 0; i < run.units(); ++i) {
    if (run.starts_block(i)) shortcut = h;
    const bool is_kept = run.starts_block(i) ? keeps[i / run.units_per_block] : keep_unit_inputs;
    if (is_kept) inputs.push_back(h);
    if (are_given) {
      statistics = {run.means[i], run.variances[i]};
    } else {
      means.push_back(statistics.mean);
      variances.push_back(statistics.var);
    }
    Norm norm = run.norm(i, statistics.mean, statistics.var);
    norm.moments = statistics.moments;
    const Epilogue epilogue{std::nullopt,
                            run.ends_block(i) ? std::optional(shortcut) : std::nullopt};
    h = unit_forward(units[i], {h, norm, run.conv_weights[i]}, epilogue, results.of_outputs[i],
                     kRunNames);
    statistics = results.of_outputs[i];
  }
  results.finish();
  std::vector<Tensor> found{h, statistics.mean, statistics.var};
  for (const auto& list : {means, variances, inputs}) {
    found.insert(found.end(), list.begin(), list.end());
  }
  return found;
}

struct BlockRunInputs {
  // Inputs of all units, except the first units of blocks that are not in `kept_blocks`. Those
  // inputs are rebuilt as y - F(x), where y is the block's output.
  const std::vector<Tensor>& of_units;
  const std::vector<int64_t>& kept_blocks;
  const std::optional<Tensor>& y;      // the output, if the last block's input is rebuilt
  const std::vector<Tensor>& negated;  // the last weight of each rebuilt block, times -1
};

// Returns g of the first unit; dy of the first block, which is the gradient of its shortcut; the
// first block's input; the first unit's sums; dconv_weight of all units; dbn_bias and dbn_weight of
// each unit (the first unit's share memory with its sums).
inline std::vector<Tensor> run_backward(Gradient gradient, const BlockRun& run,
                                        const BlockRunInputs& given, double inv_count) {
  check_run(run);
  const std::vector<Tensor>& inputs = given.of_units;
  const std::vector<bool> keeps = are_kept(run, given.kept_blocks);
  std::vector<size_t> rebuilt;  // indices of blocks
  for (size_t block = 0; block < keeps.size(); ++block) {
    if (!keeps[block]) rebuilt.push_back(block);
  }
  PK_CHECK(rebuilt.empty() || run.units_per_block > 1, "kept_blocks: expected all ", keeps.size(),
           " blocks if units_per_block is 1, got ", given.kept_blocks.size());
  PK_CHECK(given.y.has_value() != keeps.back(),
           "y: expected the output if the last block is not kept, else None");
  size_t left = run.units() - rebuilt.size();  // inputs that are still unread
  check_count("inputs", inputs, left);
  check_count("negated", given.negated, rebuilt.size());
  check_count("means", run.means, run.units());
  const Tensor dy = gradient.g;
  ImageSizes size = check_images("g", dy);
  const ScalarType stream = dtype_of(gradient);
  if (given.y.has_value()) {
    check_sizes("y", *given.y, size, dy);
    PK_CHECK(given.y->scalar_type() == stream, "y: expected the dtype of g or step_x");
  }
  std::vector<Tensor> weights = run.conv_weights;
  weights.insert(weights.end(), given.negated.begin(), given.negated.end());
  std::vector<Unit> units;
  for (size_t i = 0; i < weights.size(); ++i) {
    const bool is_negated = i >= run.units();
    const size_t place = is_negated ? (rebuilt[i - run.units()] + 1) * run.units_per_block - 1 : i;
    const char* name = is_negated ? "negated" : kRunNames.conv_weight;
    if (is_negated) size.channels = units[place].conv.in_channels;
    units.push_back(run.unit(place, weights[i], size, stream, dy, name));
    size.channels = units[i].conv.out_channels;
    units[i].weight = i;
  }
  const std::vector<Wanted> wanted(run.units(), {true, true, false});
  RunGradients results(dy, units, weights, wanted);
  std::vector<Tensor> found(4);
  for (const Gradients& unit : results.of_units) found.push_back(unit.conv_weight);
  for (const Tensor& gradient_of_norm : results.of_norms()) found.push_back(gradient_of_norm);
  const Statistics no_statistics = new_statistics(dy, false, 0);
  Tensor block_dy = dy, x = given.y.value_or(inputs[0]);
  size_t rebuilt_left = rebuilt.size();
  for (size_t i = run.units(); i-- > 0;) {
    const bool starts_block = run.starts_block(i), ends_block = run.ends_block(i);
    const Norm norm = run.norm(i, run.means[i], run.variances[i]);
    const bool is_rebuilt = !keeps[i / run.units_per_block];
    if (ends_block && is_rebuilt) {  // x is the output of this block
      const size_t negated = run.units() + --rebuilt_left;
      x = unit_forward(units[negated], {inputs[left - 1], norm, weights[negated]},
                       {std::nullopt, x}, no_statistics, kRunNames);
    }
    const Tensor h = starts_block && is_rebuilt ? x : inputs[--left];
    if (starts_block) x = h;
    units[i].is_x_rebuilt = starts_block && is_rebuilt;
    Gradients& unit = results.of_units[i];
    unit.wanted.dy = ends_block && gradient.step.has_value();
    unit_backward(units[i], gradient, {h, norm, weights[i]}, unit, kRunNames);
    if (ends_block) block_dy = unit.wanted.dy ? *unit.dy : gradient.g;
    gradient.g = *unit.g;
    gradient.step = {starts_block ? std::optional(block_dy) : std::nullopt,
                     h,
                     {norm.mean, norm.var, norm.weight, std::nullopt, norm.eps},
                     unit.sums,
                     inv_count,
                     unit.accumulated};
    unit.g = unit.dy = std::nullopt;
  }
  results.finish(dy);
  found[0] = gradient.g;
  found[1] = block_dy;
  found[2] = x;
  found[3] = results.sums_of_unit(0);
  return found;
}

inline std::vector<Tensor> block_run_forward(const Tensor& x, PK_RUN_PARAMETERS, bool with_stats,
                                             const std::vector<int64_t>& kept_blocks,
                                             bool keep_unit_inputs) {
  return run_forward(x, {PK_RUN_ARGUMENTS}, with_stats, kept_blocks, keep_unit_inputs);
}

inline std::vector<Tensor> block_run_backward(PK_GRADIENT_PARAMETERS, PK_RUN_PARAMETERS,
                                              const std::vector<Tensor>& inputs,
                                              const std::vector<int64_t>& kept_blocks,
                                              double inv_count, const std::optional<Tensor>& y,
                                              const std::vector<Tensor>& negated) {
  return run_backward(gradient_of(PK_GRADIENT_ARGUMENTS), {PK_RUN_ARGUMENTS},
                      {inputs, kept_blocks, y, negated}, inv_count);
}

}  // namespace preact_kernels
