// Weight-stationary norm, activation and convolution: see image_groups.h.

#include "../kernels.h"
#include "conv_product.h"
#include "finish_tile.h"
#include "pack_weights.h"
#include "weight_gradient.h"

PK_BEGIN_ISA

// Output channels of a task.
template <class T>
int64_t task_channels(const ConvSizes& conv) {
  return tile_vectors(conv) * kLanes<Accumulate<T>>;
}

// Input channels of a task of the weight gradient.
template <class T>
int64_t gradient_task_channels() {
  return kMaxVectors * kLanes<Accumulate<T>>;
}

// Input channels that a task packs at a time: equal parts of at most 320 KiB in float32, at least
// kPackedChannels.
template <class T>
int64_t packed_channels(const ConvSizes& conv, int64_t in_channels) {
  constexpr int64_t kMostValues = 80 * 1024;
  const int64_t group_values = conv.taps() * task_channels<T>(conv) * kPackedChannels;
  const int64_t most = std::max<int64_t>(kMostValues / group_values, 1);
  const int64_t groups = (in_channels + kPackedChannels - 1) / kPackedChannels;
  const int64_t parts = (groups + most - 1) / most;
  return (groups + parts - 1) / parts * kPackedChannels;
}

// Writes a part of a row of an image to an operand, and the halo next to it. fill(out, pixel,
// count) writes pixels of the batch, `operand.images * operand.step()` values apart.
template <class O, class Fill>
PK_INLINE void fill_part(O* out, const Interleaved& operand, const ConvSizes& conv,
                         const Strip& strip, const Rows& rows, const RowPart& part,
                         const Fill& fill) {
  const int64_t halo = conv.halo_w(), end = part.first + part.count;
  const auto at = [&](int64_t column) PK_LAMBDA {
    return out + operand.offset(part.row + conv.halo_h(), column) + part.image * operand.step();
  };
  const auto clear = [&](int64_t first, int64_t last) PK_LAMBDA {
    for (int64_t column = first; column < last; ++column) {
      std::fill_n(at(column), operand.channels, O{});
    }
  };
  const bool is_image = part.image < strip.images;
  if (part.first == 0) clear(0, halo);
  if (!is_image) clear(part.first + halo, end + halo);
  if (end == rows.width) clear(end + halo, operand.columns);
  if (!is_image) return;
  const int64_t pixel = rows.first_pixel + (part.image * rows.image_rows + part.row) * rows.width;
  if (operand.column_step == 1) {
    fill(at(part.first + halo), pixel + part.first, part.count);
  } else {
    for (int64_t c = part.first; c < end; ++c) fill(at(c + halo), pixel + c, int64_t(1));
  }
}

// Writes a part of act(p) to an operand.
template <class T>
void fill_activated(const T* x, const Normalisation<Accumulate<T>>& norm, const ConvSizes& conv,
                    const Strip& strip, const Interleaved& operand, const RowPart& part,
                    void* memory) {
  using O = Operand<T>;
  const int64_t channels = conv.in_channels, step = operand.images * operand.step();
  const NormRow<Accumulate<T>> row = norm.row(strip.first_image + part.image);
  fill_part(static_cast<O*>(memory), operand, conv, strip, strip.in, part,
            [&](O* out, int64_t pixel, int64_t count)
                PK_LAMBDA { normalise(x + pixel * channels, out, step, count, channels, row); });
}

// Writes a part of the output gradient to an operand, and stores it if it is wanted.
template <class T>
void fill_gradient(const OutputGradient<T>& dy, const ConvSizes& conv, const Strip& strip,
                   const Interleaved& operand, const RowPart& part, void* memory) {
  using O = Operand<T>;
  const int64_t step = operand.images * operand.step();
  fill_part(static_cast<O*>(memory), operand, conv, strip, strip.out, part,
            [&](O* out, int64_t pixel, int64_t count) PK_LAMBDA {
              apply_step(dy, true, out, step, pixel, count, conv.out_channels,
                         strip.first_image + part.image);
            });
}

