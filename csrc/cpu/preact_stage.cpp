#include "../preact_stage.h"

#include "ops.h"

namespace preact_kernels {
namespace {

struct Ops {
  static constexpr auto bn_stats = &preact_kernels::bn_stats;
  static constexpr auto empty_batch_statistics = &preact_kernels::empty_batch_statistics;
  static constexpr auto empty_parameter_gradients = &preact_kernels::empty_parameter_gradients;
  static constexpr auto bn_relu_conv_backward_into = &preact_kernels::bn_relu_conv_backward_into;

  static Tensor bn_relu_conv_forward_into(const BatchStatistics& of_y, const Tensor& x,
                                          const Tensor& mean, const Tensor& var,
                                          const Tensor& bn_weight, const Tensor& bn_bias,
                                          double eps, const Tensor& conv_weight,
                                          const std::optional<Tensor>& residual, bool with_stats) {
    return preact_kernels::bn_relu_conv_forward_into(of_y, x, mean, var, bn_weight, bn_bias, eps,
                                                     conv_weight, std::nullopt, residual,
                                                     with_stats);
  }
};

}  // namespace

std::vector<Tensor> preact_stage_forward(const Tensor& x, const std::vector<Tensor>& x_statistics,
                                         const std::vector<Tensor>& parameters,
                                         const std::vector<Tensor>& known,
                                         const std::vector<double>& eps, int64_t units_per_block,
                                         bool with_stats, bool keep_inputs,
                                         bool keep_block_inputs) {
  return run_preact_stage_forward<Ops>(x, x_statistics, parameters, known, eps, units_per_block,
                                       with_stats, keep_inputs, keep_block_inputs);
}

std::vector<Tensor> preact_stage_backward(
    const Tensor& dy, const std::optional<Tensor>& skip, const std::optional<Tensor>& z,
    const std::optional<Tensor>& z_mean, const std::optional<Tensor>& z_var,
    const std::optional<Tensor>& z_weight, double z_eps, const std::optional<Tensor>& z_sums,
    double z_inv_count, const std::vector<Tensor>& inputs, const std::vector<Tensor>& statistics,
    const std::vector<Tensor>& parameters, const std::vector<double>& eps, double inv_count,
    int64_t units_per_block, const std::optional<Tensor>& y, const std::vector<Tensor>& negated) {
  return run_preact_stage_backward<Ops>(dy, skip, z, z_mean, z_var, z_weight, z_eps, z_sums,
                                        z_inv_count, inputs, statistics, parameters, eps, inv_count,
                                        units_per_block, y, negated);
}

}  // namespace preact_kernels
