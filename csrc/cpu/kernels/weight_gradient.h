// The gradient of a convolution's weight: a product over pixels.
//
// One operand is `wide`, a vector of channels, the other `narrow`, broadcast. Dot products read
// pairs of pixels: `narrow` is copied in pairs, `wide` is interleaved in registers.
#pragma once

#include "../image_groups.h"
#include "conv_product.h"

PK_BEGIN_ISA

// One operand: pixels `step` values apart, in rows `pitch` values apart, of images `image_pitch`
// values apart.
template <class O>
struct PixelRows {
  const O* values;
  int64_t image_pitch, pitch, step, channels;

  PixelRows(const O* values, const Haloed& operand)
      : values(values),
        image_pitch(operand.values()),
        pitch(operand.pitch()),
        step(operand.channels),
        channels(operand.channels) {}
  // Treats all images as one.
  PixelRows(const O* values, const Interleaved& operand)
      : values(values),
        image_pitch(0),
        pitch(operand.pitch()),
        step(operand.step()),
        channels(operand.channels) {}

  PixelRows from(int64_t row, int64_t column) const {
    PixelRows rows = *this;
    rows.values += row * pitch + column * step;
    return rows;
  }
  // Every stride.h-th row and stride.w-th pixel.
  PixelRows strided(Stride stride) const {
    PixelRows rows = *this;
    rows.pitch *= stride.h;
    rows.step *= stride.w;
    return rows;
  }
  const O* at(int64_t image, int64_t row) const {
    return values + image * image_pitch + row * pitch;
  }
};

// The pairs of pixels of `rows` rows of `width` pixels, in `memory`.
template <class O>
PK_INLINE PixelRows<O> paired_rows(const O* memory, int64_t rows, int64_t width,
                                   const PixelRows<O>& narrow) {
  return {memory, Haloed{rows, (width + 1) / 2 * 2, narrow.channels}};
}

// The pixels of both operands that one tap of the kernel multiplies.
struct TapRange {
  int64_t images, rows, width;
};

#ifdef PK_HAS_DOT
typedef uint16_t FullHalves __attribute__((vector_size(kVectorBytes)));

// Pairs of values of `first` and `second` with the same index: 16 pairs from `kFrom` on.
template <int kFrom, int... kIndex>
PK_INLINE FullBits paired(FullHalves first, FullHalves second,
                          std::integer_sequence<int, kIndex...>) {
  return reinterpret_cast<FullBits>(
      PK_SHUFFLE(first, second, FullHalves, (kFrom + kIndex / 2 + kIndex % 2 * 32)...));
}
template <int kFrom>
PK_INLINE FullBits paired(FullHalves first, FullHalves second) {
  return paired<kFrom>(first, second, std::make_integer_sequence<int, 32>{});
}

PK_INLINE FullHalves load_32(const BFloat16* from) {
  FullHalves v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

// The other 16 values of the result are undefined.
PK_INLINE FullHalves load_16(const BFloat16* from) {
#ifdef PK_TARGET
  HalfBits half;
  __builtin_memcpy(&half, from, sizeof half);
  return reinterpret_cast<FullHalves>(_mm512_castsi256_si512(reinterpret_cast<__m256i>(half)));
#else
  FullHalves v = {};
  __builtin_memcpy(&v, from, sizeof v / 2);
  return v;
#endif
}

// pairs[image][row][p / 2][n][p % 2] = narrow[image][row][p][n]. The last pixel of an odd width is
// paired with 0.
PK_INLINE void fill_pairs(const PixelRows<BFloat16>& narrow, const TapRange& range,
                          BFloat16* pairs) {
  const int64_t channels = narrow.channels;
  for (int64_t row = 0; row < range.images * range.rows; ++row) {
    const BFloat16* from = narrow.at(row / range.rows, row % range.rows);
    for (int64_t p = 0; p < range.width; p += 2) {
      for (int64_t n = 0; n < channels; n += 16) {
        const FullHalves first = load_16(from + n);
        const FullHalves second =
            p + 1 < range.width ? load_16(from + narrow.step + n) : FullHalves{};
        const FullBits both = paired<0>(first, second);
        __builtin_memcpy(pairs + 2 * n, &both, sizeof both);
      }
      from += 2 * narrow.step;
      pairs += 2 * channels;
    }
  }
}

template <int kVectors>
PK_INLINE void load_pixels(const BFloat16* first, const BFloat16* second, FullBits (&w)[kVectors]) {
  if constexpr (kVectors == 1) {
    w[0] = paired<0>(load_16(first), load_16(second));
  } else {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; v += 2) {
      const FullHalves a = load_32(first + v * 16), b = load_32(second + v * 16);
      w[v] = paired<0>(a, b);
      w[v + 1] = paired<16>(a, b);
    }
  }
}
#endif

