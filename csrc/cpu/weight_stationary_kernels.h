// The kernels of weight_stationary.cpp.
#pragma once

#include "image_groups.h"
#include "isa.h"

namespace preact_kernels {

PK_FOR_EACH_ISA(
    template <class T> int64_t task_channels(const ConvSizes& conv);
    template <class T> int64_t gradient_task_channels();
    template <class T> int64_t packed_channels(const ConvSizes& conv, int64_t in_channels);

    template <class T>
    void fill_activation(const T* x, const Normalisation<Accumulate<T>>& norm,
                         const ConvSizes& conv, const Strip& strip, const Interleaved& operand,
                         const RowPart& part, void* memory);

    template <class T>
    void fill_gradient(const OutputGradient<T>& dy, const ConvSizes& conv, const Strip& strip,
                       const Interleaved& operand, const RowPart& part, void* memory);

    template <class T>
    void fill_row_pairs(const ConvSizes& conv, const Interleaved& operand, const void* gradient,
                        int64_t width, int64_t row, int64_t first, int64_t count, void* pairs);

    template <class T>
    void stationary_output(const ConvForward<T>& op, const StationaryTask<T>& task,
                           Accumulate<T>* statistics);

    template <class T>
    void stationary_input_gradient(const ConvBackward<T>& op, const StationaryTask<T>& task,
                                   double* tile_sums);

    template <class T>
    void stationary_weight_gradient(const ConvSizes& conv, const Strip& strip,
                                    const Interleaved& input, const Interleaved& output,
                                    const void* activation, const void* narrow, int64_t tap,
                                    int64_t channel, int64_t channels, Accumulate<T>* partial);)

}  // namespace preact_kernels
