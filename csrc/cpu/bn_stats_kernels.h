// The kernel of bn_stats.cpp.
#pragma once

#include "isa.h"

namespace preact_kernels {

PK_FOR_EACH_ISA(template <class T> void tile_statistics(const T* x, int64_t pixels,
                                                        int64_t channels,
                                                        Accumulate<T>* statistics);)

}  // namespace preact_kernels