// Loads some channels of a pixel, or of a pair of pixels in dot products.
template <class A, int kVectors>
PK_INLINE void load_pixels(const A* first, const A*, Vector<A> (&w)[kVectors]) {
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) w[v] = load(first + v * kLanes<A>);
}

// partial[n][w] += sum over pixels of narrow[p][n] * wide[p][w]. In dot products `narrow` holds
// pairs of pixels, narrow[image][row][p / 2][n][p % 2].
template <class O>
PK_INLINE void add_tap(const PixelRows<O>& narrow, const PixelRows<O>& wide, const TapRange& range,
                       Accumulate<O>* partial) {
  using A = Accumulate<O>;
  alignas(64) static constexpr O kZeros[kMaxVectors * kLanes<A>] = {};
  const int64_t narrow_step = kDepth<O> * narrow.step, wide_step = kDepth<O> * wide.step;
  for_channel_tiles<A>(wide.channels, kMaxVectors, [&](auto vectors, int64_t first) PK_LAMBDA {
    constexpr int kVectors = decltype(vectors)::value, kMost = max_tile_rows(kVectors);
    int64_t n = 0;
    while (n < narrow.channels) {
      const int64_t tile = next_rows<kMost>(narrow.channels - n);
      with_rows<kMost>(tile, [&](auto count) PK_LAMBDA {
        constexpr int kRows = decltype(count)::value;
        Vector<A> acc[kRows][kVectors] = {};
        for (int64_t row = 0; row < range.images * range.rows; ++row) {
          const int64_t image = row / range.rows;
          const O* a = narrow.at(image, row - image * range.rows) + kDepth<O> * n;
          const O* b = wide.at(image, row - image * range.rows) + first;
          for (int64_t p = 0; p < range.width; p += kDepth<O>) {
            Wide<O> w[kVectors];
            load_pixels(b, p + 1 < range.width ? b + wide.step : kZeros, w);
#pragma GCC unroll 32
            for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
              for (int v = 0; v < kVectors; ++v) {
                acc[i][v] = multiply_add(acc[i][v], load_narrow(a + kDepth<O> * i), w[v]);
              }
            }
            a += narrow_step;
            b += wide_step;
          }
        }
#pragma GCC unroll 32
        for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) {
            A* to = partial + (n + i) * wide.channels + first + v * kLanes<A>;
            store(to, load(to) + acc[i][v]);
          }
        }
      });
      n += tile;
    }
  });
}

// Like add_tap for the taps of a row of a kernel, with one vector: partial[s][n][w] += sum over
// pixels of narrow[p][n] * wide[p + s][w]. The halo of one pixel of `wide` is not read: the first
// pixel of a row has no first tap, and the last pixel no last tap. Rows have two pixels or more.
template <class A>
PK_INLINE void add_shared_taps(const PixelRows<A>& narrow, const PixelRows<A>& wide,
                               const TapRange& range, A* partial) {
  constexpr int kTaps = kSharedTaps, kMost = max_tile_rows(kTaps);
  int64_t n = 0;
  while (n < narrow.channels) {
    const int64_t tile = next_rows<kMost>(narrow.channels - n);
    with_rows<kMost>(tile, [&](auto count) PK_LAMBDA {
      constexpr int kRows = decltype(count)::value;
      Vector<A> acc[kTaps][kRows] = {};
      const auto add = [&](const A* a, const A* b, auto first, auto end) PK_LAMBDA {
        Vector<A> w[kTaps];
#pragma GCC unroll 3
        for (int s = decltype(first)::value; s < decltype(end)::value; ++s) {
          w[s] = load(b + s * wide.channels);
        }
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
          const Vector<A> value = load_narrow(a + i);
#pragma GCC unroll 3
          for (int s = decltype(first)::value; s < decltype(end)::value; ++s) {
            acc[s][i] = multiply_add(acc[s][i], value, w[s]);
          }
        }
      };
      constexpr std::integral_constant<int, 0> kFirst;
      constexpr std::integral_constant<int, 1> kSecond;
      constexpr std::integral_constant<int, kTaps - 1> kLast;
      constexpr std::integral_constant<int, kTaps> kEnd;
      for (int64_t row = 0; row < range.images * range.rows; ++row) {
        const int64_t image = row / range.rows;
        const A* a = narrow.at(image, row - image * range.rows) + n;
        const A* b = wide.at(image, row - image * range.rows);
        add(a, b, kSecond, kEnd);
        for (int64_t p = 1; p + 1 < range.width; ++p) {
          a += narrow.channels;
          b += wide.channels;
          add(a, b, kFirst, kEnd);
        }
        add(a + narrow.channels, b + wide.channels, kFirst, kLast);
      }
#pragma GCC unroll 3
      for (int s = 0; s < kTaps; ++s) {
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
          A* to = partial + (s * narrow.channels + n + i) * wide.channels;
          store(to, load(to) + acc[s][i]);
        }
      }
    });
    n += tile;
  }
}