// Adds the product of some input channels to sums[pixel][image][channel], or stores it if
// `is_first`, for kVectors vectors of output channels.
template <class O, int kVectors>
PK_OUTLINE void add_stationary_product(const O* in, const ProductPixels<Interleaved>& pixels,
                                       const ConvSizes& conv, int64_t channels, const O* weights,
                                       bool finite, bool is_first, Accumulate<O>* sums) {
  using A = Accumulate<O>;
  constexpr int kMostRows = std::min(max_tile_rows(kVectors), kMostAddresses);
  constexpr int64_t kWidth = kVectors * kLanes<A>;
  const Interleaved& operand = pixels.operand;
  const int64_t images = operand.images, step = operand.step(), neighbours = pixels.width * images;
  // 0 * NaN is NaN: if a weight is not finite, taps outside the image are left out for every pixel.
  const bool in_column = images % ImageGroups::kWholeTile == 0 || !finite;
  for (int64_t row = 0; row < pixels.rows; ++row) {
    const O* line = in + row * pixels.step.h * operand.pitch();
    A* result =
        sums + (pixels.first + row * pixels.result_step.h * pixels.result_width) * images * kWidth;
    for (int64_t p = 0; p < neighbours;) {
      const int64_t column = p / images;
      const int64_t left = (in_column ? (column + 1) * images : neighbours) - p;
      const int64_t rows = next_rows<kMostRows>(left);
      const Taps taps = pixels.taps_inside(conv, row, column, (p + rows - 1) / images);
      with_rows<kMostRows>(rows, [&](auto count) PK_LAMBDA {
        constexpr int kRows = decltype(count)::value;
        const auto store_sums = [&](auto& acc) PK_LAMBDA {
          int64_t image = p - column * images;
          A* to = result + (column * pixels.result_step.w * images + image) * kWidth;
#pragma GCC unroll 32
          for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
              A* at = to + v * kLanes<A>;
              store(at, is_first ? acc[i][v] : load(at) + acc[i][v]);
            }
            to += kWidth;
            if (++image == images) {
              image = 0;
              to += (pixels.result_step.w - 1) * images * kWidth;
            }
          }
        };
        product_tile<O, kRows, kVectors>(
            line + p * step, [&](int i) PK_LAMBDA { return i * step; }, taps, channels,
            kSumChannels<O>, weights, store_sums);
      });
      p += rows;
    }
  }
}

// Computes the products of a task, and calls finish(accumulators, tile, first, pixel, channel) for
// pixels of the strip from `pixel` on; `first` is the first pixel of their tile. for_pixels(body)
// calls body(pixels) for sets of pixels that cover the result.
template <class T, class ForPixels, class Finish>
PK_INLINE void stationary_products(const StationaryTask<T>& task, const ForPixels& for_pixels,
                                   const Finish& finish) {
  using O = Operand<T>;
  using A = Accumulate<T>;
  const ConvSizes& conv = task.conv;
  const O* in = static_cast<const O*>(task.operand);
  O* packed = static_cast<O*>(task.packed);
  const int64_t most = packed_channels<T>(conv, task.in_channels);
  const int64_t out_channels = std::min(task_channels<T>(conv), task.out_channels - task.channel);
  for_channel_tiles<A>(out_channels, tile_vectors(conv), [&](auto vectors, int64_t k) PK_LAMBDA {
    constexpr int kVectors = decltype(vectors)::value, kWidth = kVectors * kLanes<A>;
    constexpr int kWhole = std::min(max_tile_rows(kVectors), 8);
    k += task.channel;
    for (int64_t c = 0; c < task.in_channels; c += most) {
      const int64_t channels = std::min(most, task.in_channels - c);
      const ConvWeight<T> weight = task.weight.from(k, c);
      for (int64_t first = 0; first < channels; first += kPackedChannels) {
        pack(weight, conv, channels, kWidth, packed, first);
      }
      const bool finite = conv.taps() == 1 || all_finite(packed, conv.taps() * channels * kWidth);
      for_pixels([&](const ProductPixels<Interleaved>& pixels) PK_LAMBDA {
        add_stationary_product<O, kVectors>(in + c, pixels, conv, channels, packed, finite, c == 0,
                                            task.sums);
      });
    }
    for (int64_t tile = 0; tile < task.strip.images * task.tiles.count; ++tile) {
      const int64_t image = tile / task.tiles.count, of_image = tile % task.tiles.count;
      const int64_t begin = task.tiles.first(of_image), end = begin + task.tiles.length(of_image);
      const auto finish_rows = [&](auto count, int64_t pixel) PK_LAMBDA {
        constexpr int kRows = decltype(count)::value;
        Vector<A> acc[kRows][kVectors];
#pragma GCC unroll 32
        for (int i = 0; i < kRows; ++i) {
          const A* from = task.sums + ((pixel + i) * task.layout.images + image) * kWidth;
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) acc[i][v] = load(from + v * kLanes<A>);
        }
        const int64_t first = image * task.tiles.pixels;
        finish(acc, tile, first + begin, first + pixel, k);
      };
      int64_t pixel = begin;
      for (; pixel + kWhole <= end; pixel += kWhole) {
        finish_rows(std::integral_constant<int, kWhole>{}, pixel);
      }
      for (; pixel < end; ++pixel) finish_rows(std::integral_constant<int, 1>{}, pixel);
    }
  });
}

