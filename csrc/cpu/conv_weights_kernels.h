// Weights in the order in which products read them. Included once for each instruction set.

#include "conv_product.h"

// Whether no value is NaN or infinite.
template <class A>
bool all_finite(const A* values, int64_t count) {
  Vector<A> sum = {};
  int64_t i = 0;
  for (; i + kLanes<A> <= count; i += kLanes<A>) sum += load(values + i) * A(0);
  A total = 0;
  for (; i < count; ++i) total += values[i] * A(0);
  for (int lane = 0; lane < kLanes<A>; ++lane) total += sum[lane];
  return total == 0;
}

// packed[block of k][tap][c][k in block] = weight[k][c][tap] for input channel c.
template <class T, class A>
void pack(A* packed, const Conv& conv, int64_t in_channels, int64_t out_channels,
          const ConvWeight<T>& weight, int64_t c) {
  for_vector_blocks<A>(out_channels, tile_vectors(conv), [&](auto vectors, int64_t k) PK_LAMBDA {
    constexpr int kWidth = decltype(vectors)::value * kLanes<A>;
    for (int64_t t = 0; t < conv.taps(); ++t) {
      A* to = packed + k * conv.taps() * in_channels + (t * in_channels + c) * kWidth;
      const T* from = weight.values + weight.taps[t] + c * weight.stride_c + k * weight.stride_k;
      for (int i = 0; i < kWidth; ++i) to[i] = widened(from[i * weight.stride_k]);
    }
  });
}
