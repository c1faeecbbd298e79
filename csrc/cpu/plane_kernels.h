// The kernels for planes, which kernels/planes.cpp defines for each instruction set.
#pragma once

#include "batch_norm.h"
#include "isa.h"

namespace preact_kernels {

PK_FOR_EACH_ISA(
    template <class T> void range_statistics(const T* x, int64_t count, Accumulate<T>* statistics);

    template <class T> void planes_norm_act(const T* x, T* y, int64_t planes, int64_t pixels,
                                            const NormRow<Accumulate<T>>& norm);

    template <class T>
    void planes_mask(const T* dy, const T* x, T* g, int64_t planes, int64_t pixels,
                     const NormRow<Accumulate<T>>& norm, double* sums, int64_t stride);

    template <class T>
    void planes_input_gradient(const GradientPointers<T>& tensors, bool activated, int64_t planes,
                               int64_t pixels, const NormRow<Accumulate<T>>& norm,
                               const GradientRow<Accumulate<T>>& row);)

}  // namespace preact_kernels
