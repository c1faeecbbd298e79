// Batch norm and ReLU, and the input gradient, for the channels of one thread.
#pragma once

#include "conv_operand.cuh"
#include "exact_sums.cuh"

namespace preact_kernels::cuda {

// A batch norm; every pointer is to [C] float32.
struct NormPointers {
  const float *mean, *var, *weight;
  const float* bias;  // null where only the input gradient is computed
  float eps;
  Accumulators moments;  // where there are some, mean and var follow from these and from
  double count;          // the number of pixels

  __device__ void read_mean_and_var(int channel, float& channel_mean, float& channel_var) const {
    if (moments.words != nullptr) {
      read_moments(moments, channel, count, channel_mean, channel_var);
    } else {
      channel_mean = mean[channel], channel_var = var[channel];
    }
  }
};

// A fold (../args.h): [skip +] A*g + B*(x - mean) + C.
struct FoldPointers {
  const void* skip;  // or null
  const void* x;     // null where nothing is folded
  NormPointers norm;
  const float* sums;  // [2, C]: sum(g), sum(g * xhat)
  float inv_count;    // 0 in evaluation mode: x is then not read, so that NaN does not spread
  Accumulators accumulated;  // where there are some, `sums` follow from these

  __host__ __device__ bool reads_x() const { return inv_count != 0; }
  __device__ float sum(int channel, int value, int channels) const {
    if (accumulated.words != nullptr) return float(read_exact(accumulated, channel, value));
    return sums[value * channels + channel];
  }
};

__device__ inline float reciprocal_std(float var, float eps) { return 1.0f / sqrtf(var + eps); }

// 0 where p <= 0. NaN stays NaN, as in PyTorch.
__device__ inline float relu(float p) { return p <= 0 ? 0.0f : p; }

// Marks a constructor that reads values which `prepare` wrote to shared memory.
struct FromShared {};

// p = (x - mean) * scale + bias. Subtracting the mean first avoids cancellation where the mean is
// large compared with the deviation.
template <int kWidth>
struct Normalisation {
  static constexpr int kRows = 3;

  float mean[kWidth], scale[kWidth], bias[kWidth];

  // Zeros for a thread without channels.
  __device__ Normalisation(const NormPointers& norm, int channel, bool is_channel) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const int c = channel + i;
      mean[i] = scale[i] = bias[i] = 0;
      if (is_channel) compute(norm, c, mean[i], scale[i], bias[i]);
    }
  }

  __device__ Normalisation(FromShared, const float* shared, int channels, int first) {
    load_floats(mean, shared + first);
    load_floats(scale, shared + channels + first);
    load_floats(bias, shared + 2 * channels + first);
  }

  // Fills `shared` [kRows][channels] with all threads of a block.
  static __device__ void prepare(const NormPointers& norm, int channels, float* shared) {
    for (int c = threadIdx.x; c < channels; c += kThreads) {
      compute(norm, c, shared[c], shared[channels + c], shared[2 * channels + c]);
    }
  }

  __device__ float operator()(float x, int i) const { return (x - mean[i]) * scale[i] + bias[i]; }

  // relu(p) of a vector of x, as operands: rounded as PyTorch stores it.
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
  static __device__ void compute(const NormPointers& norm, int at, float& mean, float& scale,
                                 float& bias) {
    float var;
    norm.read_mean_and_var(at, mean, var);
    scale = norm.weight[at] * reciprocal_std(var, norm.eps);
    bias = norm.bias[at];
  }
};

// The coefficients of a fold, a*g + b*(x - mean) + c. In evaluation mode b and c are not used.
template <int kWidth>
struct InputGradient {
  static constexpr int kRows = 4;

  float a[kWidth], b[kWidth], c[kWidth], mean[kWidth];

  // Zeros for a thread without channels.
  __device__ InputGradient(const FoldPointers& fold, int channels, int channel, bool is_channel) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      a[i] = b[i] = c[i] = mean[i] = 0;
      if (is_channel) compute(fold, channels, channel + i, a[i], b[i], c[i], mean[i]);
    }
  }

  __device__ InputGradient(FromShared, const float* shared, int channels, int first) {
    load_floats(a, shared + first);
    load_floats(b, shared + channels + first);
    load_floats(c, shared + 2 * channels + first);
    load_floats(mean, shared + 3 * channels + first);
  }

  // Fills `shared` [kRows][channels] with all threads of a block.
  static __device__ void prepare(const FoldPointers& fold, int channels, float* shared) {
    for (int i = threadIdx.x; i < channels; i += kThreads) {
      compute(fold, channels, i, shared[i], shared[channels + i], shared[2 * channels + i],
              shared[3 * channels + i]);
    }
  }

  // The gradient of a vector, in the dtype of x, from vectors[i] of each tensor. Those of x and
  // skip are read where the fold reads them.
  template <class Y, class OfG, class OfX>
  __device__ Vector<Y, kWidth> unfold(const FoldPointers& fold, int i, const OfG& g, const OfX& x,
                                      const OfX& skip) const {
    float dy[kWidth], more[kWidth];
    g[i].unpack(dy);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) dy[j] *= a[j];
    if (fold.reads_x()) {
      x[i].unpack(more);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) dy[j] += (more[j] - mean[j]) * b[j] + c[j];
    }
    if (fold.skip != nullptr) {
      skip[i].unpack(more);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) dy[j] += more[j];
    }
    Vector<Y, kWidth> gradient;
    gradient.pack(dy);
    return gradient;
  }

 private:
  static __device__ void compute(const FoldPointers& fold, int channels, int at, float& a, float& b,
                                 float& c, float& mean) {
    const float rstd = reciprocal_std(fold.norm.var[at], fold.norm.eps);
    a = fold.norm.weight[at] * rstd;
    b = -a * rstd * (fold.sum(at, 1, channels) * fold.inv_count);
    c = -a * (fold.sum(at, 0, channels) * fold.inv_count);
    mean = fold.norm.mean[at];
  }
};

}  // namespace preact_kernels::cuda
