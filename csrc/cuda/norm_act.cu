// Norm and ReLU forward and backward, and the gradient of a norm's input, without rows.

#include "any_norm_act.h"
#include "batch_norm.cuh"
#include "on_device.h"

namespace preact_kernels {
namespace cuda {

template <class T>
struct NormActParams {
  PixelRows rows;
  const T* x;
  NormPointers norm;
  T* y;
  const T* residual;  // not used without kResidual
};

constexpr int kNormActSteps = 4,
              kNormActThreadBlocks = 3;  // pixels at a time, thread blocks per multiprocessor

// y = relu(p), with p rounded to T; if kResidual, y = relu(p + residual), with the sum rounded too.
template <class T, int kWidth, bool kResidual>
__global__ void __launch_bounds__(kThreads, kNormActThreadBlocks)
    norm_act_forward_kernel(NormActParams<T> p) {
  constexpr int kSteps = kNormActSteps;
  wait_for_predecessors();
  let_dependents_start();
  const ThreadRows<kWidth, kSteps> thread(p.rows);
  const Normalisation<kWidth> norm(p.norm, thread);
  thread.for_each([&](int64_t at, int64_t stride, int steps) {
    Vector<T, kWidth> x[kSteps], residual[kSteps];
    load_rows(x, p.x + at, stride, steps);
    if (kResidual) load_rows(residual, p.residual + at, stride, steps);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      float value[kWidth], added[kWidth];
      x[s].unpack(value);
      if (kResidual) {
        residual[s].unpack(added);
        norm.template pre_activations<T>(value, value);
      }
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        value[i] = relu(kResidual ? value[i] + added[i] : norm(value[i], i));
      }
      x[s].pack(value);
      if (s < steps) store_global(x[s], p.y + at + s * stride);
    }
  });
}

template <class T>
struct NormActMaskParams {
  PixelRows rows;
  const T* dy;
  const T* x;
  NormPointers norm;
  T* g;  // not used without kStoreG
  T* a;  // not used without kStoreA
  GridSums memory;
  float* sums;  // [2, channels]: sum(g), sum(g * xhat)
  const T* y;   // not used without kFromY
};

constexpr int kMaskSteps = 3, kMaskThreadBlocks = 2;  // limited by registers
static_assert(kThreadBlockSumBytes * 2 >= kNormBytes);

// g = dy * [p > 0], or dy * [y > 0] if kFromY, and its sums. Stores g if kStoreG, and relu(p) if
// kStoreA.
template <class T, int kWidth, bool kStoreG, bool kStoreA, bool kFromY>
__global__ void __launch_bounds__(kThreads, kMaskThreadBlocks)
    norm_act_backward_mask_kernel(NormActMaskParams<T> p) {
  constexpr int kSteps = kMaskSteps;
  wait_for_predecessors();
  let_dependents_start();
  const ThreadRows<kWidth, kSteps> thread(p.rows);
  const Normalisation<kWidth> norm(p.norm, thread);
  double sums[2 * kWidth] = {};
  thread.for_each([&](int64_t at, int64_t stride, int steps) {
    Vector<T, kWidth> x[kSteps], dy[kSteps], y[kSteps];
    load_rows(x, p.x + at, stride, steps);
    load_rows(dy, p.dy + at, stride, steps);
    if (kFromY) load_rows(y, p.y + at, stride, steps);
    float sum_g[kWidth] = {}, sum_g_x[kWidth] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (s < steps) {
        float value[kWidth], g[kWidth], activated[kWidth];
        x[s].unpack(value);
        dy[s].unpack(g);
        if (kFromY) {
          y[s].unpack(activated);
        } else {
          norm.template pre_activations<T>(value, activated);
        }
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          if (activated[i] <= 0) g[i] = activated[i] = 0;
          sum_g[i] += g[i];
          sum_g_x[i] += g[i] * (value[i] - norm.mean[i]);
        }
        if (kStoreG) {
          dy[s].pack(g);
          store_global(dy[s], p.g + at + s * stride);
        }
        if (kStoreA) {
          x[s].pack(activated);
          store_global(x[s], p.a + at + s * stride);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      sums[i] += sum_g[i];
      sums[kWidth + i] += sum_g_x[i];
    }
  });
  if (!sum_over_grid(sums, thread, p.memory)) return;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const int channel = thread.channel + i;
    const double rstd = reciprocal_std(p.norm.var[channel], p.norm.eps);
    p.sums[channel] = static_cast<float>(sums[i]);
    p.sums[p.rows.channels + channel] = static_cast<float>(sums[kWidth + i] * rstd);
  }
}

