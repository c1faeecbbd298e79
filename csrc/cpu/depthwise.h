// Depthwise convolutions: a kernel for each channel.
#pragma once

#include "../args.h"

namespace preact_kernels {

// Sizes along one axis.
struct DepthwiseAxis {
  int64_t input, output, taps, stride, padding, dilation;

  // The position in the input of tap 0 for a position in the output. It may be outside.
  int64_t first(int64_t position) const { return position * stride - padding; }
  bool has(int64_t position) const { return position >= 0 && position < input; }
};

struct DepthwiseSizes {
  int64_t images, channels;
  DepthwiseAxis h, w;

  int64_t taps() const { return h.taps * w.taps; }
};

struct Range {
  int64_t begin, end;
};

// A part of the output. Rows are counted over all images.
struct DepthwisePart {
  Range rows, columns, channels;
};

// Kernels have at most this many rows, and this or a lesser odd number of columns.
constexpr int kMostDepthwiseTaps = 7;

}  // namespace preact_kernels
