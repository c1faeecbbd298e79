// The kernels, which kernels/ defines for each instruction set.
#pragma once

#include "depthwise.h"
#include "image_groups.h"
#include "isa.h"

namespace preact_kernels {

PK_FOR_EACH_ISA(
    // activation
    template <class T> void activate(const Activation& activation, T* values, int64_t count);

    template <class A> void multiply_by_derivative(const Activation& activation, const A* p,
                                                   A* gradient, int64_t count);

    // dropout
    template <class T> void range_bits(const T* drawn, uint8_t* bits, int64_t count);

    template <class T> void range_dropout(T* values, const uint8_t* bits,
                                          const Accumulate<T> (*noise)[8], int64_t count);

    // transpose
    template <class W> void transpose_part(const W* in, int64_t in_step, W* out, int64_t out_step,
                                           int64_t rows, int64_t columns);

    // bn_stats
    template <class T>
    void tile_statistics(const T* x, int64_t pixels, int64_t channels, Accumulate<T>* statistics);

    // residual_add
    template <class T> void tile_residual_add(const T* x, const T* branch, T* y, int64_t values);

    // norm_act
    template <class T> void tile_norm_act(const T* x, T* y, int64_t pixels, int64_t channels,
                                          const NormRow<Accumulate<T>>& norm);

    template <class T> void tile_norm_add_act(const T* x, const T* residual, T* y, int64_t pixels,
                                              int64_t channels, const NormRow<Accumulate<T>>& norm);

    template <class T, bool kStore>
    void tile_mask(std::bool_constant<kStore>, const T* dy, const T* x, T* g, int64_t pixels,
                   int64_t channels, const NormRow<Accumulate<T>>& norm, double* sums);

    template <class T, bool kStore>
    void tile_mask_from_y(std::bool_constant<kStore>, const T* dy, const T* x, const T* y, T* g,
                          int64_t pixels, int64_t channels, const NormRow<Accumulate<T>>& norm,
                          double* sums);

    template <class T, bool kMask, bool kHasSkip>
    void tile_input_gradient(std::bool_constant<kMask>, std::bool_constant<kHasSkip>,
                             const GradientPointers<T>& tile, int64_t pixels, int64_t channels,
                             const NormRow<Accumulate<T>>& norm,
                             const GradientRow<Accumulate<T>>& gradient);

    // planes
    template <class T> void range_statistics(const T* x, int64_t count, Accumulate<T>* statistics);

    template <class T> void planes_norm_act(const T* x, T* y, int64_t planes, int64_t pixels,
                                            const NormRow<Accumulate<T>>& norm);

    template <class T> void planes_norm_add_act(const T* x, const T* residual, T* y, int64_t planes,
                                                int64_t pixels, const NormRow<Accumulate<T>>& norm);

    template <class T>
    void planes_mask(const T* dy, const T* x, const T* y, T* g, int64_t planes, int64_t pixels,
                     const NormRow<Accumulate<T>>& norm, double* sums, int64_t stride);

    template <class T>
    void planes_input_gradient(const GradientPointers<T>& tensors, bool activated, int64_t planes,
                               int64_t pixels, const NormRow<Accumulate<T>>& norm,
                               const GradientRow<Accumulate<T>>& row);

    // conv_weights
    template <class T>
    void pack_weights(const ConvWeight<T>& weight, const ConvSizes& conv, int64_t in_channels,
                      int64_t out_channels, void* packed, int64_t first);

    template <class T> bool is_finite(const void* packed, int64_t count);

    template <class T>
    void transform_weights(const void* packed, const ConvSizes& conv, int64_t in_channels,
                           int64_t out_channels, void* transformed, int64_t first,
                           TapSquares<Accumulate<T>>& squares);

    template <class T> bool are_served(const TapSquares<Accumulate<T>>& squares);

    // depthwise
    template <class T>
    void depthwise_weight_sums(const DepthwiseSizes& sizes, const DepthwisePart& part, const T* x,
                               const T* dy, Accumulate<T>* sums);

    // norm_act_conv
    template <class T> void strip_forward(const ConvForward<T>& op, const Strip& strip,
                                          Accumulate<T>* statistics, void* scratch);

    template <class T>
    void strip_backward(const ConvBackward<T>& op, const Strip& strip, double* tile_sums,
                        Accumulate<T>* dweight, void* scratch);

    template <class T> void merge_parts(Accumulate<T>* sums, int64_t parts, int64_t part,
                                        int64_t step, int64_t channels);

    // weight_stationary
    template <class T> int64_t task_channels(const ConvSizes& conv);
    template <class T> int64_t gradient_task_channels();
    template <class T> int64_t packed_channels(const ConvSizes& conv, int64_t in_channels);

    template <class T>
    void fill_activated(const T* x, const Normalisation<Accumulate<T>>& norm, const ConvSizes& conv,
                        const Strip& strip, const Interleaved& operand, const RowPart& part,
                        void* memory);

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
                                    const void* activated, const void* narrow, int64_t tap,
                                    int64_t channel, int64_t channels, Accumulate<T>* partial);)

}  // namespace preact_kernels
