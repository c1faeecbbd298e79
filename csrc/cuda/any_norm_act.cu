// Norm and activation forward and backward, and the gradient of a norm's input: for norms with rows
// and for every activation.

#include "activation.cuh"
#include "any_norm_act.h"
#include "image_rows.cuh"
#include "on_device.h"

namespace preact_kernels {
namespace cuda {

// Pixels at a time. The code of each activation is unrolled over the numbers of all of them.
template <int kWidth>
constexpr int kAnySteps = kWidth == 8 ? 2 : 4;

template <class T>
struct AnyNormActParams {
  ImageRows images;
  const T* x;
  ImageNorm norm;
  KernelActivation activation;
  T* y;
  const T* residual;  // or null
};

constexpr int kAnyForwardThreadBlocks = 3;  // per multiprocessor

// y = act(p), with p rounded to T.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, kAnyForwardThreadBlocks)
    any_norm_act_forward_kernel(AnyNormActParams<T> p) {
  constexpr int kSteps = kAnySteps<kWidth>;
  wait_for_predecessors();
  let_dependents_start();
  const ThreadRows<kWidth, kSteps> thread(p.images.rows);
  const Normalisation<kWidth> norm(p.norm.of(p.images.image()), thread);
  const int64_t begin = p.images.begin();
  thread.for_each([&](int64_t at, int64_t stride, int steps) {
    at += begin;
    Vector<T, kWidth> x[kSteps];
    load_rows(x, p.x + at, stride, steps);
    float values[kSteps][kWidth];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      x[s].unpack(values[s]);
      norm.template pre_activations<T>(values[s], values[s]);
    }
    with_activation<T>(p.activation, [&](const auto& function) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) values[s][i] = function.value(values[s][i]);
      }
    });
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      x[s].pack(values[s]);
      if (s < steps) store_global(x[s], p.y + at + s * stride);
    }
  });
}

constexpr int kAnyResidualSteps = 3;  // pixels at a time; limited by registers

// y = act(p + residual), with p and the sum rounded to T, for ReLU and the identity.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, kAnyForwardThreadBlocks)
    any_norm_act_residual_forward_kernel(AnyNormActParams<T> p) {
  constexpr int kSteps = kAnyResidualSteps;
  wait_for_predecessors();
  let_dependents_start();
  const ThreadRows<kWidth, kSteps> thread(p.images.rows);
  const Normalisation<kWidth> norm(p.norm.of(p.images.image()), thread);
  const int64_t begin = p.images.begin();
  const float least = p.activation.kind == ActivationKind::kRelu ? 0.0f : -INFINITY;
  thread.for_each([&](int64_t at, int64_t stride, int steps) {
    at += begin;
    Vector<T, kWidth> x[kSteps], residual[kSteps];
    load_rows(x, p.x + at, stride, steps);
    load_rows(residual, p.residual + at, stride, steps);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      float value[kWidth], added[kWidth];
      x[s].unpack(value);
      residual[s].unpack(added);
      norm.template pre_activations<T>(value, value);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const float sum = value[i] + added[i];
        value[i] = sum <= least ? least : sum;  // NaN stays NaN
      }
      x[s].pack(value);
      if (s < steps) store_global(x[s], p.y + at + s * stride);
    }
  });
}

template <class T>
struct AnyNormActMaskParams {
  ImageRows images;
  const T* dy;
  const T* x;
  ImageNorm norm;
  KernelActivation activation;
  T* g;  // null if g is not stored
  T* a;  // not used without kStoreA
  GridSums memory;
  float* sums;     // [2, images, channels]: sum(g), sum(g * xhat)
  int64_t second;  // offset of sum(g * xhat) from sum(g)
  const T* y;      // not used without kFromY
};

constexpr int kAnyMaskThreadBlocks = 2;  // per multiprocessor
template <int kWidth>
constexpr int kAnyMaskSteps = kWidth == 8 ? 2 : 3;  // limited by registers
static_assert(kThreadBlockSumBytes * 2 >= kNormBytes);

// 0 where y <= 0, else dy.
template <class T, int kWidth>
__device__ inline Vector<T, kWidth> masked(const Vector<T, kWidth>& dy,
                                           const Vector<T, kWidth>& y) {
  float g[kWidth], activated[kWidth];
  dy.unpack(g);
  y.unpack(activated);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    if (activated[i] <= 0) g[i] = 0;
  }
  Vector<T, kWidth> result;
  result.pack(g);
  return result;
}