// Computes y for a task's output channels and a group of images, with its part of the statistics.
template <class T>
void stationary_output(const ConvForward<T>& op, const StationaryTask<T>& task,
                       Accumulate<T>* statistics) {
  using A = Accumulate<T>;
  const ProductPixels<Interleaved> pixels = output_pixels(op.conv, task.strip, task.layout);
  const FinishOutput<T, A> finish_first(op, task.strip, statistics);
  stationary_products(
      task, [&](const auto& body) PK_LAMBDA { body(pixels); },
      [&](auto& acc, int64_t tile, int64_t first, int64_t pixel, int64_t k) PK_LAMBDA {
        FinishOutput<T, A> finish = finish_first;
        if (statistics != nullptr) finish.statistics += tile * 3 * op.conv.out_channels;
        finish.first_pixel = first;
        finish(acc, 0, pixel, k);
      });
}

// Computes g for a task's input channels and a group of images, with its part of the sums.
template <class T>
void stationary_input_gradient(const ConvBackward<T>& op, const StationaryTask<T>& task,
                               double* tile_sums) {
  using A = Accumulate<T>;
  const ConvSizes& conv = op.conv;
  const Strip& strip = task.strip;
  const int64_t channels = conv.in_channels, first = strip.in.first_pixel * channels;
  const int64_t begin = task.channel, end = std::min(begin + task_channels<T>(conv), channels);
  const int64_t rows = 2 * strip.images * task.tiles.count;  // rows of sums
  A* of_g = task.sums_of_tiles;
  for (int64_t i = 0; i < rows; ++i) {
    std::fill(of_g + i * channels + begin, of_g + i * channels + end, A(0));
  }
  const auto for_pixels = [&](const auto& body) PK_LAMBDA {
    for (int64_t row = 0; row < conv.stride.h; ++row) {
      for (int64_t column = 0; column < conv.stride.w; ++column) {
        body(input_pixels(conv, strip, task.layout, row, column));
      }
    }
  };
  stationary_products(
      task, for_pixels,
      [&](const auto& acc, int64_t tile, int64_t, int64_t pixel, int64_t c) PK_LAMBDA {
        const int64_t image = strip.first_image + tile / task.tiles.count;
        finish_input_gradient(acc, op.x + first, op.g + first, pixel, c, channels, channels,
                              op.norm.row(image), of_g + tile * 2 * channels, false, nullptr);
      });
  for (int64_t i = 0; i < rows; ++i) {
    std::copy(of_g + i * channels + begin, of_g + i * channels + end,
              tile_sums + i * channels + begin);
  }
}

