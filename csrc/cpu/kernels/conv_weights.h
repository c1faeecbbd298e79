// The weights of a convolution, packed.
#pragma once

#include "../conv_weights_kernels.h"
#include "pack_weights.h"

PK_BEGIN_ISA

// Whether no weight is NaN or infinite.
template <class T>
bool is_finite(const void* packed, int64_t count) {
  return all_finite(static_cast<const Operand<T>*>(packed), count);
}

#define PK_INSTANTIATE(T)             \
  template decltype(pack<T>) pack<T>; \
  template decltype(is_finite<T>) is_finite<T>;
PK_FOR_CONV_DTYPES(PK_INSTANTIATE)

PK_END_ISA
