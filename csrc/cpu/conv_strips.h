// Strips of pixels, taps and weights of a direct convolution.
#pragma once

#include <algorithm>

#include "batch_norm.h"
#include "types.h"

namespace preact_kernels {

// Some rows of pixels of an image.
struct Rows {
  int64_t first_pixel;  // index in the batch
  int64_t row, rows;    // the first row in its image, and the number of rows
  int64_t image_rows, width;
};

// A part of a convolution: rows of one image, or whole images, of the output, and `stride` times as
// many rows of the input. Sums over pixels are per tile: a strip's part of one image.
struct Strip {
  Rows in, out;
  int64_t first_tile, first_image, images;

  int64_t tile_pixels() const { return out.rows * out.width; }
};

// The memory of an operand with its halo, for one image.
struct Haloed {
  int64_t rows, width, channels;

  int64_t pitch() const { return width * channels; }
  int64_t values() const { return rows * pitch(); }
  int64_t offset(int64_t row, int64_t column) const { return row * pitch() + column * channels; }
};

// The part of act(p) that `rows` rows of the output read. A row of the input has `width` pixels.
inline Haloed haloed_input(const ConvSizes& conv, int64_t rows, int64_t width) {
  return {(rows - 1) * conv.stride.h + conv.kernel_h, width + 2 * conv.halo_w(), conv.in_channels};
}

// The gradient of `rows` rows of the output with the halo that the input gradient reads. A row of
// the output has `width` pixels.
inline Haloed haloed_output(const ConvSizes& conv, int64_t rows, int64_t width) {
  return {rows + 2 * conv.halo_h(), width + 2 * conv.halo_w(), conv.out_channels};
}

// The convolutions that kernels/winograd.h serves, and its memory.
struct Winograd {
  static constexpr int64_t kPositions = 16;
  // The most tiles per product, and per weight gradient, which reads and writes all of its sums for
  // each set of tiles.
  static constexpr int64_t kTiles = 16, kGradientTiles = 32;
  // The largest share of one tap in the sum of squares of the weights.
  static constexpr double kMostOfOneTap = 0.5;

  // Serves 3x3 kernels of stride 1 on images of whole tiles. In images below kLeastSize, most
  // products belong to the halo, and rounding errors exceed those of direct sums. With more than
  // kMostWeights, the sums of a weight gradient would not stay in a cache.
  static bool serves(const ConvSizes& conv) {
    constexpr int64_t kLeastSize = 4, kMostWeights = 1536 * 1024;
    return conv.kernel_h == 3 && conv.kernel_w == 3 && conv.stride.h == 1 && conv.stride.w == 1 &&
           conv.height % 2 == 0 && conv.width % 2 == 0 &&
           std::min(conv.height, conv.width) >= kLeastSize &&
           conv.taps() * conv.in_channels * conv.out_channels <= kMostWeights;
  }

  // The distance between positions in values, for some tiles of `channels` channels. Not a power of
  // two: a first-level cache would hold few positions of a value.
  static int64_t step(int64_t tiles, int64_t channels) { return tiles * channels + kPadding; }
  static int64_t values(int64_t tiles, int64_t channels) {
    return kPositions * step(tiles, channels);
  }
  // Values of scratch memory for a convolution.
  static int64_t values(const ConvSizes& conv) {
    if (!serves(conv)) return 0;
    return values(kGradientTiles, conv.in_channels) + values(kGradientTiles, conv.out_channels);
  }

 private:
  static constexpr int64_t kPadding = 16;
};

// Sums of the squares of a 3x3 kernel's weights.
template <class A>
struct TapSquares {
  A of_taps[9] = {};
};

// All strips of a batch. For a 1x1 kernel the batch is one long row; if a norm has rows, each image
// is one long row.
//
// A strip reads all weights and adds to a whole partial weight gradient: strips grow with the
// weights while their operands fit a second-level cache. The number of images per strip depends on
// the number of threads; tiles must not.
struct Strips {
  ConvSizes conv;
  int64_t length;  // rows of a strip, or pixels for a 1x1 kernel
  int64_t per_image, images, count;

