// Weights in the order in which products read them. Included once for each instruction set.

#include "conv_product.h"

// Whether no packed value is NaN or infinite.
template <class T>
bool all_finite(const ConvWeight<T>&, const void* packed, int64_t count) {
  using A = Accumulate<T>;
  const Operand<T>* values = static_cast<const Operand<T>*>(packed);
  Vector<A> sum = {};
  int64_t i = 0;
  for (; i + kLanes<A> <= count; i += kLanes<A>) sum += load(values + i) * A(0);
  A total = 0;
  for (; i < count; ++i) total += widened(values[i]) * A(0);
  for (int lane = 0; lane < kLanes<A>; ++lane) total += sum[lane];
  return total == 0;
}

// packed[block of k][tap][c / depth][k in block][c % depth] = weight[k][c][tap] for input channel
// c, where `depth` is that of products.
template <class T>
void pack(const ConvWeight<T>& weight, const Conv& conv, int64_t in_channels, int64_t out_channels,
          void* packed, int64_t c) {
  using A = Accumulate<T>;
  using O = Operand<T>;
  for_vector_blocks<A>(out_channels, tile_vectors(conv), [&](auto vectors, int64_t k) PK_LAMBDA {
    constexpr int kWidth = decltype(vectors)::value * kLanes<A>;
    O* block = static_cast<O*>(packed) + k * conv.taps() * in_channels;
    for (int64_t t = 0; t < conv.taps(); ++t) {
      const int64_t row = c / kDepth<O> * kDepth<O>;
      O* to = block + (t * in_channels + row) * kWidth + c % kDepth<O>;
      const T* from = weight.values + weight.taps[t] + c * weight.stride_c + k * weight.stride_k;
      for (int i = 0; i < kWidth; ++i) {
        to[i * kDepth<O>] = narrowed<O>(widened(from[i * weight.stride_k]));
      }
    }
  });
}
