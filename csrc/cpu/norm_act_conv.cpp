#include <cstring>

#include "conv_weights.h"
#include "dtypes.h"
#include "kernels.h"
#include "parallel.h"
#include "weight_stationary.h"

namespace preact_kernels {

namespace {

// The gradient of a weight [K, C, R, S], from partial gradients [tap][narrow][wide], each over a
// part of the strips. With kernels/winograd.h, its positions follow the taps. The input channels
// are `wide` if the kernel has several taps (dy stays in place and the input is shifted), if they
// are as many as the output channels or more, or if they fill the vectors of a tile: rows are then
// contiguous in an NHWC weight. Else the output channels are `wide`.
template <class T>
struct WeightGradient {
  using A = Accumulate<T>;
  const ConvSizes& conv;
  const Tensor& out;
  const bool input_last;
  const int64_t positions, weights, parts;
  A* partials;

  WeightGradient(const ConvSizes& conv, const Tensor& out, int64_t strips)
      : conv(conv),
        out(out),
        input_last(conv.taps() > 1 || conv.in_channels >= conv.out_channels ||
                   conv.in_channels * int64_t(sizeof(A)) >= 4 * vector_bytes()),
        positions(conv.taps() + (has_winograd<T>(conv) ? Winograd::kPositions : 0)),
        weights(positions * conv.in_channels * conv.out_channels),
        parts(part_count(strips)),
        partials(thread_buffer<A, Use::kWeightGradients>(parts * weights)) {}

  // More parts than threads balance the load, if the partial gradients stay in the caches.
  int64_t part_count(int64_t strips) const {
    constexpr int64_t kMostValues = 128 * 1024;
    const int64_t threads = torch::stable::get_num_threads();
    return std::min(strips, threads * std::clamp<int64_t>(kMostValues / (weights * threads), 1, 4));
  }

  A* cleared(int64_t part) const {
    A* partial = partials + part * weights;
    std::memset(partial, 0, weights * sizeof(A));
    return partial;
  }