  Strips(const ConvSizes& conv, bool has_rows);

  Strip operator[](int64_t index) const;

  int64_t tiles() const { return conv.taps() == 1 ? count : conv.images * per_image; }
  // Pixels of a row of a 1x1 kernel.
  int64_t row_pixels() const { return conv.pixels() / (count / per_image); }

  // Values of the operands of a strip, with halos.
  int64_t input_values() const {
    if (conv.taps() == 1) return length * conv.in_channels;
    return images * haloed_input(conv, length, conv.width).values();
  }
  int64_t output_values() const {
    if (conv.taps() == 1) return length * conv.out_channels;
    return images * haloed_output(conv, length, conv.out_width()).values();
  }

  // Values of an operand in pairs of pixels.
  int64_t pair_values(int64_t channels) const {
    const int64_t rows = conv.taps() == 1 ? 1 : images * length;
    const int64_t width = conv.taps() == 1 ? length : conv.out_width();
    return rows * (width + 1) * channels;
  }

  // Values of both operands of a weight gradient, for one image, in the order that AMX reads.
  int64_t amx_values() const {
    constexpr int64_t kMostPadding = 64;
    const int64_t rows = conv.taps() == 1 ? 1 : length + 2 * conv.halo_h();
    const int64_t width = conv.taps() == 1 ? length : conv.out_width() + 2 * conv.halo_w();
    const int64_t pixels = rows * width + kMostPadding;
    return pixels * (conv.out_channels + 2 * conv.in_channels);
  }
};

// The taps of a product: row and column in the operand with its halo, for the first pixel, and
// place in the packed weights.
struct Taps {
  static constexpr int64_t kMost = 49;
  int64_t count = 0;
  int64_t row[kMost], column[kMost], place[kMost];
  int64_t offset[kMost];  // values from the operand's first

  Taps() {}  // zeroing them would take long compared with a strip

  void add(int64_t tap_row, int64_t tap_column, int64_t index, int64_t tap_offset) {
    row[count] = tap_row;
    column[count] = tap_column;
    offset[count] = tap_offset;
    place[count++] = index;
  }

  // The taps that fall inside an image of this size for at least one of some pixels in a row. Tap
  // (0, 0) of the first pixel reads the image at `first_row` and `first_column`; tap (0, 0) of the
  // last pixel, at `first_row` and `last_column`.
  Taps inside(int64_t first_row, int64_t first_column, int64_t last_column, int64_t height,
              int64_t width) const {
    Taps taps;
    for (int64_t t = 0; t < count; ++t) {
      const int64_t r = first_row + row[t];
      if (r < 0 || r >= height) continue;
      if (last_column + column[t] < 0 || first_column + column[t] >= width) continue;
      taps.offset[taps.count] = offset[t];
      taps.place[taps.count++] = place[t];
    }
    return taps;
  }
};

// The pixels of a strip that a product computes, and its steps over operand and result.
template <class Operand>
struct ProductPixels {
  int64_t rows, width;  // pixels to compute in each image
  Operand operand;
  Rows read;    // rows of the operand, without the halo
  Stride step;  // distance between pixels of the operand
  Taps taps;
  int64_t first;  // index of the first pixel in the result
  Stride result_step;
  int64_t result_width, result_image;  // pixels of a row and of an image of the result

