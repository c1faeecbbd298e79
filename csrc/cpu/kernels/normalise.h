// Norm and activation of some pixels.
#pragma once

#include "../kernels.h"
#include "simd.h"

PK_BEGIN_ISA

// Mean, scale and bias of the channels that some vectors cover.
template <class A, int kVectors>
struct NormVectors {
  Vector<A> mean[kVectors], scale[kVectors], bias[kVectors];

  template <class Lanes>
  PK_INLINE NormVectors(const NormRow<A>& norm, int64_t channel, Lanes lanes, bool has_bias) {
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = channel + v * kLanes<A>;
      mean[v] = load(norm.mean + at, lanes);
      scale[v] = load(norm.scale + at, lanes);
      bias[v] = has_bias ? load(norm.bias + at, lanes) : Vector<A>{};
    }
  }
};

// y = act(p) for p = (x - mean) * scale + bias. The pixels of y are `step` values apart.
template <class T, class Y, class A>
PK_INLINE void normalise(const T* x, Y* y, int64_t step, int64_t pixels, int64_t channels,
                         const NormRow<A>& norm) {
  const auto run = [&](auto is_relu) PK_LAMBDA {
    for_channel_vectors<A>(channels, [&](auto vectors, int64_t c, auto lanes) PK_LAMBDA {
      constexpr int kVectors = decltype(vectors)::value;
      const NormVectors<A, kVectors> n(norm, c, lanes, true);
      for (int64_t p = 0; p < pixels; ++p) {
        for (int v = 0; v < kVectors; ++v) {
          const int64_t at = c + v * kLanes<A>;
          const Vector<A> d = load(x + p * channels + at, lanes) - n.mean[v];
          const Vector<A> result = d * n.scale[v] + n.bias[v];
          if constexpr (decltype(is_relu)::value) {
            store(y + p * step + at, relu(result), lanes);
          } else {  // rounded to the type of x first
            store(y + p * step + at, as_stored(x, result), lanes);
          }
        }
      }
    });
  };
  if (norm.activation.kind == ActivationKind::kRelu) return run(std::true_type{});
  run(std::false_type{});
  if (step == channels) return activate(norm.activation, y, pixels * channels);
  for (int64_t p = 0; p < pixels; ++p) activate(norm.activation, y + p * step, channels);
}

PK_END_ISA
