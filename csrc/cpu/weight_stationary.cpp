#include "weight_stationary.h"

#include "conv_weights.h"
#include "kernels.h"
#include "parallel.h"

namespace preact_kernels {

namespace {

int64_t parts_of(int64_t length, int64_t part) { return (length + part - 1) / part; }

// The operands that a launch fills.
struct Needs {
  bool input, output, pairs;
};

// The operands of all groups, in memory of this thread.
template <class T>
struct Operands {
  using A = Accumulate<T>;
  const ConvSizes& conv;
  const ImageGroups& groups;
  const bool pairs;  // products are dot products
  const int64_t value_bytes;

  // Bytes per group.
  int64_t input_bytes = 0, output_bytes = 0, pair_bytes = 0;
  // Memory of all groups.
  char *inputs = nullptr, *outputs = nullptr, *output_pairs = nullptr;

  Operands(const ConvSizes& conv, const ImageGroups& groups, Needs needs)
      : conv(conv),
        groups(groups),
        pairs(std::is_same_v<T, BFloat16> && isa() >= Isa::kAvx512Bf16),
        value_bytes(pairs ? sizeof(T) : sizeof(A)) {
    const Strip strip = groups[0];
    if (needs.input) input_bytes = aligned_bytes(input(strip).values());
    if (needs.output) output_bytes = aligned_bytes(output(strip).values());
    if (needs.pairs && pairs) {
      const int64_t row = (neighbours(strip) + 1) / 2 * 2;
      pair_bytes = aligned_bytes(strip.out.rows * row * conv.out_channels);
    }
    inputs = thread_buffer<char, Use::kOperands>(groups.count *
                                                 (input_bytes + output_bytes + pair_bytes));
    outputs = inputs + groups.count * input_bytes;
    output_pairs = outputs + groups.count * output_bytes;
  }

  int64_t aligned_bytes(int64_t values) const { return parts_of(values * value_bytes, 64) * 64; }
  int64_t images(const Strip& strip) const { return groups.images(strip, pairs); }
  // Pixels of all images in a row of the output.
  int64_t neighbours(const Strip& strip) const { return strip.out.width * images(strip); }

  Interleaved input(const Strip& strip) const {
    return interleaved_input(conv, strip, images(strip));
  }
  Interleaved output(const Strip& strip) const {
    return interleaved_output(conv, strip, images(strip));
  }
  char* input_of(int64_t group) const { return inputs + group * input_bytes; }
  char* output_of(int64_t group) const { return outputs + group * output_bytes; }
  char* pairs_of(int64_t group) const { return output_pairs + group * pair_bytes; }
  char* narrow_of(int64_t group) const { return pairs ? pairs_of(group) : output_of(group); }

  template <class N>
  void fill_inputs(const T* x, const N& norm) const {
    for_row_parts(&Strip::in, [&](int64_t group, const Strip& strip, const RowPart& part) {
      PK_CALL_PRODUCT(T, fill_activated, x, norm, conv, strip, input(strip), part, input_of(group));
    });
  }

  void fill_outputs(const OutputGradient<T>& dy) const {
    for_row_parts(&Strip::out, [&](int64_t group, const Strip& strip, const RowPart& part) {
      PK_CALL_PRODUCT(T, fill_gradient, dy, conv, strip, output(strip), part, output_of(group));
    });
  }

  // Fills pairs of pixels of the output gradient, which dot products read.
  void fill_pairs() const {
    constexpr int64_t kPart = 64;  // an even number
    if (!pairs) return;
    const Strip first = groups[0];
    const int64_t rows = first.out.rows, parts = parts_of(neighbours(first), kPart);
    for_tiles(groups.count * rows * parts, [&](int64_t i) {
      const int64_t group = i / (rows * parts), row = i / parts % rows, begin = i % parts * kPart;
      const Strip strip = groups[group];
      const int64_t count = std::min(kPart, neighbours(strip) - begin);
      if (count <= 0) return;
      PK_CALL_PRODUCT(T, fill_row_pairs<T>, conv, output(strip), output_of(group),
                      neighbours(strip), row, begin, count, pairs_of(group));
    });
  }

