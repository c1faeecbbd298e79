// BN-ReLU-Conv of narrow channels, backward: the gradients of input and weight in one kernel, or
// each in its own.
#pragma once

#include "backward_shared.cuh"
#include "channel_statistics.cuh"

namespace preact_kernels::cuda {

// A persistent thread block owns every gridDim.x-th tile of pixels with all channels, in phases:
//   dy = [skip +] A*g + B*(x - mean) + C, stored if it is wanted, and a = relu(p)
//   da[p][c] = the sum over taps and k of dy[p at the opposite tap][k] * weight[k][c][tap]
//   dweight[k][c][tap] = the sum over p of dy[p at the opposite tap][k] * a[p][c]
//   g = [p > 0] * da, sum(g) and sum(g * xhat)
// It computes g and its sums if kInput, and dweight of its tiles if GROUPS > 0. IN and OUT are the
// channels, or 0 if they are not constant.
template <class Types, int C, int GROUPS, bool kInput, int IN, int OUT>
__device__ void norm_act_conv_backward(const NormActConvBackward& conv) {
  using T = typename Types::T;
  using X = typename Types::X;
  using Y = typename Types::Y;
  using Shared = BackwardShared<Types, C>;
  constexpr bool kWeight = GROUPS > 0;
  constexpr int kWidth = kFullWidth<T>;
  constexpr int kTaps = Tile<C>::kTaps;
  constexpr int kVectors = kBackwardVectors<Types, C, GROUPS>;
  constexpr int kOutVectors = C == 0 ? kVectors : kHaloVectors<T, C>;
  constexpr bool kMayMask = kWeight && kTaps > 1;  // a 1x1 convolution reads no padding
  // With two thread blocks per multiprocessor, the sums of nine taps leave few registers.
  constexpr bool kFewRegisters = kMayMask && kBackwardThreadBlocks<Types, C, GROUPS> == 2;
  constexpr int kUnroll = kFewRegisters ? 1 : kVectors;
  const int channels = IN ? IN : conv.in_channels, out_channels = OUT ? OUT : conv.out_channels;
  const int tile_pixels = IN ? backward_pixels<Types>(IN, OUT) : conv.grid.tile_pixels;
  const int pixels = Tile<C>::pixels(tile_pixels);
  const int halo_pixels = Tile<C>::halo_pixels(tile_pixels);
  const int pitch = channels + kWidth, dy_pitch = out_channels + kWidth;
  const Shared shared(tile_pixels, channels, out_channels, conv.tensors, kInput, kWeight);
  unsigned char* memory = dynamic_shared();
  T* weights = reinterpret_cast<T*>(memory + shared.weights);
  T* dy_tile = reinterpret_cast<T*>(memory + shared.dy);
  T* activated = reinterpret_cast<T*>(memory + shared.activated);
  T* da = reinterpret_cast<T*>(memory + shared.da);
  float* norm = reinterpret_cast<float*>(memory + shared.norm);
  float* step = reinterpret_cast<float*>(memory + shared.step);
  const typename Shared::DyAhead dy_ahead(memory + shared.dy_ahead, 0, shared.dy_parts);
  const typename Shared::GAhead g_ahead(memory + shared.dy_ahead, Shared::kDyParts,
                                        shared.dy_parts);
  const typename Shared::DyAhead skip_ahead(memory + shared.dy_ahead, Shared::kSkip,
                                            shared.dy_parts);

  const ThreadColumn in(channels, kWidth), out(out_channels, kWidth);
  // Pointers to the first channel; pointers to the thread's own channel would take registers.
  const X* x = static_cast<const X*>(conv.x);
  T* g = static_cast<T*>(conv.g);
  const bool has_step = conv.step.x != nullptr;
  const bool has_skip = conv.step.skip != nullptr;
  const bool reads_dy_or_x = !has_step || conv.step.reads_x();
  const Y* dy_or_x = static_cast<const Y*>(has_step ? conv.step.x : conv.dy);
  const T* step_g = static_cast<const T*>(conv.dy);
  const Y* skip = static_cast<const Y*>(conv.step.skip);
  WeightGradient<T, C, kWeight ? GROUPS : 1> dweight(out_channels, channels);
  float sum_g[kWidth] = {}, sum_g_x[kWidth] = {};

  // The x of consecutive tiles alternate between two places.
  const auto x_ahead_of = [&](int turn) {
    return typename Shared::XAhead(memory + shared.x_ahead, turn % 2 * Shared::kXParts,
                                   2 * Shared::kXParts);
  };
  const auto index_of = [](int turn) { return int(blockIdx.x + turn * gridDim.x); };
  const auto copy_ahead = [&](int turn) {
    const int index = index_of(turn);
    if (index >= conv.grid.tiles) return;
    const auto x_ahead = x_ahead_of(turn);
    const Tile<C> tile(conv.grid, index);
    if (in.is_active) {
#pragma unroll(kUnroll)
      for (int i = 0; i < kVectors; ++i) {
        const int p = in.lane + i * in.lanes;
        if (p >= pixels) break;
        const int64_t pixel = tile.pixel(p);
        x_ahead.copy(i, x + (pixel * channels + in.channel), pixel >= 0);
      }
    }
    if (out.is_active) {
#pragma unroll(kFewRegisters ? 1 : kOutVectors)
      for (int i = 0; i < kOutVectors; ++i) {
        const int p = out.lane + i * out.lanes;
        if (p >= halo_pixels) break;
        const int64_t pixel = tile.halo_pixel(p), at = pixel * out_channels + out.channel;
        if (reads_dy_or_x) dy_ahead.copy(i, dy_or_x + at, pixel >= 0);
        if (has_step) g_ahead.copy(i, step_g + at, pixel >= 0);
        if (has_skip) skip_ahead.copy(i, skip + at, pixel >= 0);
      }
    }
    cp_async_commit();
  };
  // Short loads come before copies, which would delay them.
  const NormChannel norm_channel(conv.norm, channels);
  NormChannel step_channel(conv.step.norm, has_step ? out_channels : 0);
  if constexpr (kInput) {
    load_weights<T, kTaps>(static_cast<const T*>(conv.weight), weights, out_channels, channels);
  }
  wait_for_predecessors();
  let_dependents_start();
  step_channel.load_sums(conv.step.accumulated);
  copy_ahead(0);
  Normalisation<kWidth>::store(conv.norm, norm_channel, channels, norm);
  InputGradient<kWidth>::store(conv.step, step_channel, out_channels, out_channels, step);
  __syncthreads();

  for (int turn = 0; index_of(turn) < conv.grid.tiles; ++turn) {
    const Tile<C> tile(conv.grid, index_of(turn));
    NonFinite<T> non_finite;
    const auto x_ahead = x_ahead_of(turn);
    cp_async_wait<0>();
    if (in.is_active) {
      const Normalisation<kWidth> in_norm(FromShared{}, norm, channels, in.channel);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int p = in.lane + i * in.lanes;
        if (p >= pixels) break;
        FullVector<T> a{};
        if (tile.pixel(p) >= 0) {
          a = in_norm.template activated<T>(x_ahead[i]);
          if constexpr (kMayMask) non_finite.add(a);
        }
        a.store(activated + p * pitch + in.channel);
      }
    }
    const auto form_dy = [&](auto form) {
#pragma unroll(kFewRegisters ? 1 : C == 0 || kOutVectors > 4 ? 2 : 4)
      for (int i = 0; i < kOutVectors; ++i) {
        const int p = out.lane + i * out.lanes;
        if (p >= halo_pixels) break;
        const int64_t pixel = tile.halo_pixel(p);
        FullVector<T> operand{};
        if (pixel >= 0) {
          const Vector<Y, kWidth> gradient = form(i);
          operand = as_operand<T>(gradient);
          if constexpr (kMayMask) non_finite.add(operand);
          if (conv.whole_dy != nullptr && Tile<C>::is_interior(p)) {
            Y* to = static_cast<Y*>(conv.whole_dy);
            gradient.store(to + (pixel * out_channels + out.channel));
          }
        }
        operand.store(dy_tile + p * dy_pitch + out.channel);
      }
    };
    const auto coefficients = [&] {
      return InputGradient<kWidth>(FromShared{}, step, out_channels, out.channel);
    };
    const auto apply_step = [&](const InputGradient<kWidth>& gradient, int i, const auto& g) {
      return gradient.template apply<Y>(conv.step, i, g, dy_ahead, skip_ahead);
    };
    if (out.is_active) {
      if (has_step) {
        if constexpr (kFewRegisters) {
          form_dy([&](int i) { return apply_step(coefficients(), i, g_ahead); });
        } else {
          const auto gradient = coefficients();
          form_dy([&](int i) { return apply_step(gradient, i, g_ahead); });
        }
      } else {
        form_dy([&](int i) { return dy_ahead[i]; });
      }
    }
    // Both tiles are complete.
    const bool masks = kMayMask ? __syncthreads_or(non_finite.any()) : (__syncthreads(), false);
    copy_ahead(turn + 1);
    if constexpr (kInput) {
      multiply_weights<T, C, true>(dy_tile, weights, pixels, out_channels, channels, da, pitch);
    }
    if constexpr (kWeight) {
      if (kMayMask && masks) {
        dweight.template add<true>(tile, dy_tile, activated, pixels, out_channels, channels);
      } else {
        dweight.template add<false>(tile, dy_tile, activated, pixels, out_channels, channels);
      }
    }
    __syncthreads();  // da is complete, and both tiles may be overwritten
    if (!kInput || !in.is_active) continue;
#pragma unroll(kUnroll)
    for (int i = 0; i < kVectors; ++i) {
      const int p = in.lane + i * in.lanes;
      if (p >= pixels) break;
      const int64_t pixel = tile.pixel(p);
      if (pixel < 0) continue;
      FullVector<T> stored, a;
      stored.load(da + p * pitch + in.channel);
      a.load(activated + p * pitch + in.channel);
      stored = where_nonzero<T>(a, stored);
      stored.store(g + (pixel * channels + in.channel));
      float values[kWidth], of_x[kWidth], mean[kWidth];
      stored.unpack(values);
      x_ahead[i].unpack(of_x);
      load_floats(mean, norm + in.channel);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        sum_g[j] += values[j];
        sum_g_x[j] += values[j] * (of_x[j] - mean[j]);
      }
    }
  }

  if constexpr (kInput) {
    if (in.is_active) {
      float rstd[kWidth];
      Normalisation<kWidth>::load_rstd(rstd, norm, channels, in.channel);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum_g_x[j] *= rstd[j];
    }
  }
  cp_async_wait<0>();  // a thread block without tiles has not waited
  // From here on shared memory has another layout.
  float* scratch = reinterpret_cast<float*>(memory);
  __syncthreads();
  if constexpr (kInput) add_sums(in, channels, sum_g, sum_g_x, conv.sums, scratch);
  if constexpr (kWeight) {
    __syncthreads();
    const int64_t thread_block_weights = int64_t(kTaps) * out_channels * channels;
    dweight.store(out_channels, channels, scratch,
                  conv.partials + blockIdx.x * thread_block_weights);
  }
}

// One convolution: g, and dweight if GROUPS > 0.
template <class Types, int C, int GROUPS, int IN = C, int OUT = C>
__global__ void __launch_bounds__(kThreads, kBackwardThreadBlocks<Types, C, GROUPS>)
    norm_act_conv_backward_kernel(const __grid_constant__ NormActConvBackward conv) {
  norm_act_conv_backward<Types, C, GROUPS, true, IN, OUT>(conv);
}

// The weight gradients of several convolutions.
template <class Types, int C, int GROUPS, int IN = C, int OUT = C>
__global__ void __launch_bounds__(kThreads, (kWeightGradientThreadBlocks<Types, C, GROUPS, IN>))
    norm_act_conv_weight_gradients_kernel(const __grid_constant__ WeightGradients convs) {
  norm_act_conv_backward<Types, C, GROUPS, false, IN, OUT>(convs.of[blockIdx.y]);
}

}  // namespace preact_kernels::cuda