// g = dy * act'(p), rounded to T, or dy * [y > 0] if kFromY; and its sums. Stores act(p) if
// kStoreA.
template <class T, int kWidth, bool kStoreA, bool kFromY>
__global__ void __launch_bounds__(kThreads, kAnyMaskThreadBlocks)
    any_norm_act_backward_mask_kernel(AnyNormActMaskParams<T> p) {
  constexpr int kSteps = kAnyMaskSteps<kWidth>;
  wait_for_predecessors();
  let_dependents_start();
  const ThreadRows<kWidth, kSteps> thread(p.images.rows);
  const int64_t image = p.images.image(), begin = p.images.begin();
  const Normalisation<kWidth> norm(p.norm.of(image), thread);
  const unsigned parts = p.images.parts;
  const GridSums memory = p.images.part_of(p.memory, 2 * parts, gridDim.y);
  double sums[2 * kWidth];
  const auto add_tile = [&](int64_t at, int64_t stride, int steps) {
    at += begin;
    Vector<T, kWidth> x[kSteps], dy[kSteps], y[kSteps];
    load_rows(x, p.x + at, stride, steps);
    load_rows(dy, p.dy + at, stride, steps);
    if (kFromY) load_rows(y, p.y + at, stride, steps);
    // dy becomes g, and y becomes act(p).
    if constexpr (!kFromY) {
      with_activation<T>(p.activation, [&](const auto& function) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
          float value[kWidth], g[kWidth];
          x[s].unpack(value);
          dy[s].unpack(g);
          norm.template pre_activations<T>(value, value);
#pragma unroll
          for (int i = 0; i < kWidth; ++i) {
            g[i] = function.gradient(g[i], value[i]);
            if (kStoreA) value[i] = function.value(value[i]);
          }
          dy[s].pack(g);
          if (kStoreA) y[s].pack(value);
        }
      });
    }
    float sum_g[kWidth] = {}, sum_g_x[kWidth] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (s < steps) {
        if (kFromY) dy[s] = masked(dy[s], y[s]);
        if (kStoreA) {
          store_global(y[s], p.a + at + s * stride);
        } else if (p.g != nullptr) {
          store_global(dy[s], p.g + at + s * stride);
        }
        float value[kWidth], g[kWidth];
        x[s].unpack(value);
        dy[s].unpack(g);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          sum_g[i] += g[i];
          sum_g_x[i] += g[i] * (value[i] - norm.mean[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      sums[i] += sum_g[i];
      sums[kWidth + i] += sum_g_x[i];
    }
  };
  p.images.for_each_part([&](unsigned part) {
#pragma unroll
    for (int i = 0; i < 2 * kWidth; ++i) sums[i] = 0;
    thread.for_each(add_tile, part, parts);
    store_part(sums, thread, memory, part);
  });
  if (!sum_over_parts(sums, thread, memory, parts)) return;
  const NormPointers tables = p.norm.of(image);
  float* to = p.sums + image * p.images.rows.channels + thread.channel;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const double rstd = reciprocal_std(tables.var[thread.channel + i], tables.eps);
    to[i] = static_cast<float>(sums[i]);
    to[p.second + i] = static_cast<float>(sums[kWidth + i] * rstd);
  }
}

template <class T>
struct AnyInputGradientParams {
  ImageRows images;
  const T* g;
  const T* x;
  const T* skip;  // or null
  ImageNorm norm;
  KernelActivation activation;
  bool is_activated;
  bool are_pooled;    // whether the sums contain the weight
  const float* sums;  // [2, images, channels]: sum(g), sum(g * xhat)
  int64_t second;     // offset of sum(g * xhat) from sum(g)
  float inv_count;    // 0 in evaluation mode
  T* dx;
};

constexpr int kAnyInputGradientThreadBlocks = 2, kInputGradientRows = 5;

