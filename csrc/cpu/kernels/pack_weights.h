// Weights in the order that products read.
#pragma once

#include "conv_product.h"

PK_BEGIN_ISA

// Whether no value is NaN or infinite.
template <class O>
PK_INLINE bool all_finite(const O* values, int64_t count) {
  using A = Accumulate<O>;
  Vector<A> sum = {};
  int64_t i = 0;
  for (; i + kLanes<A> <= count; i += kLanes<A>) sum += load(values + i) * A(0);
  A total = 0;
  for (; i < count; ++i) total += upcast(values[i]) * A(0);
  for (int lane = 0; lane < kLanes<A>; ++lane) total += sum[lane];
  return total == 0;
}

// Whether a row of an output channel's weights can be read as words of an operand.
template <class T, class O>
PK_INLINE bool has_rows_of_words(const ConvWeight<T>& weight) {
  return std::is_same_v<T, O> && weight.stride_c == 1;
}

// packed[tile of k][tap][c / depth][k in tile][c % depth] = weight[k][c][tap], where depth is
// kDepth, for at most kPackedChannels input channels from `first` on.
template <class T>
void pack(const ConvWeight<T>& weight, const ConvSizes& conv, int64_t in_channels,
          int64_t out_channels, void* packed, int64_t first) {
  using A = Accumulate<T>;
  using O = Operand<T>;
  constexpr int kWords = kLanes<float>, kDepthOfWord = kDepth<O>;
  const int64_t end = std::min(first + kPackedChannels, in_channels);
  for_channel_tiles<A>(out_channels, tile_vectors(conv), [&](auto vectors, int64_t k) PK_LAMBDA {
    constexpr int kWidth = decltype(vectors)::value * kLanes<A>;
    O* tile = static_cast<O*>(packed) + k * conv.taps() * in_channels;
    for (int64_t t = 0; t < conv.taps(); ++t) {
      const T* from = weight.values + weight.taps[t] + k * weight.stride_k;
      O* to = tile + t * in_channels * kWidth;
      int64_t c = first;
      if (has_rows_of_words<T, O>(weight)) {
        constexpr int kSquare = kWords * kDepthOfWord;
        for (; c + kSquare <= end; c += kSquare) {
          for (int i = 0; i < kWidth; i += kWords) {
            FullBits square[kWords];
            for (int j = 0; j < kWords; ++j) {
              __builtin_memcpy(&square[j], from + (i + j) * weight.stride_k + c, sizeof square[j]);
            }
            transpose(square);
            for (int j = 0; j < kWords; ++j) {
              O* row = to + (c + j * kDepthOfWord) * kWidth + i * kDepthOfWord;
              __builtin_memcpy(row, &square[j], sizeof square[j]);
            }
          }
        }
      }
      for (; c < end; ++c) {
        O* row = to + c / kDepth<O> * kDepth<O> * kWidth + c % kDepth<O>;
        for (int i = 0; i < kWidth; ++i) {
          const T value = from[i * weight.stride_k + c * weight.stride_c];
          row[i * kDepth<O>] = rounded_to<O>(upcast(value));
        }
      }
    }
  });
}

PK_END_ISA
