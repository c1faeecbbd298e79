// The weights of a convolution, packed.
#pragma once

#include "../kernels.h"
#include "pack_weights.h"

PK_BEGIN_ISA

template <class T>
void pack_weights(const ConvWeight<T>& weight, const ConvSizes& conv, int64_t in_channels,
                  int64_t out_channels, void* packed, int64_t first) {
  pack(weight, conv, in_channels, out_channels, packed, first);
}

// Whether no weight is NaN or infinite.
template <class T>
bool is_finite(const void* packed, int64_t count) {
  return all_finite(static_cast<const Operand<T>*>(packed), count);
}

#define PK_INSTANTIATE(T)                             \
  template decltype(pack_weights<T>) pack_weights<T>; \
  template decltype(is_finite<T>) is_finite<T>;
PK_FOR_CONV_DTYPES(PK_INSTANTIATE)

PK_END_ISA
