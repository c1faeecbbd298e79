// The kernels of bn_relu_conv_forward.cpp and bn_relu_conv_backward.cpp.
#pragma once

#include "conv_strips.h"
#include "isa.h"

namespace preact_kernels {

PK_FOR_EACH_ISA(template <class T> void strip_forward(const ConvForward<T>& op, const Strip& strip,
                                                      Accumulate<T>* statistics, void* scratch);

                template <class T>
                void strip_backward(const ConvBackward<T>& op, const Strip& strip,
                                    double* tile_sums, Accumulate<T>* dweight, void* scratch);)

}  // namespace preact_kernels
