// Batch norm and ReLU, and the input gradient, for the channels of one thread.
#pragma once

#include "conv_operand.cuh"
#include "exact_sums.cuh"

namespace preact_kernels::cuda {

// A batch norm; every pointer is to [C] float32.
struct NormPointers {
  const float *mean, *var, *weight;
  const float* bias;  // null in an affine step
  float eps;
  Accumulators moments;  // if any, mean and var are computed from these
  Count pixels;
};

// An AffineStep: [skip +] A*g + B*(x - mean) + C.
struct AffineStepPointers {
  const void* skip;  // or null
  const void* x;     // null where there is no step
  NormPointers norm;
  const float* sums;         // [2, C]: sum(g), sum(g * xhat)
  float inv_count;           // 0 in evaluation mode: x is not read, and NaN does not spread
  Accumulators accumulated;  // if any, `sums` are computed from these

  __host__ __device__ bool reads_x() const { return inv_count != 0; }
  __device__ float sum(int channel, int value, int channels) const {
    if (accumulated.words != nullptr) return float(read_exact(accumulated, channel, value));
    return sums[value * channels + channel];
  }
};

__device__ inline float reciprocal_std(float var, float eps) { return 1.0f / sqrtf(var + eps); }

// 0 where p <= 0. NaN stays NaN, as in PyTorch.
__device__ inline float relu(float p) { return p <= 0 ? 0.0f : p; }

// Marks a constructor that reads from shared memory what all threads wrote there, first in
// `load_parameters`, which reads nothing that a kernel of this call writes, then in `read_sums`. A
// kernel may call the first before `wait_for_predecessors`.
struct FromShared {};

// p = (x - mean) * scale + bias, always with one rounding after the difference. Subtracting the
// mean first avoids cancellation where it is large compared with the deviation.
template <int kWidth>
struct Normalisation {
  static constexpr int kRows = 4;

  float mean[kWidth], scale[kWidth], bias[kWidth];

  // Zeros for a thread without channels. Reads mean and var: the norm has no `moments`.
  __device__ Normalisation(const NormPointers& norm, int channel, bool is_channel) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const int c = channel + i;
      mean[i] = scale[i] = bias[i] = 0;
      if (!is_channel) continue;
      mean[i] = norm.mean[c], bias[i] = norm.bias[c];
      scale[i] = norm.weight[c] * reciprocal_std(norm.var[c], norm.eps);
    }
  }

  __device__ Normalisation(FromShared, const float* shared, int channels, int first) {
    load_floats(mean, shared + first);
    load_floats(scale, shared + channels + first);
    load_floats(bias, shared + 2 * channels + first);
  }

  // Fills `shared` [kRows][channels]: mean, scale, bias, 1 / standard deviation.
  static __device__ void load_parameters(const NormPointers& norm, int channels, float* shared) {
    for (int c = threadIdx.x; c < channels; c += kThreads) {
      shared[channels + c] = norm.weight[c];
      shared[2 * channels + c] = norm.bias[c];
      if (norm.moments.words != nullptr) continue;
      shared[c] = norm.mean[c];
      set_scale(reciprocal_std(norm.var[c], norm.eps), channels, shared + c);
    }
  }
  static __device__ void read_sums(const NormPointers& norm, int channels, float* shared) {
    if (norm.moments.words == nullptr) return;
    for (int c = threadIdx.x; c < channels; c += kThreads) {
      float var;
      read_moments(norm.moments, c, norm.pixels, shared[c], var);
      set_scale(reciprocal_std(var, norm.eps), channels, shared + c);
    }
  }
  static __device__ void load_rstd(float (&rstd)[kWidth], const float* shared, int channels,
                                   int first) {
    load_floats(rstd, shared + 3 * channels + first);
  }

  __device__ float operator()(float x, int i) const { return fmaf(x - mean[i], scale[i], bias[i]); }

  // relu(p) of a vector of x as an operand, rounded as PyTorch stores it.
  template <class T, class X>
  __device__ FullVector<T> activation(const Vector<X, kWidth>& x) const {
    float p[kWidth];
    x.unpack(p);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) p[j] = relu((*this)(p[j], j));
    FullVector<T> a;
    a.pack(p);
    return as_operand<T>(a);
  }

 private:
  static __device__ void set_scale(float rstd, int channels, float* shared) {
    shared[channels] *= rstd;
    shared[3 * channels] = rstd;
  }
};

// The coefficients of a step, a*g + b*(x - mean) + c. In evaluation mode b and c are not used.
template <int kWidth>
struct InputGradient {
  static constexpr int kRows = 4;

  float a[kWidth], b[kWidth], c[kWidth], mean[kWidth];

  // Zeros for a thread without channels.
  __device__ InputGradient(const AffineStepPointers& step, int channels, int channel,
                           bool is_channel) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      a[i] = b[i] = c[i] = mean[i] = 0;
      if (!is_channel) continue;
      const int at = channel + i;
      const float rstd = reciprocal_std(step.norm.var[at], step.norm.eps);
      a[i] = step.norm.weight[at] * rstd;
      set_sums(step, channels, at, a[i], rstd, b[i], c[i]);
      mean[i] = step.norm.mean[at];
    }
  }

  __device__ InputGradient(FromShared, const float* shared, int channels, int first) {
    load_floats(a, shared + first);
    load_floats(b, shared + channels + first);
    load_floats(c, shared + 2 * channels + first);
    load_floats(mean, shared + 3 * channels + first);
  }

  // Fills `shared` [kRows][channels]: a, b, c, mean.
  static __device__ void load_parameters(const AffineStepPointers& step, int channels,
                                         float* shared) {
    for (int i = threadIdx.x; i < channels; i += kThreads) {
      const float rstd = reciprocal_std(step.norm.var[i], step.norm.eps);
      shared[i] = step.norm.weight[i] * rstd;
      shared[channels + i] = rstd;  // for `read_sums`
      shared[3 * channels + i] = step.norm.mean[i];
    }
  }
  static __device__ void read_sums(const AffineStepPointers& step, int channels, float* shared) {
    for (int i = threadIdx.x; i < channels; i += kThreads) {
      set_sums(step, channels, i, shared[i], shared[channels + i], shared[channels + i],
               shared[2 * channels + i]);
    }
  }

  // The gradient of vector i in the dtype of x. x and skip are read only where the step has them.
  template <class Y, class G, class X>
  __device__ Vector<Y, kWidth> apply(const AffineStepPointers& step, int i, const G& g, const X& x,
                                     const X& skip) const {
    float dy[kWidth], more[kWidth];
    g[i].unpack(dy);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) dy[j] *= a[j];
    if (step.reads_x()) {
      x[i].unpack(more);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) dy[j] += fmaf(more[j] - mean[j], b[j], c[j]);
    }
    if (step.skip != nullptr) {
      skip[i].unpack(more);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) dy[j] += more[j];
    }
    Vector<Y, kWidth> gradient;
    gradient.pack(dy);
    return gradient;
  }

 private:
  static __device__ void set_sums(const AffineStepPointers& step, int channels, int at, float a,
                                  float rstd, float& b, float& c) {
    b = -a * rstd * (step.sum(at, 1, channels) * step.inv_count);
    c = -a * (step.sum(at, 0, channels) * step.inv_count);
  }
};

}  // namespace preact_kernels::cuda
