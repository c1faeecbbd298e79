// The weights of a convolution, packed.

#include "../kernels.h"
#include "pack_weights.h"
#include "winograd.h"

PK_BEGIN_ISA

template <class T>
void pack_weights(const ConvWeight<T>& weight, const ConvSizes& conv, int64_t in_channels,
                  int64_t out_channels, void* packed, int64_t first) {
  pack(weight, conv, in_channels, out_channels, packed, first);
}

template <class T>
bool is_finite(const void* packed, int64_t count) {
  return all_finite(static_cast<const Operand<T>*>(packed), count);
}

// Transforms a group of packed weights for kernels/winograd.h, and sums up their squares.
template <class T>
void transform_weights(const void* packed, const ConvSizes& conv, int64_t in_channels,
                       int64_t out_channels, void* transformed, int64_t first,
                       TapSquares<Accumulate<T>>& squares) {
  using O = Operand<T>;
  if constexpr (kHasWinograd<O>) {
    transform_group(static_cast<const O*>(packed), conv, in_channels, out_channels,
                    static_cast<O*>(transformed), first,
                    std::min(first + kPackedChannels, in_channels), squares);
  }
}

template <class T>
bool are_served(const TapSquares<Accumulate<T>>& squares) {
  return are_weights_served(squares);
}

#define PK_INSTANTIATE(T)                                       \
  template decltype(pack_weights<T>) pack_weights<T>;           \
  template decltype(is_finite<T>) is_finite<T>;                 \
  template decltype(transform_weights<T>) transform_weights<T>; \
  template decltype(are_served<T>) are_served<T>;
PK_FOR_CONV_DTYPES(PK_INSTANTIATE)

PK_END_ISA
