// Strips of pixels, taps and weights of a direct convolution.
#pragma once

#include <algorithm>
#include <iterator>
#include <utility>

#include "batch_norm.h"
#include "isa.h"
#include "thread_buffer.h"
#include "types.h"

namespace preact_kernels {

// Some rows of one image, or some whole images. Sums over pixels are those of tiles: a strip's part
// of one image.
struct Strip {
  int64_t first_pixel;  // of the batch
  int64_t first_tile, images;
  int64_t row, rows;  // of an image
  int64_t image_rows, width;

  int64_t tile_pixels() const { return rows * width; }
  int64_t pixels() const { return images * tile_pixels(); }
};

// All strips of a batch. For a 1x1 kernel the batch is one long row.
//
// A strip reads all weights, and its weight gradient is added to a whole partial gradient: strips
// grow with the weights, as far as their operands stay in a second-level cache. Only the number of
// images of a strip depends on the number of threads, because tiles must not.
struct Strips {
  Conv conv;
  int64_t length;  // of a strip, in rows, or in pixels for a 1x1 kernel
  int64_t per_image, images, count;

  explicit Strips(const Conv& conv) : conv(conv), images(1) {
    constexpr int64_t kLeastValues = 16 * 1024, kMostValues = 48 * 1024;
    constexpr int64_t kLeastStrips = 64, kLeastImageStrips = 16, kStripsPerThread = 4;
    const int64_t widest = std::max(conv.in_channels, conv.out_channels);
    const int64_t weights = conv.taps() * conv.in_channels * conv.out_channels;
    const int64_t values = std::clamp(weights, kLeastValues, kMostValues);
    if (conv.taps() == 1) {
      constexpr int64_t kWholeTiles = 42;  // of 6 or 14 pixels
      const int64_t most = std::min(values / widest, conv.pixels() / kLeastStrips);
      length = std::max<int64_t>(most / kWholeTiles, 1) * kWholeTiles;
      per_image = 0;
      count = (conv.pixels() + length - 1) / length;
      return;
    }
    const int64_t row_values = (conv.width + 2 * conv.halo_w()) * widest;
    const int64_t most = std::max<int64_t>(1, values / row_values - 2 * conv.halo_h());
    const int64_t wanted = std::max((conv.height + most - 1) / most,
                                    std::min(conv.height, kLeastImageStrips / conv.images));
    length = (conv.height + wanted - 1) / wanted;
    per_image = (conv.height + length - 1) / length;
    if (per_image == 1) {
      const int64_t fitting = values / (row_values * (conv.height + 2 * conv.halo_h()));
      const int64_t least_strips = kStripsPerThread * torch::stable::get_num_threads();
      images = std::max<int64_t>(1, std::min(fitting, conv.images / least_strips));
    }
    count = (conv.images + images - 1) / images * per_image;
  }

  Strip operator[](int64_t index) const {
    if (conv.taps() == 1) {
      const int64_t first = index * length;
      return {first, index, 1, 0, 1, 1, std::min(length, conv.pixels() - first)};
    }
    const int64_t image = index / per_image * images;
    const int64_t row = index % per_image * length;
    return {(image * conv.height + row) * conv.width,
            index * images,
            std::min(images, conv.images - image),
            row,
            std::min(length, conv.height - row),
            conv.height,
            conv.width};
  }

  int64_t tiles() const { return conv.taps() == 1 ? count : conv.images * per_image; }

  // Values of one operand with its border.
  int64_t scratch_values(int64_t channels) const {
    if (conv.taps() == 1) return length * channels;
    const int64_t rows = images * (length + 2 * conv.halo_h());
    return rows * (conv.width + 2 * conv.halo_w()) * channels;
  }

  // Values of one operand in pairs of pixels.
  int64_t pair_values(int64_t channels) const {
    const int64_t rows = conv.taps() == 1 ? 1 : images * length;
    const int64_t width = conv.taps() == 1 ? length : conv.width;
    return rows * (width + 1) * channels;
  }
};

// Taps of a kernel. For each: its offset in a bordered operand from the upper left tap, and its
// place in the packed weights.
struct Taps {
  static constexpr int64_t kMost = 49;
  int64_t count = 0;
  int64_t offset[kMost];
  int64_t place[kMost];

  Taps() = default;
  Taps(const Conv& conv, int64_t pitch, int64_t channels) {
    for (int64_t r = 0; r < conv.kernel_h; ++r) {
      for (int64_t s = 0; s < conv.kernel_w; ++s) add(r * pitch + s * channels, count);
    }
  }

  void add(int64_t at, int64_t index) {
    offset[count] = at;
    place[count++] = index;
  }

  // The taps that fall inside the image for the pixel at `row` and `column`.
  Taps inside(const Conv& conv, int64_t row, int64_t column) const {
    Taps taps;
    for (int64_t t = 0; t < count; ++t) {
      const int64_t r = row + t / conv.kernel_w - conv.halo_h();
      const int64_t s = column + t % conv.kernel_w - conv.halo_w();
      if (r >= 0 && r < conv.height && s >= 0 && s < conv.width) taps.add(offset[t], place[t]);
    }
    return taps;
  }
};

// Memory of a weight [K, C, R, S] of any strides. `transposed` is the weight of the transposed
// convolution: channels swapped, taps reversed.
template <class T>
struct ConvWeight {
  const T* values;
  int64_t stride_k, stride_c;
  int64_t taps[Taps::kMost];

  ConvWeight(const Tensor& t, bool transposed)
      : values(data<T>(t)), stride_k(t.strides()[0]), stride_c(t.strides()[1]) {
    if (transposed) std::swap(stride_k, stride_c);
    const int64_t count = t.sizes()[2] * t.sizes()[3];
    for (int64_t tap = 0; tap < count; ++tap) {
      taps[transposed ? count - 1 - tap : tap] =
          tap / t.sizes()[3] * t.strides()[2] + tap % t.sizes()[3] * t.strides()[3];
    }
  }
};

// Weights in the order in which products read them, in the type of their operands.
struct PackedWeights {
  const void* values;
  int64_t in_channels, out_channels;
  bool finite;  // none is NaN or infinite
};

// Weights are packed in groups of this many input channels: whole squares of words in any vector.
constexpr int64_t kPackedChannels = 32;

// Packs a weight [K, C, R, S] of any strides, or its transpose, into a buffer of the calling
// thread.
template <class T>
PackedWeights packed_weights(const Conv& conv, const Tensor& conv_weight, bool transposed);

// The gradient of a convolution's output: tensors.g, or, with coefficients, the fold of it, which
// is stored in tensors.dx where that is given.
template <class T>
struct OutputGradient {
  FoldPointers<T> tensors;
  const InputGradient<Accumulate<T>>* coefficients;
};

// The arguments of a forward that all its strips share.
template <class T>
struct ConvForward {
  const Conv& conv;
  const T* x;
  const Normalisation<Accumulate<T>>& norm;
  PackedWeights packed;
  const T *conv_bias, *residual;  // or null
  T* y;
};

// The arguments of a backward that all its strips share.
template <class T>
struct ConvBackward {
  const Conv& conv;
  OutputGradient<T> dy;
  const T* x;
  const Normalisation<Accumulate<T>>& norm;
  PackedWeights packed;
  T* g;             // or null
  bool input_last;  // partial weight gradients are [tap][K][C], else [tap][C][K]
};

}  // namespace preact_kernels