// dx = [skip +] A*g + B*(x - mean) + C; if activated, g is first multiplied by act'(p).
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, kAnyInputGradientThreadBlocks)
    any_norm_input_gradient_kernel(AnyInputGradientParams<T> p) {
  constexpr int kSteps = kAnySteps<kWidth>;
  wait_for_predecessors();
  let_dependents_start();
  const ThreadRows<kWidth, kSteps> thread(p.images.rows);
  const int64_t image = p.images.image(), begin = p.images.begin();
  const NormPointers norm = p.norm.of(image).from(thread.block_channel);
  const int channels = thread.block_channels();
  const NormChannel channel(norm, channels);
  float* shared = reinterpret_cast<float*>(dynamic_shared());  // [kInputGradientRows][channels]
  if (channel.exists) {
    const float* sum = p.sums + image * p.images.rows.channels + thread.block_channel + threadIdx.x;
    const float rstd = reciprocal_std(channel.var, norm.eps), a = channel.weight * rstd;
    const float factor = -(p.are_pooled ? rstd : a);
    float* to = shared + threadIdx.x;
    to[0] = a;
    to[channels] = factor * rstd * (sum[p.second] * p.inv_count);
    to[2 * channels] = factor * (sum[0] * p.inv_count);
    to[3 * channels] = channel.mean;
    to[4 * channels] = p.is_activated ? channel.bias : 0.0f;
  }
  __syncthreads();
  shared += thread.is_used ? thread.channel - thread.block_channel : 0;
  float a[kWidth], b[kWidth], c[kWidth], mean[kWidth], bias[kWidth];
  load_floats(a, shared);
  load_floats(b, shared + channels);
  load_floats(c, shared + 2 * channels);
  load_floats(mean, shared + 3 * channels);
  load_floats(bias, shared + 4 * channels);
  const bool in_training = p.inv_count != 0;
  thread.for_each([&](int64_t at, int64_t stride, int steps) {
    at += begin;
    Vector<T, kWidth> x[kSteps], g[kSteps], skip[kSteps];
    load_rows(g, p.g + at, stride, steps);
    if (p.is_activated || in_training) load_rows(x, p.x + at, stride, steps);
    if (p.skip != nullptr) load_rows(skip, p.skip + at, stride, steps);
    float gradient[kSteps][kWidth], values[kSteps][kWidth];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      g[s].unpack(gradient[s]);
      x[s].unpack(values[s]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        values[s][i] = fmaf(values[s][i] - mean[i], a[i], bias[i]);
      }
      Vector<T, kWidth> rounded;
      rounded.pack(values[s]);
      rounded.unpack(values[s]);
    }
    if (p.is_activated) {
      with_activation<T>(p.activation, [&](const auto& function) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
#pragma unroll
          for (int i = 0; i < kWidth; ++i) {
            gradient[s][i] = function.gradient(gradient[s][i], values[s][i]);
          }
        }
      });
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      float value[kWidth];
      x[s].unpack(value);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        gradient[s][i] *= a[i];
        if (in_training) gradient[s][i] += fmaf(value[i] - mean[i], b[i], c[i]);
      }
      if (p.skip != nullptr) {
        skip[s].unpack(value);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) gradient[s][i] += value[i];
      }
      g[s].pack(gradient[s]);
      if (s < steps) store_global(g[s], p.dx + at + s * stride);
    }
  });
}

}  // namespace cuda

using namespace cuda;

namespace {

int row_stride(const Tensor& table) {
  return table.dim() == 2 ? static_cast<int>(table.sizes()[1]) : 0;
}

ImageNorm image_norm(const Norm& norm) {
  return {pointers(norm),
          {row_stride(norm.mean), row_stride(norm.var), row_stride(norm.weight),
           norm.bias.has_value() ? row_stride(*norm.bias) : 0}};
}

template <class T, int kWidth, bool kResidual>
constexpr auto forward_kernel() {
  if constexpr (kResidual) {
    return any_norm_act_residual_forward_kernel<T, kWidth>;
  } else {
    return any_norm_act_forward_kernel<T, kWidth>;
  }
}

}  // namespace

// In each launch a thread block owns some channels of one image, in a grid-stride loop over its
// tiles of pixels.

void launch_any_norm_act_forward(const ImageSizes& size, const Tensor& x, const Norm& norm,
                                 const Tensor* residual, const Tensor& y) {
  const OnDeviceOf on(x);
  const auto launch_as = [&](auto has_residual, auto value) {
    using T = decltype(value);
    constexpr bool kResidual = decltype(has_residual)::value;
    AnyNormActParams<T> params{{},
                               data<T>(x),
                               image_norm(norm),
                               kernel_activation(norm.activation),
                               mutable_data<T>(y),
                               kResidual ? data<T>(*residual) : nullptr};
    const auto launch_with = [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      constexpr int kSteps = kResidual ? kAnyResidualSteps : kAnySteps<kWidth>;
      const ImageGrid grid =
          grid_for_images(size, norm.has_rows(), kWidth, kSteps, 32, kAnyForwardThreadBlocks);
      grid.for_each_launch([&](const ImageRows& images, dim3 thread_blocks) {
        params.images = images;
        launch("norm_act_forward", forward_kernel<T, kWidth, kResidual>(), thread_blocks, kThreads,
               kNormBytes, on.stream, params, LaunchKind::kDependent);
      });
    };
    with_width<T>(launch_with, size.channels, params.x, params.residual, params.y);
  };
  for_dtype(x, [&](auto value) {
    residual != nullptr ? launch_as(std::true_type{}, value) : launch_as(std::false_type{}, value);
  });
}

