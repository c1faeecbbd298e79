// Registers the ops of the CUDA library.

#include "../host/library.h"

#define PK_TEXT(name) #name
#define PK_TEXT_OF(name) PK_TEXT(name)

// GPUs that the kernels were compiled for, as in "sm_80_sm_90_compute_90"; read with ctypes.
#if defined(PREACT_KERNELS_TARGETS)
extern "C" __attribute__((visibility("default"))) const char* preact_kernels_cuda_targets() {
  return PK_TEXT_OF(PREACT_KERNELS_TARGETS);
}
#endif

// A digest of the sources and headers: see setup.py.
#if defined(PREACT_KERNELS_SOURCES)
extern "C" __attribute__((visibility("default"))) const char* preact_kernels_cuda_sources() {
  return PK_TEXT_OF(PREACT_KERNELS_SOURCES);
}
#endif

namespace preact_kernels {
bool norm_act_conv_is_served(const Tensor& conv_weight, bool float32_stream);  // norm_act_conv.cu
std::tuple<Tensor, Tensor> group_stats_with_bias(const Tensor& x, int64_t groups,
                                                 const Tensor& bias);  // group_stats.cu
// running_stats.cu
void norm_buffers_update(const Tensor& running_mean, const Tensor& running_var, const Tensor& mean,
                         const Tensor& var, double momentum, double factor,
                         const std::optional<Tensor>& count);
std::tuple<Tensor, Tensor> pool_sums(const Tensor& sums, const Tensor& weight,
                                     int64_t groups);  // pool_sums.cu
// resident_run.cu
bool resident_run_is_served(const Tensor& x, const std::vector<Tensor>& conv_weights,
                            int64_t units_per_block, ScalarType dtype, bool is_backward);
std::vector<Tensor> resident_run_forward(const Tensor& x, PK_RUN_PARAMETERS, bool with_stats,
                                         const std::vector<int64_t>& kept_blocks,
                                         bool keep_unit_inputs);
std::vector<Tensor> resident_run_backward(PK_GRADIENT_PARAMETERS, PK_RUN_PARAMETERS,
                                          const std::vector<Tensor>& inputs,
                                          const std::vector<int64_t>& kept_blocks, double inv_count,
                                          const std::optional<Tensor>& y,
                                          const std::vector<Tensor>& negated);

Tensor empty_nhwc(const Tensor& like, const ImageSizes& size, ScalarType dtype) {
  return new_tensor(like, {size.images, size.channels, size.height, size.width}, dtype,
                    torch::headeronly::MemoryFormat::ChannelsLast);
}

}  // namespace preact_kernels

using namespace preact_kernels;

STABLE_TORCH_LIBRARY(preact_kernels_cuda, m) {
  define_ops(m);
  m.def(
      "norm_buffers_update(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor mean, "
      "Tensor var, float momentum, float factor, Tensor(c!)? count) -> ()");
  m.def("group_stats_with_bias(Tensor x, int groups, Tensor bias) -> (Tensor, Tensor)");
  m.def("pool_sums(Tensor sums, Tensor weight, int groups) -> (Tensor, Tensor)");
  m.def("norm_act_conv_is_served(Tensor conv_weight, bool float32_stream) -> bool");
  m.def(
      "resident_run_is_served(Tensor x, Tensor[] conv_weights, int units_per_block, "
      "ScalarType dtype, bool is_backward) -> bool");
  m.def("resident_run_forward(Tensor x, " PK_RUN
        ", bool with_stats, int[] kept_blocks, bool keep_unit_inputs) -> Tensor[]");
  m.def("resident_run_backward(" PK_GRADIENT ", " PK_RUN
        ", Tensor[] inputs, int[] kept_blocks, float inv_count, Tensor? y, Tensor[] negated)"
        " -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(preact_kernels_cuda, CompositeExplicitAutograd, m) {
  implement_ops(m);
  m.impl("norm_buffers_update", TORCH_BOX(&norm_buffers_update));
  m.impl("group_stats_with_bias", TORCH_BOX(&group_stats_with_bias));
  m.impl("pool_sums", TORCH_BOX(&pool_sums));
  m.impl("norm_act_conv_is_served", TORCH_BOX(&norm_act_conv_is_served));
  m.impl("resident_run_is_served", TORCH_BOX(&resident_run_is_served));
  m.impl("resident_run_forward", TORCH_BOX(&resident_run_forward));
  m.impl("resident_run_backward", TORCH_BOX(&resident_run_backward));
}
