// The numbers of a batch norm, kept in shared memory for a block, and what a thread does with them.
#pragma once

#include "batch_norm.cuh"
#include "conv_tile.cuh"

namespace preact_kernels::cuda {

// A batch norm whose input gradient is still folded, and the gradients that it is made of.
struct Fold {
  const void* z;     // the batch norm's input; null where nothing is folded
  const void* skip;  // what is added to its gradient, or null
  BatchNorm norm;    // without a bias
  InputGradientSums of;
};

// p = (x - mean) * scale + bias of a thread's channels. The mean is subtracted first, here and
// below, so that nothing cancels where it is large beside the deviation.
template <int kWidth>
struct BlockNormalisation {
  static constexpr int kRows = 3;

  float mean[kWidth], scale[kWidth], bias[kWidth];

  // Fills `shared` [kRows][channels] by all threads of a block.
  static __device__ void prepare(const BatchNorm& norm, int channels, float* shared) {
    for (int c = threadIdx.x; c < channels; c += kThreads) {
      shared[c] = norm.mean[c];
      shared[channels + c] = norm.weight[c] * reciprocal_std(norm.var[c], norm.eps);
      shared[2 * channels + c] = norm.bias[c];
    }
  }

  __device__ BlockNormalisation(const float* shared, int channels, int first) {
    load_floats(mean, shared + first);
    load_floats(scale, shared + channels + first);
    load_floats(bias, shared + 2 * channels + first);
  }

  // relu(p) of 16 bytes of x, as operands: rounded as PyTorch stores it. Zero where p <= 0, so that
  // NaN stays.
  template <class T>
  __device__ FullVector<T> activation(FullVector<T> x) const {
    float p[kWidth];
    x.unpack(p);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) p[j] = relu((p[j] - mean[j]) * scale[j] + bias[j]);
    x.pack(p);
    return as_operand<T>(x);
  }
};

// dz = [skip +] a*g + b*(z - mean) + c of a thread's channels. In evaluation mode b and c are zero,
// and z is not read: what is not finite there must not spread.
template <int kWidth>
struct BlockInputGradient {
  static constexpr int kRows = 4;

  float a[kWidth], b[kWidth], c[kWidth], mean[kWidth];

  static __device__ void prepare(const Fold& fold, int channels, float* shared) {
    for (int i = threadIdx.x; i < channels; i += kThreads) {
      const float rstd = reciprocal_std(fold.norm.var[i], fold.norm.eps);
      const float a = fold.norm.weight[i] * rstd;
      shared[i] = a;
      shared[channels + i] = -a * rstd * (fold.of.sums[channels + i] * fold.of.inv_count);
      shared[2 * channels + i] = -a * (fold.of.sums[i] * fold.of.inv_count);
      shared[3 * channels + i] = fold.norm.mean[i];
    }
  }

  __device__ BlockInputGradient(const float* shared, int channels, int first) {
    load_floats(a, shared + first);
    load_floats(b, shared + channels + first);
    load_floats(c, shared + 2 * channels + first);
    load_floats(mean, shared + 3 * channels + first);
  }

  // Of the values at `at`, rounded as PyTorch stores them.
  template <class T>
  __device__ FullVector<T> operator()(const Fold& fold, const T* g, int64_t at) const {
    FullVector<T> vector;
    float dz[kWidth], more[kWidth];
    vector.load(g + at);
    vector.unpack(dz);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) dz[j] *= a[j];
    if (fold.of.inv_count != 0) {
      vector.load(static_cast<const T*>(fold.z) + at);
      vector.unpack(more);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) dz[j] += (more[j] - mean[j]) * b[j] + c[j];
    }
    if (fold.skip != nullptr) {
      vector.load(static_cast<const T*>(fold.skip) + at);
      vector.unpack(more);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) dz[j] += more[j];
    }
    vector.pack(dz);
    return vector;
  }
};

}  // namespace preact_kernels::cuda
