#include "depthwise.h"

#include "../host/launch.h"
#include "dtypes.h"
#include "kernels.h"
#include "parallel.h"
#include "thread_buffer.h"

namespace preact_kernels {

static DepthwiseAxis depthwise_axis(int axis, int64_t in, int64_t out,
                                    const std::vector<int64_t>& kernel,
                                    const std::vector<int64_t>& stride,
                                    const std::vector<int64_t>& padding,
                                    const std::vector<int64_t>& dilation) {
  const DepthwiseAxis found{in, out, kernel[axis], stride[axis], padding[axis], dilation[axis]};
  PK_CHECK(found.taps >= 1 && found.taps <= kMostDepthwiseTaps, "kernel: expected 1 to ",
           kMostDepthwiseTaps, " taps, got ", found.taps);
  PK_CHECK(found.stride > 0, "stride: expected positive values, got ", found.stride);
  PK_CHECK(found.dilation > 0, "dilation: expected positive values, got ", found.dilation);
  PK_CHECK(found.padding >= 0, "padding: expected values of 0 or more, got ", found.padding);
  const int64_t reach = in + 2 * found.padding - found.dilation * (found.taps - 1) - 1;
  PK_CHECK(reach >= 0 && reach / found.stride + 1 == out, "dy: expected a size of ",
           reach < 0 ? 0 : reach / found.stride + 1, " on axis ", axis + 2, ", got ", out);
  return found;
}

// The gradient [C, 1, R, S] of the weight of a depthwise convolution of x [N, C, H, W], for the
// gradient dy of its output. Taps outside of the image are left out.
Tensor depthwise_weight_gradient(const Tensor& dy, const Tensor& x,
                                 const std::vector<int64_t>& kernel,
                                 const std::vector<int64_t>& stride,
                                 const std::vector<int64_t>& padding,
                                 const std::vector<int64_t>& dilation) {
  // A part of the rows has about so many pixels, so that few values are summed in float32.
  constexpr int64_t kPixels = 2048, kChannels = 64;
  const ImageSizes in = check_images("x", x), out = check_images("dy", dy);
  for (const auto* values : {&kernel, &stride, &padding, &dilation}) {
    PK_CHECK(values->size() == 2, "kernel, stride, padding and dilation: expected 2 values, got ",
             values->size());
  }
  const auto axis = [&](int i, int64_t before, int64_t after) {
    return depthwise_axis(i, before, after, kernel, stride, padding, dilation);
  };
  const DepthwiseSizes sizes{in.images, in.channels, axis(0, in.height, out.height),
                             axis(1, in.width, out.width)};
  PK_CHECK(sizes.w.taps % 2 == 1 && sizes.w.taps > 1,
           "kernel: expected rows of 3, 5 or 7 taps, got ", sizes.w.taps);
  check_like("dy", dy, {in.images, in.channels, out.height, out.width}, x);
  PK_CHECK(x.scalar_type() != ScalarType::Double, "x: expected float32, bfloat16 or float16");
  const Tensor dweight = new_tensor(x, {in.channels, 1, kernel[0], kernel[1]}, x.scalar_type());
  for_single_dtype(x.scalar_type(), [&](auto value) {
    using T = decltype(value);
    using A = Accumulate<T>;
    const int64_t rows = in.images * out.height, channels = in.channels, taps = sizes.taps();
    const int64_t rows_of_part = (kPixels + out.width - 1) / out.width;
    const int64_t parts = (rows + rows_of_part - 1) / rows_of_part;
    const int64_t groups = std::max<int64_t>(1, channels / kChannels);  // the last has more
    A* sums = thread_buffer<A, Use::kPartials>(parts * taps * channels);
    const T *from = data<T>(x), *gradient = data<T>(dy);
    for_tiles(parts * groups, [&](int64_t tile) {
      const int64_t part = tile / groups, group = tile % groups;
      const DepthwisePart of_tile{part * rows_of_part, std::min(rows, (part + 1) * rows_of_part),
                                  group * kChannels,
                                  group == groups - 1 ? channels : (group + 1) * kChannels};
      PK_CALL(depthwise_weight_sums, sizes, of_tile, from, gradient, sums + part * taps * channels);
    });
    T* to = mutable_data<T>(dweight);
    for_rows(taps, parts * channels, [&](int64_t tap) {
      for (int64_t c = 0; c < channels; ++c) {
        double total = 0;
        for (int64_t part = 0; part < parts; ++part)
          total += sums[(part * taps + tap) * channels + c];
        to[c * taps + tap] = rounded_to<T>(static_cast<A>(total));
      }
    });
  });
  return dweight;
}

}  // namespace preact_kernels