  // out = the sum over parts, in order.
  void merge() const {
    const int64_t columns = input_last ? conv.in_channels : conv.out_channels;
    const int64_t rows = input_last ? conv.out_channels : conv.in_channels;
    const ConvWeight<T> layout = memory_of<T>(out, !input_last);  // layout of [rows][columns]
    T* first = mutable_data<T>(out);
    for_rows(rows, positions * columns, [&](int64_t row) {
      A* sums = partials + row * columns;
      const bool has_positions = positions > conv.taps();
      if (has_positions) {
        PK_CALL_PRODUCT(T, merge_parts<T>, sums, parts, weights, rows * columns, columns);
      }
      for (int64_t tap = 0; tap < conv.taps(); ++tap) {
        A* sum = sums + tap * rows * columns;
        if (!has_positions) {
          for (int64_t part = 1; part < parts; ++part) {
            const A* partial = sum + part * weights;
            for (int64_t c = 0; c < columns; ++c) sum[c] += partial[c];
          }
        }
        T* to =
            first + layout.taps[input_last ? tap : conv.taps() - 1 - tap] + row * layout.stride_k;
        store_weights(to, layout.stride_c, sum, columns);
      }
    });
  }
};

}  // namespace

void launch_norm_act_conv_forward(const Unit& unit, const Inputs& inputs, const Epilogue& epilogue,
                                  const Output& output) {
  const ConvSizes& conv = unit.conv;
  const Statistics& of_y = output.statistics;
  for_single_dtype(unit.dtypes.products, [&](auto value) {
    using T = decltype(value);
    using A = Accumulate<T>;
    const Normalisation<A> normalisation(inputs.norm, conv.in_channels);
    const bool stationary = is_forward_stationary(conv, has_winograd<T>(conv));
    const ConvForward<T> op{
        conv,
        data<T>(inputs.x),
        normalisation,
        stationary ? PackedWeights{} : packed_weights<T>(conv, inputs.conv_weight, false),
        data<T>(epilogue.conv_bias),
        data<T>(epilogue.residual),
        mutable_data<T>(output.y)};
    if (stationary) return stationary_forward(op, inputs.conv_weight, of_y);
    const Strips strips(conv, normalisation.has_rows);
    TileStatistics<A> statistics(of_y.are_wanted ? strips.tiles() : 0, conv.out_channels);
    const int64_t scratch = Winograd::values(conv) + strips.input_values();
    for_tiles(strips.count, [&](int64_t index) {
      const Strip strip = strips[index];
      if (of_y.are_wanted) {
        std::fill_n(statistics.pixels.begin() + strip.first_tile, strip.images,
                    strip.tile_pixels());
      }
      PK_CALL_STRIP(T, strip_forward, op, strip,
                    of_y.are_wanted ? statistics.tile(strip.first_tile) : nullptr,
                    thread_buffer<A, Use::kScratch>(scratch));
    });
    if (of_y.are_wanted) statistics.merge(mutable_data<A>(of_y.mean), mutable_data<A>(of_y.var));
  });
}

void launch_norm_act_conv_backward(const Unit& unit, const Gradient& dy, const Inputs& inputs,
                                   const Gradients& gradients) {
  const ConvSizes& conv = unit.conv;
  const Wanted& wanted = gradients.wanted;
  const std::optional<AffineStep>& step = dy.step;
  for_single_dtype(unit.dtypes.products, [&](auto value) {
    using T = decltype(value);
    using A = Accumulate<T>;
    const Normalisation<A> normalisation(inputs.norm, conv.in_channels);
    std::optional<InputGradient<A>> coefficients;
    if (step.has_value()) coefficients.emplace(*step, conv.out_channels);
    const bool stationary = is_backward_stationary(conv, has_winograd<T>(conv));
    const Strips strips(
        conv, normalisation.has_rows || (coefficients.has_value() && coefficients->has_rows()));
    WeightGradient<T> dweight(conv, gradients.conv_weight,
                              wanted.weight && !stationary ? strips.count : 0);
    const ConvBackward<T> op{conv,
                             {{step.has_value() ? data<T>(step->skip) : nullptr, data<T>(dy.g),
                               step.has_value() ? data<T>(step->x) : nullptr,
                               wanted.dy ? mutable_data<T>(*gradients.dy) : nullptr},
                              coefficients.has_value() ? &*coefficients : nullptr},
                             data<T>(inputs.x),
                             normalisation,
                             wanted.g && !stationary
                                 ? packed_weights<T>(conv, inputs.conv_weight, true)
                                 : PackedWeights{},
                             wanted.g ? mutable_data<T>(*gradients.g) : nullptr,
                             dweight.input_last};
    if (stationary) return stationary_backward(op, inputs.conv_weight, gradients);
    TileSums<A> partial_sums(wanted.g ? strips.tiles() : 0, conv.in_channels);
    const int64_t narrow = dweight.input_last ? conv.out_channels : conv.in_channels;
    const bool has_tiles = isa() == Isa::kAmxBf16 && std::is_same_v<T, BFloat16>;
    const int64_t reordered =
        std::max(strips.pair_values(narrow), has_tiles ? strips.amx_values() : 0);
    const int64_t scratch = strips.images * 2 * conv.in_channels + Winograd::values(conv) +
                            strips.input_values() + strips.output_values() + reordered;
    // Each part has its own partial weight gradient.
    const int64_t parts = wanted.weight ? dweight.parts : strips.count;
    for_tiles(parts, [&](int64_t part) {
      A* partial = wanted.weight ? dweight.cleared(part) : nullptr;
      for (int64_t i = part * strips.count / parts; i < (part + 1) * strips.count / parts; ++i) {
        const Strip strip = strips[i];
        PK_CALL_STRIP(T, strip_backward, op, strip,
                      wanted.g ? partial_sums.tile(strip.first_tile) : nullptr, partial,
                      thread_buffer<A, Use::kScratch>(scratch));
      }
    });
    if (wanted.g) partial_sums.merge(normalisation, conv.images, mutable_data<A>(gradients.sums));
    if (wanted.weight) dweight.merge();
  });
}

}  // namespace preact_kernels
