// The gradient of the weight of a depthwise convolution.

#include <algorithm>

#include "../kernels.h"
#include "simd.h"

PK_BEGIN_ISA

// Sums of vectors of channels: one for each tap of some rows of the kernel. All are in registers
// while the columns of a row of the output are read.
template <class T, int kRows, int kTaps, class Lanes>
struct TapSums {
  using A = Accumulate<T>;
  const DepthwiseAxis& columns;
  int64_t pixel, row;  // distances, in values: of two columns, of two rows under the kernel
  Lanes lanes;

  template <bool kIsInside>
  PK_INLINE void add(Vector<A> (&sum)[kRows][kTaps], const T* x, const T* dy, int64_t begin,
                     int64_t end) const {
    for (int64_t column = begin; column < end; ++column) {
      const Vector<A> gradient = load(dy + column * pixel, lanes);
      const int64_t first = columns.first(column);
      for (int s = 0; s < kTaps; ++s) {
        const int64_t place = first + s * columns.dilation;
        if (!kIsInside && !columns.is_inside(place)) continue;
        for (int r = 0; r < kRows; ++r) {
          sum[r][s] += gradient * load(x + r * row + place * pixel, lanes);
        }
      }
    }
  }

  // Adds the products of a row of the output, `dy`, and the rows of the input under it, from `x`.
  PK_OUTLINE void add_row(const T* x, const T* dy, Vector<A>* sums) const {
    Vector<A> sum[kRows][kTaps];
    for (int i = 0; i < kRows * kTaps; ++i) sum[i / kTaps][i % kTaps] = sums[i];
    // The columns of which all taps are inside of the image.
    const int64_t reach = (kTaps - 1) * columns.dilation, last = columns.in - 1 - reach;
    const int64_t after = last + columns.padding;
    int64_t begin = (columns.padding + columns.stride - 1) / columns.stride;
    int64_t end = after < 0 ? 0 : after / columns.stride + 1;
    begin = std::min(begin, columns.out);
    end = std::clamp(end, begin, columns.out);
    add<false>(sum, x, dy, 0, begin);
    add<true>(sum, x, dy, begin, end);
    add<false>(sum, x, dy, end, columns.out);
    for (int i = 0; i < kRows * kTaps; ++i) sums[i] = sum[i / kTaps][i % kTaps];
  }
};

// Rows of the kernel whose sums fit in the registers.
template <int kTaps>
constexpr int kRowsAtOnce = std::clamp((kRegisters - 4) / kTaps, 1, kTaps);

// Adds `count` rows of the kernel, at most kRowsAtOnce at a time.
template <class T, int kTaps, int kRows = kRowsAtOnce<kTaps>, class Lanes>
PK_INLINE void add_rows(const DepthwiseAxis& columns, int64_t pixel, int64_t row, Lanes lanes,
                        const T* x, const T* dy, Vector<Accumulate<T>>* sums, int64_t count) {
  for (; count >= kRows; count -= kRows) {
    const TapSums<T, kRows, kTaps, Lanes> taps{columns, pixel, row, lanes};
    taps.add_row(x, dy, sums);
    x += kRows * row;
    sums += kRows * kTaps;
  }
  if constexpr (kRows > 1) {
    add_rows<T, kTaps, kRows - 1>(columns, pixel, row, lanes, x, dy, sums, count);
  }
}

template <class T, int kTaps, class Lanes>
PK_OUTLINE void add_vector(const DepthwiseSizes& sizes, const DepthwisePart& part, const T* x,
                           const T* dy, Lanes lanes, Accumulate<T>* sums) {
  const DepthwiseAxis &rows = sizes.h, &columns = sizes.w;
  const int64_t pixel = sizes.channels, line = columns.in * pixel;
  Vector<Accumulate<T>> found[kMostDepthwiseTaps * kTaps] = {};
  for (int64_t at = part.first_row; at < part.end_row; ++at) {
    const int64_t image = at / rows.out, first = rows.first(at % rows.out);
    int64_t begin = 0, end = rows.taps;
    while (begin < end && !rows.is_inside(first + begin * rows.dilation)) ++begin;
    while (begin < end && !rows.is_inside(first + (end - 1) * rows.dilation)) --end;
    const T* under = x + (image * rows.in + first + begin * rows.dilation) * line;
    add_rows<T, kTaps>(columns, pixel, rows.dilation * line, lanes, under,
                       dy + at * columns.out * pixel, found + begin * kTaps, end - begin);
  }
  for (int64_t tap = 0; tap < sizes.taps(); ++tap) store(sums + tap * pixel, found[tap], lanes);
}

// sums [taps, C] = dy times the values of `x` under each tap, summed over the rows of a part, for
// the channels of the part.
template <class T>
void depthwise_weight_sums(const DepthwiseSizes& sizes, const DepthwisePart& part, const T* x,
                           const T* dy, Accumulate<T>* sums) {
  constexpr int lanes = kLanes<Accumulate<T>>;
  for (int64_t c = part.first_channel; c < part.end_channel; c += lanes) {
    // The last vector begins earlier rather than being partly filled; it writes some sums again.
    const int64_t channel = std::max(part.first_channel, std::min(c, part.end_channel - lanes));
    const int filled = static_cast<int>(std::min<int64_t>(lanes, part.end_channel - channel));
    const auto add = [&](auto taps) {
      constexpr int kTaps = decltype(taps)::value;
      const T *from = x + channel, *gradient = dy + channel;
      if (filled == lanes) {
        const std::integral_constant<int, lanes> all;
        add_vector<T, kTaps>(sizes, part, from, gradient, all, sums + channel);
      } else {
        add_vector<T, kTaps>(sizes, part, from, gradient, filled, sums + channel);
      }
    };
    switch (sizes.w.taps) {
      case 3:
        add(std::integral_constant<int, 3>{});
        break;
      case 5:
        add(std::integral_constant<int, 5>{});
        break;
      default:
        add(std::integral_constant<int, 7>{});
    }
  }
}

#define PK_INSTANTIATE(T) template decltype(depthwise_weight_sums<T>) depthwise_weight_sums<T>;
PK_FOR_CONV_DTYPES(PK_INSTANTIATE)

PK_END_ISA
