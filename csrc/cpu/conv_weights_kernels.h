// The kernels of conv_weights.cpp.
#pragma once

#include "conv_strips.h"
#include "isa.h"

namespace preact_kernels {

PK_FOR_EACH_ISA(template <class T>
                void pack(const ConvWeight<T>& weight, const ConvSizes& conv, int64_t in_channels,
                          int64_t out_channels, void* packed, int64_t first);

                template <class T> bool is_finite(const void* packed, int64_t count);)

}  // namespace preact_kernels
