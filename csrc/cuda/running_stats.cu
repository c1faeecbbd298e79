// The running statistics of a batch norm, and its count of batches.

#include "on_device.h"

namespace preact_kernels {
namespace cuda {

struct NormBuffersParams {
  float* running[2];  // mean, variance: [channels]
  const float* batch[2];
  int channels;
  float momentum, rest, factor;  // rest: 1 - momentum
  int64_t* count;                // or null
};

// running = rest * running + momentum * batch, for the mean or, with factor * batch, for the
// variance; count = count + 1.
__global__ void __launch_bounds__(kThreads) norm_buffers_update_kernel(NormBuffersParams p) {
  const int c = blockIdx.x * kThreads + threadIdx.x;
  if (c == 0 && p.count != nullptr) ++*p.count;
  if (c >= p.channels) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float batch = i == 0 ? p.batch[0][c] : p.factor * p.batch[1][c];
    p.running[i][c] = p.rest * p.running[i][c] + p.momentum * batch;
  }
}

}  // namespace cuda

using namespace cuda;

// A thread owns a channel.
void norm_buffers_update(const Tensor& running_mean, const Tensor& running_var, const Tensor& mean,
                         const Tensor& var, double momentum, double factor,
                         const std::optional<Tensor>& count) {
  check_tensor("running_mean", running_mean);
  PK_CHECK(running_mean.dim() == 1 && running_mean.scalar_type() == ScalarType::Float,
           "running_mean: expected float32 [C]");
  const int64_t channels = running_mean.numel();
  const std::pair<const char*, const Tensor&> vectors[] = {
      {"running_mean", running_mean}, {"running_var", running_var}, {"mean", mean}, {"var", var}};
  for (const auto& [name, t] : vectors) {
    check_statistics(name, t, running_mean);
    check_shape(name, t, {channels});
  }
  if (count.has_value()) {
    check_tensor("count", *count);
    check_same_device("count", *count, running_mean);
    PK_CHECK(count->numel() == 1 && count->scalar_type() == ScalarType::Long,
             "count: expected one int64 value");
  }
  if (channels == 0) return;
  const OnDeviceOf on(running_mean);
  const NormBuffersParams params{
      {mutable_data<float>(running_mean), mutable_data<float>(running_var)},
      {data<float>(mean), data<float>(var)},
      static_cast<int>(channels),
      static_cast<float>(momentum),
      static_cast<float>(1 - momentum),
      static_cast<float>(factor),
      count.has_value() ? mutable_data<int64_t>(*count) : nullptr};
  launch("norm_buffers_update", norm_buffers_update_kernel,
         dim3(static_cast<unsigned>((channels + kThreads - 1) / kThreads)), kThreads, 0, on.stream,
         params);
}

}  // namespace preact_kernels
