// Device functions: one batch norm and ReLU, and its input gradient, for some channels of a thread.
#pragma once

#include "device.cuh"

namespace preact_kernels::cuda {

// The tensors of one batch norm, all [C] float32.
struct BatchNorm {
  const float* mean;
  const float* var;
  const float* weight;
  const float* bias;
  float eps;
};

__device__ inline float reciprocal_std(float var, float eps) { return 1.0f / sqrtf(var + eps); }

// Zero where p <= 0, so that NaN stays, as in PyTorch.
__device__ inline float relu(float p) { return p <= 0 ? 0.0f : p; }

// p = (x - mean) * scale + bias. The mean is subtracted first, here and below, so that nothing
// cancels where it is large beside the deviation.
template <int kWidth>
struct Normalisation {
  float mean[kWidth], scale[kWidth], bias[kWidth];

  __device__ Normalisation(const BatchNorm& bn, int channel, bool is_channel) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      mean[i] = is_channel ? bn.mean[channel + i] : 0.0f;
      const float rstd = is_channel ? reciprocal_std(bn.var[channel + i], bn.eps) : 0.0f;
      scale[i] = is_channel ? bn.weight[channel + i] * rstd : 0.0f;
      bias[i] = is_channel ? bn.bias[channel + i] : 0.0f;
    }
  }
  __device__ float operator()(float x, int i) const { return (x - mean[i]) * scale[i] + bias[i]; }
};

// Gradient of a batch norm's input, per channel: a*g + b*(x - mean) + c. In evaluation mode
// (inv_count 0) it is a*g alone, and x is not read: what is not finite there must not spread.
struct InputGradientSums {
  const float* sums;  // [2, C]: sum(g), sum(g * xhat)
  float inv_count;
};

template <int kWidth>
struct InputGradient {
  float a[kWidth], b[kWidth], c[kWidth], mean[kWidth];

  __device__ InputGradient(const BatchNorm& bn, const InputGradientSums& of, int channels,
                           int channel, bool is_channel) {
    const bool in_training = is_channel && of.inv_count != 0;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const int at = channel + i;
      const float rstd = is_channel ? reciprocal_std(bn.var[at], bn.eps) : 0.0f;
      a[i] = is_channel ? bn.weight[at] * rstd : 0.0f;
      mean[i] = in_training ? bn.mean[at] : 0.0f;
      b[i] = in_training ? -a[i] * rstd * (of.sums[channels + at] * of.inv_count) : 0.0f;
      c[i] = in_training ? -a[i] * (of.sums[at] * of.inv_count) : 0.0f;
    }
  }
};

}  // namespace preact_kernels::cuda