template <class T>
struct NormInputGradientParams {
  PixelRows rows;
  const T* g;
  AffineStepPointers step;  // has a skip if kHasSkip, and the norm's bias if kMask
  T* dx;
};

constexpr int kInputGradientSteps = 4, kInputGradientThreadBlocks = 2;

constexpr int kInputGradientRows = InputGradient<1>::kRows + 1;  // with the bias

// dx = [skip +] A*g + B*(x - mean) + C; if kMask, g is first masked by [p > 0].
template <class T, int kWidth, bool kMask, bool kHasSkip>
__global__ void __launch_bounds__(kThreads, kInputGradientThreadBlocks)
    norm_input_gradient_kernel(NormInputGradientParams<T> p) {
  constexpr int kSteps = kInputGradientSteps;
  wait_for_predecessors();
  let_dependents_start();
  const ThreadRows<kWidth, kSteps> thread(p.rows);
  AffineStepPointers step = p.step;
  step.norm = step.norm.from(thread.block_channel), step.sums += thread.block_channel;
  const int channels = thread.block_channels();
  const NormChannel channel(step.norm, channels);
  float* shared = reinterpret_cast<float*>(dynamic_shared());  // [kInputGradientRows][channels]
  float* shared_bias = shared + InputGradient<kWidth>::kRows * channels;
  InputGradient<kWidth>::store(step, channel, channels, p.rows.channels, shared);
  if (channel.exists) shared_bias[threadIdx.x] = channel.bias;
  __syncthreads();
  const int first = thread.is_used ? thread.channel - thread.block_channel : 0;
  const InputGradient<kWidth> coefficients(FromShared{}, shared, channels, first);
  float bias[kWidth] = {};
  if (kMask) load_floats(bias, shared_bias + first);
  const bool in_training = p.step.inv_count != 0;
  const T* from = static_cast<const T*>(p.step.x);
  thread.for_each([&](int64_t at, int64_t stride, int steps) {
    Vector<T, kWidth> x[kSteps], g[kSteps], skip[kSteps];
    load_rows(g, p.g + at, stride, steps);
    if (kMask || in_training) load_rows(x, from + at, stride, steps);
    if (kHasSkip) load_rows(skip, static_cast<const T*>(p.step.skip) + at, stride, steps);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      float value[kWidth], gradient[kWidth], added[kWidth], activated[kWidth];
      x[s].unpack(value);
      g[s].unpack(gradient);
      if (kHasSkip) skip[s].unpack(added);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        activated[i] = fmaf(value[i] - coefficients.mean[i], coefficients.a[i], bias[i]);
      }
      Vector<T, kWidth> rounded;
      rounded.pack(activated);
      rounded.unpack(activated);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float centred = value[i] - coefficients.mean[i];
        if (kMask && activated[i] <= 0) gradient[i] = 0;
        gradient[i] *= coefficients.a[i];
        if (in_training) gradient[i] += centred * coefficients.b[i] + coefficients.c[i];
        if (kHasSkip) gradient[i] += added[i];
      }
      g[s].pack(gradient);
      if (s < steps) store_global(g[s], p.dx + at + s * stride);
    }
  });
}

}  // namespace cuda

using namespace cuda;

namespace {

bool is_relu_without_rows(const Norm& norm) {
  return norm.activation.kind == ActivationKind::kRelu && !norm.has_rows();
}

// Of y, g and a, the tensors that the kernel does not use are null.
template <bool kStoreG, bool kStoreA, bool kFromY>
void launch_mask(const ImageSizes& size, const Tensor& dy, const Tensor& x, const Norm& norm,
                 const Tensor* y, const Tensor* g, const Tensor* a, const Tensor& sums) {
  const OnDeviceOf on(x);
  for_dtype(x, [&](auto value) {
    using T = decltype(value);
    NormActMaskParams<T> params{{},
                                data<T>(dy),
                                data<T>(x),
                                pointers(norm),
                                kStoreG ? mutable_data<T>(*g) : nullptr,
                                kStoreA ? mutable_data<T>(*a) : nullptr,
                                {},
                                mutable_data<float>(sums),
                                kFromY ? data<T>(*y) : nullptr};
    const auto launch_with = [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const Grid grid = grid_for(size, kWidth, kMaskSteps, 8, kMaskThreadBlocks);
      const OwnedGridSums memory(x, grid.thread_blocks, size.channels, on.stream);
      params.rows = grid.rows;
      params.memory = memory.sums;
      launch("norm_act_backward_mask",
             norm_act_backward_mask_kernel<T, kWidth, kStoreG, kStoreA, kFromY>, grid.thread_blocks,
             kThreads, kThreadBlockSumBytes * 2 * kWidth, on.stream, params);
    };
    with_width<T>(launch_with, size.channels, params.dy, params.x, params.y, params.g, params.a);
  });
}

}  // namespace

