// Statistics and gradients of the units of a native call: parts of a few tensors, allocated before
// large results. Small tensors between large ones would leave holes of awkward sizes.
#pragma once

#include "launch.h"

namespace preact_kernels {

inline Tensor part_of(const Tensor& whole, int64_t first, int64_t count) {
  Tensor self = whole;
  return torch::stable::narrow(self, 0, first, count);
}

// Gives these units a workspace with `sums` sums. conv_weights[i] has index i.
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
  Tensor mean, var;                    // of all units
  std::vector<Statistics> of_outputs;  // of each unit; parts of them
  int64_t pixels;                      // of an output

  // Statistics of unit i are computed if are_wanted[i].
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
    const Accumulators sums = sums_of(*workspace);
    int64_t first = 0;
    for (const int64_t count : counts) {
      of_outputs.push_back({part_of(mean, first, count), part_of(var, first, count), count > 0});
      if (sums.words != nullptr && count > 0) {
        of_outputs.back().moments = {sums.words + first, total, sums.stride};
      }
      first += count;
    }
  }

  // Fills mean and var if kernels have only added up sums.
  void finish() { finish_statistics(*workspace, mean, var, pixels); }
};

// The gradients of units.
struct RunGradients {
  std::shared_ptr<Workspace> workspace;
  Tensor sums;                          // of all units
  std::vector<UnitGradients> of_units;  // their sums are parts of it

  // The units of `wanted` come first in `units`.
  RunGradients(const Tensor& like, std::vector<Unit>& units,
               const std::vector<Tensor>& conv_weights, const std::vector<Wanted>& wanted) {
    int64_t total = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      total += wanted[i].g ? 2 * units[i].conv.in_channels : 0;
    }
    workspace = share_workspace(like, units, conv_weights, total);
    sums = empty_statistics(like, total);
    const Accumulators all = sums_of(*workspace);
    int64_t first = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      const int64_t sizes[] = {2, wanted[i].g ? units[i].conv.in_channels : 0};
      const int64_t count = 2 * sizes[1];
      UnitGradients unit{
          wanted[i], wanted[i].weight ? torch::stable::empty_like(conv_weights[i]) : absent(like),
          torch::stable::view(part_of(sums, first, count), {sizes, 2})};
      if (all.words != nullptr) unit.accumulated = {all.words + first, sizes[1], all.stride};
      of_units.push_back(unit);
      first += count;
    }
  }

  // Fills sums and weight gradients if kernels have only added up parts.
  void finish(const Tensor& like) { finish_gradients(*workspace, like, sums); }
};

}  // namespace preact_kernels
