// The gradient of the weight of a depthwise convolution.

#include <algorithm>

#include "../kernels.h"
#include "simd.h"

PK_BEGIN_ISA

// Sums for kRows rows of the kernel and a vector of channels. They stay in registers while a row of
// the output is read.
template <class T, int kRows, int kTaps>
struct TapSums {
  using A = Accumulate<T>;
  const DepthwiseAxis& columns;
  int64_t pixel, row;  // distances in memory: of two columns, of two rows of the kernel

  template <bool kIsInside>
  PK_INLINE void add(Vector<A> (&sum)[kRows][kTaps], const T* x, const T* dy, int64_t begin,
                     int64_t end) const {
    for (int64_t column = begin; column < end; ++column) {
      const Vector<A> gradient = load(dy + column * pixel);
      for (int s = 0; s < kTaps; ++s) {
        const int64_t read = columns.first(column) + s * columns.dilation;
        if (!kIsInside && !columns.has(read)) continue;
        for (int r = 0; r < kRows; ++r) {
          sum[r][s] += gradient * load(x + r * row + read * pixel);
        }
      }
    }
  }

  // Adds the products of columns of a row `dy` of the output with the rows of the input that the
  // rows of the kernel read; x is the first of these.
  PK_OUTLINE void add_row(const T* x, const T* dy, const Range& part, Vector<A>* sums) const {
    Vector<A> sum[kRows][kTaps];
    for (int i = 0; i < kRows * kTaps; ++i) sum[i / kTaps][i % kTaps] = sums[i];
    // From `begin` to `end`, all taps are inside of the image.
    const int64_t last = columns.input - 1 - (kTaps - 1) * columns.dilation + columns.padding;
    int64_t begin = (columns.padding + columns.stride - 1) / columns.stride;
    int64_t end = last < 0 ? 0 : last / columns.stride + 1;
    begin = std::clamp(begin, part.begin, part.end);
    end = std::clamp(end, begin, part.end);
    add<false>(sum, x, dy, part.begin, begin);
    add<true>(sum, x, dy, begin, end);
    add<false>(sum, x, dy, end, part.end);
    for (int i = 0; i < kRows * kTaps; ++i) sums[i] = sum[i / kTaps][i % kTaps];
  }
};

// Rows of the kernel whose sums fit in the registers.
template <int kTaps>
constexpr int kRowsAtOnce = std::clamp((kRegisters - 4) / kTaps, 1, kTaps);

// Adds `count` rows of the kernel, at most kRows at a time.
template <class T, int kTaps, int kRows = kRowsAtOnce<kTaps>>
PK_INLINE void add_rows(const DepthwiseAxis& columns, int64_t pixel, int64_t row, const T* x,
                        const T* dy, const Range& part, int64_t count,
                        Vector<Accumulate<T>>* sums) {
  for (; count >= kRows; count -= kRows) {
    TapSums<T, kRows, kTaps>{columns, pixel, row}.add_row(x, dy, part, sums);
    x += kRows * row;
    sums += kRows * kTaps;
  }
  if constexpr (kRows > 1) {
    add_rows<T, kTaps, kRows - 1>(columns, pixel, row, x, dy, part, count, sums);
  }
}

// The most products of a sum in registers. The error grows with the length of a sum.
constexpr int64_t kShortSum = 128;

// The sums of a vector of channels.
template <class T, int kTaps>
PK_OUTLINE void vector_weight_sums(const DepthwiseSizes& sizes, const DepthwisePart& part,
                                   const T* x, const T* dy, Accumulate<T>* sums) {
  const DepthwiseAxis &rows = sizes.h, &columns = sizes.w;
  const int64_t pixel = sizes.channels, line = columns.input * pixel;
  constexpr int kMost = kMostDepthwiseTaps * kTaps;
  Vector<Accumulate<T>> short_sum[kMost] = {}, sum[kMost] = {};
  int64_t summed = 0;
  const auto add_short_sums = [&] {
    for (int64_t tap = 0; tap < sizes.taps(); ++tap) {
      sum[tap] += short_sum[tap];
      short_sum[tap] = Vector<Accumulate<T>>{};
    }
    summed = 0;
  };
  for (int64_t at = part.rows.begin; at < part.rows.end; ++at) {
    const int64_t image = at / rows.output, first = rows.first(at % rows.output);
    int64_t begin = 0, end = rows.taps;
    while (begin < end && !rows.has(first + begin * rows.dilation)) ++begin;
    while (begin < end && !rows.has(first + (end - 1) * rows.dilation)) --end;
    if (begin == end) continue;
    const T* read = x + (image * rows.input + first + begin * rows.dilation) * line;
    const T* gradient = dy + at * columns.output * pixel;
    for (int64_t c = part.columns.begin; c < part.columns.end; c += kShortSum) {
      const Range read_columns{c, std::min(c + kShortSum, part.columns.end)};
      const int64_t count = read_columns.end - c;
      if (summed + count > kShortSum) add_short_sums();
      summed += count;
      add_rows<T, kTaps>(columns, pixel, rows.dilation * line, read, gradient, read_columns,
                         end - begin, short_sum + begin * kTaps);
    }
  }
  add_short_sums();
  for (int64_t tap = 0; tap < sizes.taps(); ++tap) store(sums + tap * pixel, sum[tap]);
}

// sums [taps, C] = dy times the value of x under each tap, summed over a part, for its channels: at
// least a vector of them.
template <class T>
void depthwise_weight_sums(const DepthwiseSizes& sizes, const DepthwisePart& part, const T* x,
                           const T* dy, Accumulate<T>* sums) {
  constexpr int lanes = kLanes<Accumulate<T>>;
  for (int64_t first = part.channels.begin; first < part.channels.end; first += lanes) {
    // The last vector may overlap the one before, with the same sums.
    const int64_t c = std::min(first, part.channels.end - lanes);
    const auto add = [&](auto taps) {
      vector_weight_sums<T, decltype(taps)::value>(sizes, part, x + c, dy + c, sums + c);
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