 private:
  // Calls body(group, strip, part) for parts of the rows of all images.
  template <class Body>
  void for_row_parts(Rows Strip::* side, const Body& body) const {
    constexpr int64_t kPart = 32;
    const Strip first = groups[0];
    const int64_t rows = (first.*side).rows, parts = parts_of((first.*side).width, kPart);
    const int64_t group_parts = images(first) * rows * parts;
    for_tiles(groups.count * group_parts, [&](int64_t i) {
      const int64_t group = i / group_parts, image = i % group_parts / (rows * parts);
      const Strip strip = groups[group];
      const int64_t begin = i % parts * kPart;
      const int64_t count = std::min(kPart, (strip.*side).width - begin);
      if (image >= images(strip) || count <= 0) return;
      body(group, strip, RowPart{image, i / parts % rows, begin, count});
    });
  }
};

template <class T>
void* packed_memory(const ConvSizes& conv, int64_t in_channels) {
  const int64_t channels = PK_CALL_PRODUCT(T, packed_channels<T>, conv, in_channels);
  const int64_t outputs = PK_CALL_PRODUCT(T, task_channels<T>, conv);
  return thread_buffer<Accumulate<T>, Use::kWeights>(conv.taps() * channels * outputs);
}

}  // namespace

// From `values_per_weight` on, strips with kernels/winograd.h are faster, if it serves.
static bool is_weight_stationary(const ConvSizes& conv, bool has_winograd,
                                 double values_per_weight) {
  const int64_t weights = conv.taps() * conv.in_channels * conv.out_channels;
  const ImageSizes in = conv.input(), out = conv.output();
  const int64_t values = in.pixels() * in.channels + out.pixels() * out.channels;
  if (weights <= kSmallWeight) return false;
  if (has_winograd && values >= values_per_weight * weights) return false;
  return values <= std::min(kFewValuesPerWeight * weights, kFewValues);
}

bool is_forward_stationary(const ConvSizes& conv, bool has_winograd) {
  return is_weight_stationary(conv, has_winograd, kWinogradValues);
}

bool is_backward_stationary(const ConvSizes& conv, bool has_winograd) {
  return is_weight_stationary(conv, has_winograd, kWinogradBackwardValues);
}

template <class T>
void stationary_forward(const ConvForward<T>& op, const Tensor& conv_weight,
                        const Statistics& of_y) {
  using A = Accumulate<T>;
  const ConvSizes& conv = op.conv;
  const ImageGroups groups(conv, op.norm.has_rows);
  const Operands<T> operands(conv, groups, Needs{true, false, false});
  operands.fill_inputs(op.x, op.norm);
  const ImageTiles tiles{groups, &Strip::out, conv.out_channels};
  TileStatistics<A> statistics(of_y.are_wanted ? tiles.count() : 0, conv.out_channels);
  const ConvWeight<T> weight = memory_of<T>(conv_weight, false);
  const int64_t channels = PK_CALL_PRODUCT(T, task_channels<T>, conv);
  const int64_t tasks = parts_of(conv.out_channels, channels);
  for_tiles(groups.count * tasks, [&](int64_t i) {
    const int64_t group = i / tasks;
    const Strip strip = groups[group];
    const Interleaved layout = operands.input(strip);
    StationaryTask<T> task{conv, strip, layout, weight, tiles.of_image(strip)};
    if (of_y.are_wanted && i % tasks == 0) {
      for (int64_t tile = 0; tile < tiles.of_group(strip); ++tile) {
        statistics.pixels[tiles.first(group) + tile] = task.tiles.length(tile % task.tiles.count);
      }
    }
    task.operand = operands.input_of(group);
    task.in_channels = conv.in_channels;
    task.out_channels = conv.out_channels;
    task.channel = i % tasks * channels;
    task.packed = packed_memory<T>(conv, task.in_channels);
    task.sums = thread_buffer<A, Use::kScratch>(strip.tile_pixels() * layout.images * channels);
    PK_CALL_PRODUCT(T, stationary_output, op, task,
                    of_y.are_wanted ? statistics.tile(tiles.first(group)) : nullptr);
  });
  if (of_y.are_wanted) statistics.merge(mutable_data<A>(of_y.mean), mutable_data<A>(of_y.var));
}

template <class T>
void stationary_backward(const ConvBackward<T>& op, const Tensor& conv_weight,
                         const Gradients& gradients) {
  using A = Accumulate<T>;
  const ConvSizes& conv = op.conv;
  const Wanted& wanted = gradients.wanted;
  const InputGradient<A>* step = op.dy.coefficients;
  const ImageGroups groups(conv, op.norm.has_rows || (step != nullptr && step->has_rows()));
  const Operands<T> operands(conv, groups, Needs{wanted.weight, true, wanted.weight});
  operands.fill_outputs(op.dy);
  if (wanted.weight) {
    operands.fill_inputs(op.x, op.norm);
    operands.fill_pairs();
  }
  const ImageTiles tiles{groups, &Strip::in, conv.in_channels};
  TileSums<A> partial_sums(wanted.g ? tiles.count() : 0, conv.in_channels);
  const ConvWeight<T> weight = memory_of<T>(conv_weight, true);
  const int64_t channels = PK_CALL_PRODUCT(T, task_channels<T>, conv);
  const int64_t group_tasks = parts_of(conv.in_channels, channels);
  const int64_t input_tasks = wanted.g ? groups.count * group_tasks : 0;
  const auto input_gradient = [&](int64_t i) {
    const int64_t group = i / group_tasks;
    const Strip strip = groups[group];
    const Interleaved layout = operands.output(strip);
    const int64_t values = strip.in.rows * strip.in.width * layout.images * channels;
    StationaryTask<T> task{conv, strip, layout, weight, tiles.of_image(strip)};
    task.operand = operands.output_of(group);
    task.in_channels = conv.out_channels;
    task.out_channels = conv.in_channels;
    task.channel = i % group_tasks * channels;
    task.packed = packed_memory<T>(conv, task.in_channels);
    task.sums =
        thread_buffer<A, Use::kScratch>(values + tiles.of_group(strip) * 2 * conv.in_channels);
    task.sums_of_tiles = task.sums + values;
    PK_CALL_PRODUCT(T, stationary_input_gradient, op, task, partial_sums.tile(tiles.first(group)));
  };
  const ConvWeight<T> layout = memory_of<T>(gradients.conv_weight, false);
  const int64_t task_inputs = PK_CALL_PRODUCT(T, gradient_task_channels<T>);
  const int64_t weight_tasks =
      wanted.weight ? parts_of(conv.in_channels, task_inputs) * conv.taps() : 0;
  const auto weight_gradient = [&](int64_t i) {
    const int64_t tap = i % conv.taps(), c = i / conv.taps() * task_inputs;
    const int64_t count = std::min(task_inputs, conv.in_channels - c);
    A* sums = thread_buffer<A, Use::kWeightGradients>(conv.out_channels * count);
    std::fill_n(sums, conv.out_channels * count, A(0));
    for (int64_t group = 0; group < groups.count; ++group) {
      const Strip strip = groups[group];
      PK_CALL_PRODUCT(T, stationary_weight_gradient<T>, conv, strip, operands.input(strip),
                      operands.output(strip), operands.input_of(group), operands.narrow_of(group),
                      tap, c, count, sums);
    }
    T* to = mutable_data<T>(gradients.conv_weight) + layout.taps[tap] + c * layout.stride_c;
    for (int64_t k = 0; k < conv.out_channels; ++k) {
      store_weights(to + k * layout.stride_k, layout.stride_c, sums + k * count, count);
    }
  };
  for_tiles(input_tasks + weight_tasks, [&](int64_t i) {
    if (i < input_tasks) {
      input_gradient(i);
    } else {
      weight_gradient(i - input_tasks);
    }
  });
  if (wanted.g) partial_sums.merge(op.norm, conv.images, mutable_data<A>(gradients.sums));
}

#define PK_INSTANTIATE(T)                                                                       \
  template void stationary_forward<T>(const ConvForward<T>&, const Tensor&, const Statistics&); \
  template void stationary_backward<T>(const ConvBackward<T>&, const Tensor&, const Gradients&);
PK_INSTANTIATE(float)
PK_INSTANTIATE(BFloat16)
PK_INSTANTIATE(Float16)

}  // namespace preact_kernels