void launch_any_norm_act_backward_mask(const ImageSizes& size, const Tensor& dy, const Tensor& x,
                                       const Norm& norm, const Tensor* y, const Tensor* g,
                                       const Tensor* a, const Tensor& sums) {
  const OnDeviceOf on(x);
  const bool has_rows = norm.has_rows();
  const auto launch_as = [&](auto stores_a, auto is_from_y, auto value) {
    using T = decltype(value);
    constexpr bool kStoreA = decltype(stores_a)::value, kFromY = decltype(is_from_y)::value;
    AnyNormActMaskParams<T> params{{},
                                   data<T>(dy),
                                   data<T>(x),
                                   image_norm(norm),
                                   kernel_activation(norm.activation),
                                   g != nullptr ? mutable_data<T>(*g) : nullptr,
                                   kStoreA ? mutable_data<T>(*a) : nullptr,
                                   {},
                                   mutable_data<float>(sums),
                                   sums.numel() / 2,
                                   kFromY ? data<T>(*y) : nullptr};
    const auto launch_with = [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const ImageGrid grid = grid_for_image_sums(size, has_rows, kWidth, kAnyMaskSteps<kWidth>, 8,
                                                 kAnyMaskThreadBlocks);
      const OwnedGridSums memory(x, grid.images, 2 * grid.parts, grid.thread_blocks.y,
                                 size.channels, on.stream);
      params.memory = memory.sums;
      grid.for_each_launch([&](const ImageRows& images, dim3 thread_blocks) {
        params.images = images;
        launch("norm_act_backward_mask",
               any_norm_act_backward_mask_kernel<T, kWidth, kStoreA, kFromY>, thread_blocks,
               kThreads, kThreadBlockSumBytes * 2 * kWidth, on.stream, params);
      });
    };
    constexpr int kMost = kStoreA ? 4 : kFullWidth<T>;  // limited by registers
    with_width<T, kMost>(launch_with, size.channels, params.dy, params.x, params.y, params.g,
                         params.a);
  };
  for_dtype(x, [&](auto value) {
    constexpr std::true_type yes;
    constexpr std::false_type no;
    y != nullptr   ? launch_as(no, yes, value)
    : a != nullptr ? launch_as(yes, no, value)
                   : launch_as(no, no, value);
  });
}

void launch_any_norm_input_gradient(const ImageSizes& size, const Gradient& gradient,
                                    bool activated, const Tensor& dx) {
  const AffineStep& step = *gradient.step;
  const OnDeviceOf on(step.x);
  for_dtype(step.x, [&](auto value) {
    using T = decltype(value);
    const bool has_rows = step.has_rows();
    AnyInputGradientParams<T> params{{},
                                     data<T>(gradient.g),
                                     data<T>(step.x),
                                     data<T>(step.skip),
                                     image_norm(step.norm),
                                     kernel_activation(step.norm.activation),
                                     activated,
                                     has_rows,
                                     data<float>(step.sums),
                                     step.sums.numel() / 2,
                                     static_cast<float>(step.inv_count),
                                     mutable_data<T>(dx)};
    const auto launch_with = [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const ImageGrid grid = grid_for_images(size, has_rows, kWidth, kAnySteps<kWidth>, 32,
                                             kAnyInputGradientThreadBlocks);
      grid.for_each_launch([&](const ImageRows& images, dim3 thread_blocks) {
        params.images = images;
        launch("norm_input_gradient", any_norm_input_gradient_kernel<T, kWidth>, thread_blocks,
               kThreads, kInputGradientRows * kThreads * sizeof(float), on.stream, params,
               LaunchKind::kDependent);
      });
    };
    with_width<T>(launch_with, size.channels, params.g, params.x, params.skip, params.dx);
  });
}

}  // namespace preact_kernels