// Fills pairs of pixels of a part of a row of the output gradient, which dot products read.
template <class T>
void fill_row_pairs(const ConvSizes& conv, const Interleaved& operand, const void* gradient,
                    int64_t width, int64_t row, int64_t first, int64_t count, void* pairs) {
#ifdef PK_HAS_DOT
  if constexpr (std::is_same_v<T, BFloat16>) {
    const PixelRows<BFloat16> dy(
        static_cast<const BFloat16*>(gradient) + operand.offset(row + conv.halo_h(), conv.halo_w()),
        operand);
    const PixelRows<BFloat16> to =
        paired_rows(static_cast<const BFloat16*>(pairs), conv.out_height(), width, dy);
    fill_pairs(dy.from(0, first), {1, 1, count}, const_cast<BFloat16*>(to.from(row, first).values));
  }
#endif
}

// partial[k][c] += the gradient of one tap's weights for input channels c from `channel` on, over a
// group of images. `narrow` is the output gradient, in pairs for dot products.
template <class T>
void stationary_weight_gradient(const ConvSizes& conv, const Strip& strip, const Interleaved& input,
                                const Interleaved& output, const void* activated,
                                const void* narrow, int64_t tap, int64_t channel, int64_t channels,
                                Accumulate<T>* partial) {
  using O = Operand<T>;
  const int64_t r = tap / conv.kernel_w, s = tap % conv.kernel_w, images = output.images;
  const PixelRange rows =
      inside(r - conv.halo_h(), conv.stride.h, strip.in.image_rows, 0, strip.out.rows);
  const PixelRange columns =
      inside(s - conv.halo_w(), conv.stride.w, strip.in.width, 0, strip.out.width);
  if (rows.count <= 0 || columns.count <= 0) return;
  PixelRows<O> a(static_cast<const O*>(activated) +
                     input.offset(rows.first * conv.stride.h + r, s) +
                     columns.first * images * input.step() + channel,
                 input);
  a.pitch *= conv.stride.h;
  a.channels = channels;
  PixelRows<O> dy(static_cast<const O*>(narrow), output);
  if constexpr (kDepth<O> == 2) {
    dy = paired_rows(static_cast<const O*>(narrow), strip.out.rows, strip.out.width * images, dy)
             .from(rows.first, columns.first * images);
  } else {
    dy.values += output.offset(rows.first + conv.halo_h(), columns.first + conv.halo_w());
  }
  // Sums of few pixels: the error grows with the length of a sum.
  constexpr int64_t kMostPixels = 256;
  const int64_t neighbours = columns.count * images;
  const int64_t width = std::min(neighbours, kMostPixels), height = kMostPixels / width;
  for (int64_t row = 0; row < rows.count; row += height) {
    for (int64_t first = 0; first < neighbours; first += width) {
      PixelRows<O> a_part = a;
      a_part.values += row * a.pitch + first * a.step;
      add_tap(dy.from(row, first), a_part,
              {1, std::min(height, rows.count - row), std::min(width, neighbours - first)},
              partial);
    }
  }
}

#define PK_INSTANTIATE(T)                                                       \
  template decltype(task_channels<T>) task_channels<T>;                         \
  template decltype(gradient_task_channels<T>) gradient_task_channels<T>;       \
  template decltype(packed_channels<T>) packed_channels<T>;                     \
  template decltype(fill_activated<T>) fill_activated<T>;                       \
  template decltype(fill_gradient<T>) fill_gradient<T>;                         \
  template decltype(fill_row_pairs<T>) fill_row_pairs<T>;                       \
  template decltype(stationary_output<T>) stationary_output<T>;                 \
  template decltype(stationary_input_gradient<T>) stationary_input_gradient<T>; \
  template decltype(stationary_weight_gradient<T>) stationary_weight_gradient<T>;
PK_FOR_CONV_DTYPES(PK_INSTANTIATE)

PK_END_ISA
