// The kernels of bn_relu.cpp.
#pragma once

#include "batch_norm.h"
#include "isa.h"

namespace preact_kernels {

PK_FOR_EACH_ISA(template <class T>
                void tile_bn_relu(const T* x, T* y, int64_t pixels, int64_t channels,
                                  const Normalisation<Accumulate<T>>& norm);

                template <class T, bool kStore>
                void tile_mask(std::bool_constant<kStore>, const T* dy, const T* x, T* g,
                               int64_t pixels, int64_t channels,
                               const Normalisation<Accumulate<T>>& norm, double* sums);

                template <class T, bool kMask, bool kHasSkip>
                void tile_input_gradient(std::bool_constant<kMask>, std::bool_constant<kHasSkip>,
                                         const GradientPointers<T>& tile, int64_t pixels,
                                         int64_t channels, const Normalisation<Accumulate<T>>& norm,
                                         const InputGradient<Accumulate<T>>& gradient);)

}  // namespace preact_kernels