// In each launch a thread block owns some channels, in a grid-stride loop over tiles of pixels.

void launch_norm_act_forward(const ImageSizes& size, const Tensor& x, const Norm& norm,
                             const Tensor* residual, const Tensor& y) {
  if (!is_relu_without_rows(norm)) return launch_any_norm_act_forward(size, x, norm, residual, y);
  const OnDeviceOf on(x);
  const auto launch_as = [&](auto has_residual, auto value) {
    using T = decltype(value);
    constexpr bool kResidual = decltype(has_residual)::value;
    const T* added = kResidual ? data<T>(*residual) : nullptr;
    NormActParams<T> params{{}, data<T>(x), pointers(norm), mutable_data<T>(y), added};
    const auto launch_with = [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const Grid grid = grid_for(size, kWidth, kNormActSteps, 32, kNormActThreadBlocks);
      params.rows = grid.rows;
      launch("norm_act_forward", norm_act_forward_kernel<T, kWidth, kResidual>, grid.thread_blocks,
             kThreads, kNormBytes, on.stream, params, LaunchKind::kDependent);
    };
    with_width<T>(launch_with, size.channels, params.x, params.residual, params.y);
  };
  for_dtype(x, [&](auto value) {
    residual != nullptr ? launch_as(std::true_type{}, value) : launch_as(std::false_type{}, value);
  });
}

// A thread block has few channels: the last thread block adds few partial sums.
void launch_norm_act_backward_mask(const ImageSizes& size, const Tensor& dy, const Tensor& x,
                                   const Norm& norm, const Tensor* y, const Tensor* g,
                                   const Tensor& sums) {
  if (!is_relu_without_rows(norm)) {
    return launch_any_norm_act_backward_mask(size, dy, x, norm, y, g, nullptr, sums);
  }
  if (y != nullptr) {
    g != nullptr ? launch_mask<true, false, true>(size, dy, x, norm, y, g, nullptr, sums)
                 : launch_mask<false, false, true>(size, dy, x, norm, y, g, nullptr, sums);
  } else {
    g != nullptr ? launch_mask<true, false, false>(size, dy, x, norm, y, g, nullptr, sums)
                 : launch_mask<false, false, false>(size, dy, x, norm, y, g, nullptr, sums);
  }
}

void launch_norm_act_recompute(const ImageSizes& size, const Tensor& dy, const Tensor& x,
                               const Norm& norm, const Tensor& a, const Tensor& sums) {
  if (!is_relu_without_rows(norm)) {
    return launch_any_norm_act_backward_mask(size, dy, x, norm, nullptr, nullptr, &a, sums);
  }
  launch_mask<false, true, false>(size, dy, x, norm, nullptr, nullptr, &a, sums);
}

void launch_norm_input_gradient(const ImageSizes& size, const Gradient& gradient, bool activated,
                                const Tensor& dx) {
  const AffineStep& step = *gradient.step;
  const bool is_relu = step.norm.activation.kind == ActivationKind::kRelu;
  if (step.has_rows() || (activated && !is_relu)) {
    return launch_any_norm_input_gradient(size, gradient, activated, dx);
  }
  const OnDeviceOf on(step.x);
  const auto launch_as = [&](auto masks, auto has_skip, auto value) {
    using T = decltype(value);
    constexpr bool kMask = decltype(masks)::value, kHasSkip = decltype(has_skip)::value;
    NormInputGradientParams<T> params{{}, data<T>(gradient.g), pointers(step), mutable_data<T>(dx)};
    const auto launch_with = [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const Grid grid = grid_for(size, kWidth, kInputGradientSteps, 32, kInputGradientThreadBlocks);
      params.rows = grid.rows;
      launch("norm_input_gradient", norm_input_gradient_kernel<T, kWidth, kMask, kHasSkip>,
             grid.thread_blocks, kThreads, kInputGradientRows * kThreads * sizeof(float), on.stream,
             params, LaunchKind::kDependent);
    };
    with_width<T>(launch_with, size.channels, params.step.skip, params.g, params.step.x, params.dx);
  };
  for_dtype(step.x, [&](auto value) {
    constexpr std::true_type yes;
    constexpr std::false_type no;
    if (step.skip.has_value()) {
      activated ? launch_as(yes, yes, value) : launch_as(no, yes, value);
    } else {
      activated ? launch_as(yes, no, value) : launch_as(no, no, value);
    }
  });
}

}  // namespace preact_kernels
