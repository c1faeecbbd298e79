// A run of units: their small results, which are parts of a few tensors, and what launches share.
//
// They are allocated ahead of large results, which would otherwise leave holes of awkward sizes
// between those that stay.
#pragma once

#include <numeric>

#include "launch.h"

namespace preact_kernels {

inline Tensor part_of(const Tensor& whole, int64_t first, int64_t count) {
  Tensor self = whole;
  return torch::stable::narrow(self, 0, first, count);
}

// Checks the weights of units on activations like `x`, before a kernel reads them.
inline void check_weights(const Tensor& x, ScalarType dtype,
                          const std::vector<Tensor>& conv_weights) {
  for (const Tensor& weight : conv_weights) {
    const int64_t out_channels = check_out_channels(weight);
    check_same_device("conv_weight", weight, x);
    const auto size = weight.sizes();
    check_conv_is_served({1, 1, 1, size[1], out_channels, size[2], size[3]}, {dtype, dtype, dtype},
                         weight);
  }
}

// The forward of units whose outputs have the same number of pixels.
struct ForwardRun {
  ScalarType dtype;  // of the convolutions' operands
  std::shared_ptr<Run> shared;
  std::vector<BatchStatistics> statistics;  // of each unit's output; parts of:
  Tensor mean, var;
  int64_t pixels;

  // conv_weights[i] is that of unit i; its output's statistics are computed if are_wanted[i].
  // Convolutions run in the dtype of their operands unless one is given.
  ForwardRun(const Tensor& x, const std::vector<Tensor>& conv_weights,
             const std::vector<bool>& are_wanted, std::optional<ScalarType> given)
      : dtype(given.value_or(operand_dtype(x, conv_weights))),
        pixels(x.sizes()[0] * x.sizes()[2] * x.sizes()[3]) {
    std::vector<int64_t> channels;
    for (size_t i = 0; i < are_wanted.size(); ++i) {
      const int64_t count = check_out_channels(conv_weights[i]);
      channels.push_back(are_wanted[i] ? count : 0);
    }
    const int64_t total = std::accumulate(channels.begin(), channels.end(), int64_t(0));
    check_weights(x, dtype, conv_weights);
    shared = begin_run(x, dtype, conv_weights, 2 * total);
    mean = empty_statistics(x, total), var = empty_statistics(x, total);
    Accumulators moments = sums_of(*shared);
    moments.second = total;
    int64_t first = 0;
    for (const int64_t count : channels) {
      statistics.push_back({part_of(mean, first, count), part_of(var, first, count), count > 0});
      if (moments.words != nullptr && count > 0) {
        statistics.back().moments = moments;
        moments.words += count;
      }
      first += count;
    }
  }

  UnitOfRun unit(size_t weight) { return {*shared, weight, dtype}; }

  // Fills mean and var where kernels have added up their sums only.
  void finish() { finish_statistics(*shared, mean, var, pixels); }
};

// The backward of units.
struct BackwardRun {
  ScalarType dtype;  // of the convolutions' operands
  std::shared_ptr<Run> shared;
  std::vector<UnitGradients> gradients;  // of each unit; their sums are parts of:
  Tensor sums;

  // The first conv_weights, as many as `wanted`, are those of the units; more may follow. Beside
  // float32 weights and activations, a half precision of `others` is that of the convolutions.
  BackwardRun(const Tensor& like, const std::vector<Tensor>& conv_weights,
              const std::vector<Wanted>& wanted, const std::vector<Tensor>& others)
      : dtype(operand_dtype(like, conv_weights)) {
    if (dtype == ScalarType::Float) dtype = operand_dtype(like, others);
    std::vector<int64_t> counts;
    for (size_t i = 0; i < wanted.size(); ++i) {
      check_out_channels(conv_weights[i]);
      counts.push_back(wanted[i].g ? 2 * conv_weights[i].sizes()[1] : 0);
    }
    const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t(0));
    check_weights(like, dtype, conv_weights);
    shared = begin_run(like, dtype, conv_weights, total);
    sums = empty_statistics(like, total);
    const Accumulators all = sums_of(*shared);
    int64_t first = 0;
    for (size_t i = 0; i < wanted.size(); ++i) {
      UnitGradients unit{
          wanted[i], wanted[i].weight ? torch::stable::empty_like(conv_weights[i]) : absent(like),
          part_of(sums, first, counts[i])};
      if (wanted[i].g) {
        const int64_t sizes[] = {2, counts[i] / 2};
        unit.sums = torch::stable::view(unit.sums, {sizes, 2});
        if (all.words != nullptr) {
          unit.accumulated = {all.words + first, counts[i] / 2, all.stride};
        }
      }
      gradients.push_back(unit);
      first += counts[i];
    }
  }

  UnitOfRun unit(size_t weight, bool is_x_rebuilt = false) {
    return {*shared, weight, dtype, is_x_rebuilt};
  }

  // Fills sums and weight gradients where kernels have added up parts only.
  void finish(const Tensor& like) { finish_gradients(*shared, like, sums); }
};

}  // namespace preact_kernels
