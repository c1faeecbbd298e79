// Depthwise convolutions: a kernel for each channel.
#pragma once

#include "../args.h"

namespace preact_kernels {

// The position of the taps along one axis.
struct DepthwiseAxis {
  int64_t in, out;  // sizes
  int64_t taps, stride, padding, dilation;

  int64_t first(int64_t position) const { return position * stride - padding; }
  bool is_inside(int64_t place) const { return place >= 0 && place < in; }
};

struct DepthwiseSizes {
  int64_t images, channels;
  DepthwiseAxis h, w;

  int64_t taps() const { return h.taps * w.taps; }
};

// Rows of the output, counted over all images, and channels.
struct DepthwisePart {
  int64_t first_row, end_row;
  int64_t first_channel, end_channel;
};

// Taps in a row of the kernel that the kernels serve: odd numbers.
constexpr int kMostDepthwiseTaps = 7;

}  // namespace preact_kernels
