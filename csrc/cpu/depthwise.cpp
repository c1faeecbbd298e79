#include "depthwise.h"

#include <limits>

#include "../host/launch.h"
#include "dtypes.h"
#include "kernels.h"
#include "parallel.h"
#include "thread_buffer.h"

namespace preact_kernels {

namespace {

void check_values(const char* name, const std::vector<int64_t>& values, int64_t least) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // sizes must not overflow
  PK_CHECK(values.size() == 2, name, ": expected 2 values, got ", values.size());
  for (const int64_t value : values) {
    PK_CHECK(value >= least && value <= kMost, name, ": expected values from ", least, " to ",
             kMost, ", got ", value);
  }
}

// A part of [0, size), cut into parts of this length.
Range part_of(int64_t size, int64_t length, int64_t index) {
  return {index * length, std::min(size, (index + 1) * length)};
}

}  // namespace

// The gradient [C, 1, R, S] of the weight of a depthwise convolution of x [N, C, H, W], for the
// gradient dy of its output. Taps outside of the image are left out.
Tensor depthwise_weight_gradient(const Tensor& dy, const Tensor& x,
                                 const std::vector<int64_t>& kernel,
                                 const std::vector<int64_t>& stride,
                                 const std::vector<int64_t>& padding,
                                 const std::vector<int64_t>& dilation) {
  // The most pixels and, but for the last group, the channels of a task. The sums of tasks are
  // added in float64.
  constexpr int64_t kPixels = 2048, kChannels = 64;
  const ImageSizes in = check_images("x", x), out = check_images("dy", dy);
  check_values("kernel", kernel, 1);
  check_values("stride", stride, 1);
  check_values("padding", padding, 0);
  check_values("dilation", dilation, 1);
  PK_CHECK(kernel[0] <= kMostDepthwiseTaps, "kernel: expected at most ", kMostDepthwiseTaps,
           " rows, got ", kernel[0]);
  PK_CHECK(kernel[1] == 3 || kernel[1] == 5 || kernel[1] == 7,
           "kernel: expected 3, 5 or 7 columns, got ", kernel[1]);
  const int64_t least = vector_bytes() / static_cast<int64_t>(sizeof(float));
  PK_CHECK(in.channels >= least, "x: expected at least ", least, " channels, got ", in.channels);
  PK_CHECK(x.scalar_type() != ScalarType::Double, "x: expected float32, bfloat16 or float16");
  const auto axis = [&](int i, int64_t input, int64_t output) {
    const int64_t read = input + 2 * padding[i] - dilation[i] * (kernel[i] - 1);
    const int64_t expected = read < 1 ? 0 : (read - 1) / stride[i] + 1;
    PK_CHECK(output == expected, "dy: expected a size of ", expected, " on axis ", i + 2, ", got ",
             output);
    return DepthwiseAxis{input, output, kernel[i], stride[i], padding[i], dilation[i]};
  };
  const DepthwiseSizes sizes{in.images, in.channels, axis(0, in.height, out.height),
                             axis(1, in.width, out.width)};
  check_like("dy", dy, {in.images, in.channels, out.height, out.width}, x);
  const Tensor dweight = new_tensor(x, {in.channels, 1, kernel[0], kernel[1]}, x.scalar_type());
  for_single_dtype(x.scalar_type(), [&](auto value) {
    using T = decltype(value);
    using A = Accumulate<T>;
    const int64_t rows = in.images * out.height, channels = in.channels, taps = sizes.taps();
    const int64_t width = std::min(out.width, kPixels), height = kPixels / width;
    const int64_t across = (out.width + width - 1) / width;
    const int64_t parts = (rows + height - 1) / height * across;
    const int64_t groups = std::max<int64_t>(1, channels / kChannels);
    A* sums = thread_buffer<A, Use::kPartials>(parts * taps * channels);
    const T *from = data<T>(x), *gradient = data<T>(dy);
    for_tiles(parts * groups, [&](int64_t task) {
      const int64_t part = task / groups, group = task % groups;
      Range of_group{group * kChannels, (group + 1) * kChannels};
      if (group == groups - 1) of_group.end = channels;
      const DepthwisePart of_task{part_of(rows, height, part / across),
                                  part_of(out.width, width, part % across), of_group};
      PK_CALL(depthwise_weight_sums, sizes, of_task, from, gradient, sums + part * taps * channels);
    });
    T* to = mutable_data<T>(dweight);
    for_rows(taps, parts * channels, [&](int64_t tap) {
      for (int64_t c = 0; c < channels; ++c) {
        double sum = 0;
        for (int64_t part = 0; part < parts; ++part) {
          sum += sums[(part * taps + tap) * channels + c];
        }
        to[c * taps + tap] = rounded_to<T>(static_cast<A>(sum));
      }
    });
  });
  return dweight;
}

}  // namespace preact_kernels
