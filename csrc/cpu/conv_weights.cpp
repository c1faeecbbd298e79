#include "conv_weights.h"

#include <vector>

#include "../host/launch.h"
#include "kernels.h"
#include "parallel.h"

namespace preact_kernels {

void check_conv_is_served(const char* name, const ConvSizes& conv, const ConvDtypes& dtypes,
                          const Tensor& conv_weight) {
  PK_CHECK(is_served_dtype(dtypes.products) && dtypes.products != ScalarType::Double,
           "dtype: expected float32, bfloat16 or float16 for direct convolutions");
  PK_CHECK(dtypes.x == dtypes.products, "dtype: expected that of x");
  PK_CHECK(dtypes.y == dtypes.products, "residual, g, step_x: expected the dtype of x");
  PK_CHECK(conv_weight.scalar_type() == dtypes.x, name, ": expected the dtype of x");
  const int64_t lanes = vector_bytes() / static_cast<int64_t>(sizeof(float));
  PK_CHECK(conv.out_channels > 0 && conv.out_channels % lanes == 0 && conv.in_channels % lanes == 0,
           name, ": expected channels in multiples of ", lanes, ", got ", conv.out_channels,
           " and ", conv.in_channels);
  PK_CHECK(conv.kernel_h % 2 == 1 && conv.kernel_w % 2 == 1 && conv.taps() <= Taps::kMost, name,
           ": expected an odd kernel of at most ", Taps::kMost, " taps");
  const bool has_stride = conv.stride.h > 1 || conv.stride.w > 1;
  PK_CHECK(conv.taps() > 1 || !has_stride, "stride: expected 1 for a 1x1 kernel");
}

template <class T>
PackedWeights packed_weights(const ConvSizes& conv, const Tensor& conv_weight, bool transposed) {
  using A = Accumulate<T>;
  const ConvWeight<T> weight = memory_of<T>(conv_weight, transposed);
  const int64_t in_channels = transposed ? conv.out_channels : conv.in_channels;
  const int64_t out_channels = transposed ? conv.in_channels : conv.out_channels;
  const int64_t count = conv.taps() * in_channels * out_channels;
  const bool is_winograd = has_winograd<T>(conv);
  const int64_t transformed = is_winograd ? Winograd::kPositions * in_channels * out_channels : 0;
  A* packed = thread_buffer<A, Use::kWeights>(count + transformed);
  const int64_t groups = (in_channels + kPackedChannels - 1) / kPackedChannels;
  std::vector<TapSquares<A>> squares(groups);
  for_rows(groups, kPackedChannels * conv.taps() * out_channels, [&](int64_t group) {
    const int64_t first = group * kPackedChannels;
    PK_CALL_PRODUCT(T, pack_weights, weight, conv, in_channels, out_channels, packed, first);
    if (!is_winograd) return;
    PK_CALL_PRODUCT(T, transform_weights<T>, packed, conv, in_channels, out_channels,
                    packed + count, first, squares[group]);
  });
  TapSquares<A> sums;
  for (const TapSquares<A>& of_group : squares) {
    for (int t = 0; t < 9; ++t) sums.of_taps[t] += of_group.of_taps[t];
  }
  const bool is_served = is_winograd && PK_CALL_PRODUCT(T, are_served<T>, sums);
  // A 1x1 kernel has no halo: its products never read these weights outside the image.
  const bool finite =
      conv.taps() == 1 || is_served || PK_CALL_PRODUCT(T, is_finite<T>, packed, count);
  return {packed, in_channels, out_channels, finite, is_served ? packed + count : nullptr};
}

template PackedWeights packed_weights<float>(const ConvSizes&, const Tensor&, bool);
template PackedWeights packed_weights<BFloat16>(const ConvSizes&, const Tensor&, bool);
template PackedWeights packed_weights<Float16>(const ConvSizes&, const Tensor&, bool);

}  // namespace preact_kernels
