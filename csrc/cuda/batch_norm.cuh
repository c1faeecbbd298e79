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

  // The channels from `first` on.
  __device__ NormPointers from(int64_t first) const {
    NormPointers norm = *this;
    norm.mean += first, norm.var += first, norm.weight += first;
    if (bias != nullptr) norm.bias += first;
    return norm;
  }
};

// The pointers of an AffineStep (tensor_args.h).
struct AffineStepPointers {
  const void* skip;  // or null
  const void* x;     // null without a step
  NormPointers norm;
  const float* sums;         // [2, C]: sum(g), sum(g * xhat)
  float inv_count;           // 0 in evaluation mode: x is not read, and NaN does not spread
  Accumulators accumulated;  // if any, `sums` are computed from these

  __host__ __device__ bool reads_x() const { return inv_count != 0; }
};

__device__ inline float reciprocal_std(float var, float eps) { return 1.0f / sqrtf(var + eps); }

// 0 where p <= 0. NaN stays NaN, as in PyTorch.
__device__ inline float relu(float p) { return p <= 0 ? 0.0f : p; }

// Tag of constructors that read coefficients from shared memory, where each thread of the thread
// block has stored those of its NormChannel.
struct FromShared {};

// Channel threadIdx.x of a norm, and its two sums, in registers: a thread does not wait for these
// loads until it uses the values. A convolution has at most kThreads channels. Only the norm of a
// forward has `moments`.
struct NormChannel {
  bool exists;
  float weight = 0, bias = 0, mean = 0, var = 0;
  ExactSum sums[2] = {};

  // Reads nothing that a kernel of this call writes, so it may come before `wait_for_predecessors`.
  __device__ NormChannel(const NormPointers& norm, int channels)
      : exists(int(threadIdx.x) < channels) {
    if (!exists) return;
    weight = norm.weight[threadIdx.x];
    if (norm.bias != nullptr) bias = norm.bias[threadIdx.x];
    if (norm.moments.words != nullptr) return;
    mean = norm.mean[threadIdx.x], var = norm.var[threadIdx.x];
  }
  __device__ void load_sums(const Accumulators& from) {
    if (!exists || from.words == nullptr) return;
    sums[0].load(from, threadIdx.x, 0), sums[1].load(from, threadIdx.x, 1);
  }
};

// p = (x - mean) * scale + bias, with one rounding after the difference, which avoids cancellation
// where the mean is large compared with the deviation.
template <int kWidth>
struct Normalisation {
  static constexpr int kRows = 4;

  float mean[kWidth], scale[kWidth], bias[kWidth];

  // Every thread of the thread block must call this: each computes the coefficients of one channel.
  // Overwrites shared memory.
  template <int kSteps>
  __device__ Normalisation(const NormPointers& norm, const ThreadRows<kWidth, kSteps>& thread)
      : Normalisation(FromShared{}, stored(norm, thread), thread.block_channels(),
                      thread.is_used ? thread.channel - thread.block_channel : 0) {}

  __device__ Normalisation(FromShared, const float* shared, int channels, int first) {
    load_floats(mean, shared + first);
    load_floats(scale, shared + channels + first);
    load_floats(bias, shared + 2 * channels + first);
  }

  // Fills `shared` [kRows][channels]: mean, scale, bias, 1 / standard deviation.
  static __device__ void store(const NormPointers& norm, const NormChannel& channel, int channels,
                               float* shared) {
    if (!channel.exists) return;
    float mean = channel.mean, var = channel.var;
    if (norm.moments.words != nullptr) {
      read_moments(channel.sums[0], channel.sums[1], norm.pixels, mean, var);
    }
    const float rstd = reciprocal_std(var, norm.eps);
    shared += threadIdx.x;
    shared[0] = mean;
    shared[channels] = channel.weight * rstd;
    shared[2 * channels] = channel.bias;
    shared[3 * channels] = rstd;
  }
  static __device__ void load_rstd(float (&rstd)[kWidth], const float* shared, int channels,
                                   int first) {
    load_floats(rstd, shared + 3 * channels + first);
  }

  __device__ float operator()(float x, int i) const { return fmaf(x - mean[i], scale[i], bias[i]); }

  // p of a vector, rounded to T.
  template <class T>
  __device__ void pre_activations(const float (&x)[kWidth], float (&p)[kWidth]) const {
    Vector<T, kWidth> rounded;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) p[i] = (*this)(x[i], i);
    rounded.pack(p);
    rounded.unpack(p);
  }

  // relu(p) of a vector of x as an operand, rounded as PyTorch stores it.
  template <class T, class X>
  __device__ FullVector<T> activated(const Vector<X, kWidth>& x) const {
    float p[kWidth];
    x.unpack(p);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) p[j] = relu((*this)(p[j], j));
    FullVector<T> a;
    a.pack(p);
    return as_operand<T>(a);
  }

 private:
  template <int kSteps>
  static __device__ const float* stored(const NormPointers& of_all,
                                        const ThreadRows<kWidth, kSteps>& thread) {
    const NormPointers norm = of_all.from(thread.block_channel);
    const int channels = thread.block_channels();
    float* shared = reinterpret_cast<float*>(dynamic_shared());
    store(norm, NormChannel(norm, channels), channels, shared);
    __syncthreads();
    return shared;
  }
};

// Bytes of shared memory that the coefficients of a thread block need.
constexpr size_t kNormBytes = Normalisation<1>::kRows * kThreads * sizeof(float);

// The coefficients of a step, a*g + b*(x - mean) + c. In evaluation mode b and c are not used.
template <int kWidth>
struct InputGradient {
  static constexpr int kRows = 4;

  float a[kWidth], b[kWidth], c[kWidth], mean[kWidth];

  __device__ InputGradient(FromShared, const float* shared, int channels, int first) {
    load_floats(a, shared + first);
    load_floats(b, shared + channels + first);
    load_floats(c, shared + 2 * channels + first);
    load_floats(mean, shared + 3 * channels + first);
  }

  // Fills `shared` [kRows][channels]: a, b, c, mean. `second` is the offset of sum(g * xhat) from
  // sum(g).
  static __device__ void store(const AffineStepPointers& step, const NormChannel& channel,
                               int channels, int second, float* shared) {
    if (!channel.exists) return;
    const bool is_exact = step.accumulated.words != nullptr;
    const float* sums = step.sums + threadIdx.x;
    const float sum_g = is_exact ? float(read_exact(channel.sums[0])) : sums[0];
    const float sum_g_x = is_exact ? float(read_exact(channel.sums[1])) : sums[second];
    const float rstd = reciprocal_std(channel.var, step.norm.eps), a = channel.weight * rstd;
    shared += threadIdx.x;
    shared[0] = a;
    shared[channels] = -a * rstd * (sum_g_x * step.inv_count);
    shared[2 * channels] = -a * (sum_g * step.inv_count);
    shared[3 * channels] = channel.mean;
  }

  // The gradient of vector i in the dtype of x. Reads x and skip only if the step needs them.
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
};

}  // namespace preact_kernels::cuda