  // The taps that fall inside the image for at least one pixel of `row` from column `first` to
  // `last`.
  Taps taps_inside(const ConvSizes& conv, int64_t row, int64_t first, int64_t last) const {
    return taps.inside(read.row - conv.halo_h() + row * step.h, first * step.w - conv.halo_w(),
                       last * step.w - conv.halo_w(), read.image_rows, read.width);
  }
};

// All pixels of the output, computed from the input.
template <class Operand>
ProductPixels<Operand> output_pixels(const ConvSizes& conv, const Strip& strip,
                                     const Operand& operand) {
  ProductPixels<Operand> pixels{strip.out.rows,
                                strip.out.width,
                                operand,
                                strip.in,
                                conv.stride,
                                {},
                                0,
                                {},
                                strip.out.width,
                                strip.out.image_rows * strip.out.width};
  for (int64_t r = 0; r < conv.kernel_h; ++r) {
    for (int64_t s = 0; s < conv.kernel_w; ++s) {
      pixels.taps.add(r, s, pixels.taps.count, operand.offset(r, s));
    }
  }
  return pixels;
}

// Every stride-th pixel of the input from `row` and `column` on, computed from the output gradient:
// pixel i reads o = (i + halo - r) / stride for each tap r where o is an integer.
template <class Operand>
ProductPixels<Operand> input_pixels(const ConvSizes& conv, const Strip& strip,
                                    const Operand& operand, int64_t row, int64_t column) {
  const Stride stride = conv.stride;
  ProductPixels<Operand> pixels{(strip.in.rows - row + stride.h - 1) / stride.h,
                                (strip.in.width - column + stride.w - 1) / stride.w,
                                operand,
                                strip.out,
                                {},
                                {},
                                row * strip.in.width + column,
                                stride,
                                strip.in.width,
                                strip.in.image_rows * strip.in.width};
  for (int64_t r = conv.kernel_h; r-- > 0;) {
    const int64_t down = row + conv.halo_h() - r;
    if (down % stride.h != 0) continue;
    for (int64_t s = conv.kernel_w; s-- > 0;) {
      const int64_t right = column + conv.halo_w() - s;
      if (right % stride.w != 0) continue;
      const int64_t place = conv.taps() - 1 - (r * conv.kernel_w + s);  // weights are transposed
      const int64_t tap_row = down / stride.h + conv.halo_h();
      const int64_t tap_column = right / stride.w + conv.halo_w();
      pixels.taps.add(tap_row, tap_column, place, operand.offset(tap_row, tap_column));
    }
  }
  return pixels;
}

// Memory of a weight [K, C, R, S] of any strides.
template <class T>
struct ConvWeight {
  const T* values;
  int64_t stride_k, stride_c;
  int64_t taps[Taps::kMost];

  // The weights from output channel k and input channel c on.
  ConvWeight from(int64_t k, int64_t c) const {
    ConvWeight weight = *this;
    weight.values += k * stride_k + c * stride_c;
    return weight;
  }
};

// Packed weights, in the order and type that products read.
struct PackedWeights {
  const void* values;
  int64_t in_channels, out_channels;
  bool finite;              // none is NaN or infinite
  const void* transformed;  // for kernels/winograd.h; null if that does not serve them
};

// Input channels in a group of packed weights: whole squares of words for any vector size.
constexpr int64_t kPackedChannels = 32;

// The gradient of a convolution's output: tensors.g, or with coefficients the result of its affine
// step, which is stored in tensors.dx unless that is null.
template <class T>
struct OutputGradient {
  GradientPointers<T> tensors;
  const InputGradient<Accumulate<T>>* coefficients;
};

// The arguments that all strips of a pass share.
template <class T>
struct ConvForward {
  const ConvSizes& conv;
  const T* x;
  const Normalisation<Accumulate<T>>& norm;
  PackedWeights packed;
  const T *conv_bias, *residual;  // or null
  T* y;
};

template <class T>
struct ConvBackward {
  const ConvSizes& conv;
  OutputGradient<T> dy;
  const T* x;
  const Normalisation<Accumulate<T>>& norm;
  PackedWeights packed;
  T* g;             // or null
  bool input_last;  // partial weight gradients are [tap][K][C], else [tap][C][K]
};

}  // namespace preact_kernels
