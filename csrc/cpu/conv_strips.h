// Shapes of a direct convolution, and how its pixels are cut into strips.
#pragma once

#include <algorithm>
#include <iterator>
#include <utility>

#include "batch_norm.h"
#include "isa.h"
#include "thread_buffer.h"
#include "types.h"

namespace preact_kernels {

// A convolution of stride 1, one group, an odd kernel and "same" padding.
struct ConvSize {
  int64_t images, height, width, in_channels, out_channels, kernel_h, kernel_w;

  int64_t taps() const { return kernel_h * kernel_w; }
  int64_t halo_h() const { return kernel_h / 2; }
  int64_t halo_w() const { return kernel_w / 2; }
  int64_t pixels() const { return images * height * width; }
};

// Some rows of one image.
struct Strip {
  int64_t first_pixel;  // of the batch
  int64_t row, rows;    // of the image
  int64_t image_rows, width;
};

// All strips of a batch. For a 1x1 kernel the batch is one long row, cut anywhere.
struct Strips {
  ConvSize conv;
  int64_t length;  // rows of a strip, or pixels of one for a 1x1 kernel
  int64_t per_image, count;

  Strips(const ConvSize& conv, int64_t values) : conv(conv) {
    const int64_t widest = std::max(conv.in_channels, conv.out_channels);
    if (conv.taps() == 1) {
      constexpr int64_t kWholeTiles = 42;  // of 6, 7 or 14 pixels by 2 or 4 vectors
      length = std::clamp<int64_t>(values / widest / kWholeTiles, 1, 5) * kWholeTiles;
      per_image = 0;
      count = (conv.pixels() + length - 1) / length;
      return;
    }
    const int64_t row_values = (conv.width + 2 * conv.halo_w()) * widest;
    const int64_t most = std::max<int64_t>(1, values / row_values - 2 * conv.halo_h());
    per_image = (conv.height + most - 1) / most;
    length = (conv.height + per_image - 1) / per_image;
    count = conv.images * per_image;
  }

  Strip operator[](int64_t index) const {
    if (conv.taps() == 1) {
      const int64_t first = index * length;
      return {first, 0, 1, 1, std::min(length, conv.pixels() - first)};
    }
    const int64_t image = index / per_image;
    const int64_t row = index % per_image * length;
    return {(image * conv.height + row) * conv.width, row, std::min(length, conv.height - row),
            conv.height, conv.width};
  }

  // Values of one bordered operand of `channels`.
  int64_t scratch_values(int64_t channels) const {
    if (conv.taps() == 1) return length * channels;
    return (length + 2 * conv.halo_h()) * (conv.width + 2 * conv.halo_w()) * channels;
  }
};

// Taps of a kernel: where each lies in a bordered operand, from the first value of the tap at the
// upper left, and its place among the packed weights.
struct Taps {
  static constexpr int64_t kMost = 49;
  int64_t count = 0;
  int64_t offset[kMost];
  int64_t place[kMost];

  Taps() = default;
  Taps(const ConvSize& conv, int64_t pitch, int64_t channels) {
    for (int64_t r = 0; r < conv.kernel_h; ++r) {
      for (int64_t s = 0; s < conv.kernel_w; ++s) add(r * pitch + s * channels, count);
    }
  }

  void add(int64_t at, int64_t index) {
    offset[count] = at;
    place[count++] = index;
  }

  // Those that meet the image from a pixel in `row` of the image and `column`.
  Taps inside(const ConvSize& conv, int64_t row, int64_t column) const {
    Taps taps;
    for (int64_t t = 0; t < count; ++t) {
      const int64_t r = row + t / conv.kernel_w - conv.halo_h();
      const int64_t s = column + t % conv.kernel_w - conv.halo_w();
      if (r >= 0 && r < conv.height && s >= 0 && s < conv.width) taps.add(offset[t], place[t]);
    }
    return taps;
  }
};

// Memory of a weight [K, C, R, S] of any strides: of a convolution, or (`transposed`) of the
// convolution that is its transpose, with channels swapped and taps turned round.
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

// Weights in the order in which products read them, and whether none is NaN or infinite.
template <class A>
struct PackedWeights {
  const A* values;
  bool finite;
};

// A weight [K, C, R, S] of any strides, packed for the convolution, or for its transpose; in a
// buffer of the calling thread.
template <class T>
PackedWeights<Accumulate<T>> packed_weights(const ConvSize& conv, const Tensor& conv_weight,
                                            bool transposed);

// The gradient that arrives at a convolution's output: `dy`, or where `coefficients` are given
// [skip +] a*dy + b*(z - mean) + c, still folded; `dz` then keeps it where it is wanted whole.
template <class T, class A>
struct Arriving {
  const T* dy;
  const T* skip;
  const T* z;
  T* dz;
  const InputGradient<A>* coefficients;
};

// Values of the wider operand of a strip: 48 KiB in float32, little beside a second-level cache. A
// product takes a few pixels of it at a time, so that the first-level cache is the weights'.
constexpr int64_t kStripValues = 12 * 1024;

// The sizes of the convolution of `x`, once it is seen to be one that these kernels serve.
inline ConvSize check_conv(const Tensor& x, const Tensor& conv_weight) {
  const Activation size = check_activation("x", x);
  STD_TORCH_CHECK(conv_weight.dim() == 4 && conv_weight.is_cpu(),
                  "conv_weight: expected a CPU tensor of 4 dimensions");
  STD_TORCH_CHECK(conv_weight.scalar_type() == x.scalar_type(),
                  "conv_weight: expected the dtype of x");
  const auto shape = conv_weight.sizes();
  STD_TORCH_CHECK(shape[0] > 0, "conv_weight: expected at least one output channel, got none");
  STD_TORCH_CHECK(shape[1] == size.channels, "conv_weight: expected in_channels ", size.channels,
                  " to match x, got ", shape[1]);
  const int64_t lanes = vector_bytes(isa()) / static_cast<int64_t>(sizeof(float));
  STD_TORCH_CHECK(shape[0] % lanes == 0 && shape[1] % lanes == 0,
                  "conv_weight: expected channels in multiples of ", lanes, ", got ", shape[0],
                  " and ", shape[1]);
  STD_TORCH_CHECK(shape[2] % 2 == 1 && shape[3] % 2 == 1 && shape[2] * shape[3] <= Taps::kMost,
                  "conv_weight: expected an odd kernel of at most ", Taps::kMost, " taps");
  return {size.images, size.height, size.width, shape[1], shape[0], shape[2], shape[3]};
}

}  // namespace preact_kernels
