// Statistics and gradients of the units of a native call are parts of a few tensors, allocated
// before large results. Small tensors between large ones would leave holes of awkward sizes.
#pragma once

#include <array>

#include "launch.h"

namespace preact_kernels {

// Splits a vector into parts, with one call of PyTorch for the many units of a run.
inline std::vector<Tensor> parts_of(const Tensor& whole, const std::vector<int64_t>& sizes) {
  constexpr int64_t kDim = 0;
  std::array<StableIValue, 3> stack{
      torch::stable::detail::from(whole),
      torch::stable::detail::from(torch::headeronly::IntHeaderOnlyArrayRef(sizes)),
      torch::stable::detail::from(kDim)};
  PK_CHECK(torch_call_dispatcher("aten::split_with_sizes", "", stack.data(), TORCH_ABI_VERSION) ==
               TORCH_SUCCESS,
           "cannot split a tensor");
  return torch::stable::detail::to<std::vector<Tensor>>(stack[0]);
}

// Creates a workspace with `sums` sums for these units. conv_weights[i] has index i.
inline std::shared_ptr<Workspace> share_workspace(const Tensor& like, std::vector<Unit>& units,
                                                  const std::vector<Tensor>& conv_weights,
                                                  int64_t sums) {
  auto workspace = new_workspace(like, units[0].dtypes.products, conv_weights, sums);
  for (Unit& unit : units) unit.workspace = workspace.get();
  return workspace;
}

// Statistics of the outputs of units, which have the same number of pixels.
struct RunStatistics {
  std::shared_ptr<Workspace> workspace;
  Tensor mean, var;                    // statistics of all units
  std::vector<Statistics> of_outputs;  // parts of mean and var, for each unit
  int64_t pixels;                      // pixels of an output

  RunStatistics(const Tensor& x, std::vector<Unit>& units, const std::vector<Tensor>& conv_weights,
                const std::vector<bool>& are_wanted)
      : pixels(units[0].conv.output().pixels()) {
    std::vector<int64_t> counts;
    int64_t total = 0;
    for (size_t i = 0; i < units.size(); ++i) {
      counts.push_back(are_wanted[i] ? units[i].conv.out_channels : 0);
      total += counts[i];
    }
    workspace = share_workspace(x, units, conv_weights, 2 * total);
    mean = empty_statistics(x, total), var = empty_statistics(x, total);
    const std::vector<Tensor> means = parts_of(mean, counts), variances = parts_of(var, counts);
    const Accumulators sums = sums_of(*workspace);
    int64_t first = 0;
    for (size_t i = 0; i < units.size(); ++i) {
      of_outputs.push_back({means[i], variances[i], counts[i] > 0});
      if (sums.words != nullptr && counts[i] > 0) {
        of_outputs.back().moments = {sums.words + first, total, sums.stride};
      }
      first += counts[i];
    }
  }

  // Fills mean and var if kernels have only added up sums.
  void finish() { finish_statistics(*workspace, mean, var, pixels); }
};

struct RunGradients {
  std::shared_ptr<Workspace> workspace;
  Tensor sums;                      // sums of all units
  std::vector<int64_t> channels;    // channels of each unit's x; 0 if its sums are not wanted
  std::vector<Gradients> of_units;  // their sums are parts of `sums`, [2 * C]

  // wanted[i] applies to units[i]; further units have no gradients. The workspace packs `operands`.
  RunGradients(const Tensor& like, std::vector<Unit>& units,
               const std::vector<Tensor>& conv_weights, const std::vector<Wanted>& wanted,
               const std::vector<Tensor>& operands) {
    std::vector<int64_t> counts;
    int64_t total = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      channels.push_back(wanted[i].g ? units[i].conv.in_channels : 0);
      counts.push_back(2 * channels[i]);
      total += counts[i];
    }
    workspace = share_workspace(like, units, operands, total);
    sums = empty_statistics(like, total);
    const std::vector<Tensor> parts = parts_of(sums, counts);
    const Accumulators all = sums_of(*workspace);
    int64_t first = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      Gradients unit{wanted[i], wanted[i].weight ? new_like(conv_weights[i]) : absent(like),
                     parts[i]};
      if (all.words != nullptr) unit.accumulated = {all.words + first, channels[i], all.stride};
      of_units.push_back(unit);
      first += counts[i];
    }
  }

  RunGradients(const Tensor& like, std::vector<Unit>& units,
               const std::vector<Tensor>& conv_weights, const std::vector<Wanted>& wanted)
      : RunGradients(like, units, conv_weights, wanted, conv_weights) {}

  Tensor sums_of_unit(size_t i) const {
    const int64_t sizes[] = {2, channels[i]};
    return torch::stable::view(of_units[i].sums, {sizes, 2});
  }

  // The gradients of the bias and the weight of each unit's norm, unit by unit.
  std::vector<Tensor> of_norms() const {
    std::vector<int64_t> sizes;
    for (const int64_t count : channels) sizes.insert(sizes.end(), 2, count);
    return parts_of(sums, sizes);
  }

  // Fills sums and weight gradients if kernels have only added up parts.
  void finish(const Tensor& like) { finish_gradients(*workspace, like, sums); }
};

}  // namespace preact_kernels
