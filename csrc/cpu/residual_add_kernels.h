// The kernel of residual_add.cpp.
#pragma once

#include "isa.h"

namespace preact_kernels {

PK_FOR_EACH_ISA(template <class T>
                void tile_residual_add(const T* x, const T* branch, T* y, int64_t values);)

}  // namespace preact_kernels