// Some of a strip's pixels along one axis.
struct PixelRange {
  int64_t first, count;
};

// The pixels, of `count` output pixels from `first` on, for which a tap reads a pixel of an image
// of `size`: 0 <= pixel * stride + shift < size. A weight gradient leaves out the others, as 0 *
// NaN is NaN.
PK_INLINE PixelRange inside(int64_t shift, int64_t stride, int64_t size, int64_t first,
                            int64_t count) {
  const int64_t begin = shift < 0 ? (stride - 1 - shift) / stride : 0;
  const int64_t end = shift < size ? (size - 1 - shift) / stride + 1 : 0;
  const int64_t from = std::max(begin, first);
  return {from - first, std::min(end, first + count) - from};
}

// dweight[tap][narrow][wide] += the part of a strip. `a` has a halo, `dy` has none. The input
// channels are wide if `input_last`. `pairs` is memory for the strip's narrow operand.
template <class O>
PK_INLINE void strip_weight_gradient(const PixelRows<O>& a, const PixelRows<O>& dy,
                                     const Strip& strip, const ConvSizes& conv, bool input_last,
                                     O* pairs, Accumulate<O>* dweight) {
  const auto for_rows_of_taps = [&](const auto& body) PK_LAMBDA {
    for (int64_t r = 0; r < conv.kernel_h; ++r) {
      const PixelRange rows = inside(r - conv.halo_h(), conv.stride.h, strip.in.image_rows,
                                     strip.out.row, strip.out.rows);
      if (rows.count > 0) body(r, rows.first, rows.count);
    }
  };
  const int64_t weights = a.channels * dy.channels;
  if constexpr (kSharesValues<1> && kDepth<O> == 1) {
    const bool is_one_vector = input_last && a.channels == kLanes<Accumulate<O>>;
    const bool is_dense = conv.stride.h == 1 && conv.stride.w == 1;
    if (is_one_vector && is_dense && conv.kernel_w == kSharedTaps && strip.out.width > 1) {
      for_rows_of_taps([&](int64_t r, int64_t row, int64_t rows) PK_LAMBDA {
        add_shared_taps(dy.from(row, 0), a.from(row + r, 0), {strip.images, rows, strip.out.width},
                        dweight + r * kSharedTaps * weights);
      });
      return;
    }
  }
  for (int64_t s = 0; s < conv.kernel_w; ++s) {
    const PixelRange columns =
        inside(s - conv.halo_w(), conv.stride.w, strip.in.width, 0, strip.out.width);
    const int64_t column = columns.first, width = columns.count;
    if (width <= 0) continue;
    const PixelRows<O> pairs_of_rows =
        paired_rows(pairs, strip.out.rows, width, input_last ? dy : a);
    if constexpr (kDepth<O> == 2) {
      // Where `a` is narrow, the kernel is 1x1.
      fill_pairs(input_last ? dy.from(0, column) : a, {strip.images, strip.out.rows, width}, pairs);
    }
    for_rows_of_taps([&](int64_t r, int64_t row, int64_t rows) PK_LAMBDA {
      const PixelRows<O> a_of_tap =
          a.from(row * conv.stride.h + r, column * conv.stride.w + s).strided(conv.stride);
      const PixelRows<O> dy_of_tap = dy.from(row, column);
      Accumulate<O>* partial = dweight + (r * conv.kernel_w + s) * weights;
      const PixelRows<O>& wide = input_last ? a_of_tap : dy_of_tap;
      if constexpr (kDepth<O> == 2) {
        add_tap(pairs_of_rows.from(row, 0), wide, {strip.images, rows, width}, partial);
      } else {
        add_tap(input_last ? dy_of_tap : a_of_tap, wide, {strip.images, rows, width}, partial);
      }
    });
  }
}

PK_END_ISA
