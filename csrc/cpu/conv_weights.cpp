#include "conv_strips.h"
#include "isa.h"
#include "tiles.h"

#define PK_KERNELS "conv_weights_kernels.h"
#include "for_each_isa.h"

namespace preact_kernels {

template <class T>
PackedWeights<Accumulate<T>> packed_weights(const ConvSize& conv, const Tensor& conv_weight,
                                            bool transposed) {
  using A = Accumulate<T>;
  const ConvWeight<T> weight(conv_weight, transposed);
  const int64_t in_channels = transposed ? conv.out_channels : conv.in_channels;
  const int64_t out_channels = transposed ? conv.in_channels : conv.out_channels;
  const int64_t count = conv.taps() * in_channels * out_channels;
  A* packed = thread_buffer<A, Use::kWeights>(count);
  for_rows(in_channels, conv.taps() * out_channels, [&](int64_t row) {
    PK_CALL(pack, packed, conv, in_channels, out_channels, weight, row);
  });
  // A 1x1 kernel has no border.
  return {packed, conv.taps() == 1 || PK_CALL(all_finite, packed, count)};
}

template PackedWeights<float> packed_weights<float>(const ConvSize&, const Tensor&, bool);
template PackedWeights<float> packed_weights<BFloat16>(const ConvSize&, const Tensor&, bool);

}  // namespace preact_kernels
