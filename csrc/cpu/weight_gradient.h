// The gradient of a convolution's weight: a product over pixels. Included once for each instruction
// set.
//
// One operand is `wide`, a vector of channels, the other `narrow`, broadcast. Dot products read
// pairs of pixels: those of `narrow` are copied side by side, those of `wide` are interleaved in
// registers.

#include "conv_product.h"

// One operand: images `image_pitch` values apart, of rows `pitch` values apart.
template <class O>
struct PixelRows {
  const O* values;
  int64_t image_pitch, pitch, channels;

  PixelRows from(int64_t row, int64_t column) const {
    return {values + row * pitch + column * channels, image_pitch, pitch, channels};
  }
  const O* at(int64_t image, int64_t row) const {
    return values + image * image_pitch + row * pitch;
  }
};

// The pixels of both operands that one tap of the kernel multiplies.
struct TapRange {
  int64_t images, rows, width;
};

// Calls body(image, row) for every row of a range.
template <class Body>
PK_INLINE void for_rows_of(const TapRange& range, const Body& body) {
  for (int64_t image = 0; image < range.images; ++image) {
    for (int64_t row = 0; row < range.rows; ++row) body(image, row);
  }
}

// partial[n][first + ...] += sum over pixels of narrow[p][n] * wide[p][first + ...] for kRows
// values of n, where add_pixels(acc) adds the products.
template <class A, int kRows, int kVectors, class AddPixels>
PK_INLINE void accumulate(A* partial, int64_t pitch, const AddPixels& add_pixels) {
  Vector<A> acc[kRows][kVectors] = {};
  add_pixels(acc);
#pragma GCC unroll 32
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      A* to = partial + i * pitch + v * kLanes<A>;
      store(to, load(to) + acc[i][v]);
    }
  }
}

// Calls body(rows, vectors, n, w) for tiles of narrow by wide channels.
template <class A, class Body>
PK_INLINE void for_channel_tiles(int64_t narrow, int64_t wide, const Body& body) {
  for_vector_blocks<A>(wide, kMaxVectors, [&](auto vectors, int64_t w) PK_LAMBDA {
    constexpr int kMost = max_tile_rows(decltype(vectors)::value);
    int64_t n = 0;
    while (n < narrow) {
      const int64_t rows = next_rows<kMost>(narrow - n);
      with_rows<kMost>(rows, [&](auto count) PK_LAMBDA { body(count, vectors, n, w); });
      n += rows;
    }
  });
}

// partial[n][w] += sum over pixels of narrow[p][n] * wide[p][w].
template <class A>
PK_INLINE void add_tap(const PixelRows<A>& narrow, const PixelRows<A>& wide, const TapRange& range,
                       A* partial) {
  for_channel_tiles<A>(
      narrow.channels, wide.channels,
      [&](auto count, auto vectors, int64_t n, int64_t first) PK_LAMBDA {
        constexpr int kRows = decltype(count)::value, kVectors = decltype(vectors)::value;
        A* to = partial + n * wide.channels + first;
        accumulate<A, kRows, kVectors>(to, wide.channels, [&](auto& acc) PK_LAMBDA {
          for_rows_of(range, [&](int64_t image, int64_t row) PK_LAMBDA {
            const A* a = narrow.at(image, row) + n;
            const A* b = wide.at(image, row) + first;
            for (int64_t p = 0; p < range.width; ++p) {
              Vector<A> w[kVectors];
#pragma GCC unroll 4
              for (int v = 0; v < kVectors; ++v) w[v] = load(b + v * kLanes<A>);
#pragma GCC unroll 32
              for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; ++v) acc[i][v] += a[i] * w[v];
              }
              a += narrow.channels;
              b += wide.channels;
            }
          });
        });
      });
}

#ifdef PK_HAS_DOT
typedef uint16_t FullHalves __attribute__((vector_size(kVectorBytes)));

// Pairs of values with the same index of `first` and `second`, 16 from `kFrom` on.
template <int kFrom>
PK_INLINE FullBits interleaved(FullHalves first, FullHalves second) {
  FullHalves order = {};
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    order[2 * i] = kFrom + i;
    order[2 * i + 1] = 32 + kFrom + i;
  }
  return reinterpret_cast<FullBits>(__builtin_shuffle(first, second, order));
}

PK_INLINE FullHalves load_halves(const BFloat16* from) {
  FullHalves v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

// The first 16 values of the result are those in memory.
PK_INLINE FullHalves load_half_vector(const BFloat16* from) {
  HalfBits half;
  __builtin_memcpy(&half, from, sizeof half);
  return reinterpret_cast<FullHalves>(_mm512_castsi256_si512(reinterpret_cast<__m256i>(half)));
}

// pairs[image][row][p / 2][n][p % 2] = narrow[image][row][p][n], with 0 beside the last pixel of an
// odd width.
PK_INLINE void fill_pairs(const PixelRows<BFloat16>& narrow, const TapRange& range,
                          BFloat16* pairs) {
  const int64_t channels = narrow.channels;
  for_rows_of(range, [&](int64_t image, int64_t row) PK_LAMBDA {
    const BFloat16* from = narrow.at(image, row);
    for (int64_t p = 0; p < range.width; p += 2) {
      for (int64_t n = 0; n < channels; n += 16) {
        const FullHalves first = load_half_vector(from + n);
        const FullHalves second =
            p + 1 < range.width ? load_half_vector(from + channels + n) : FullHalves{};
        const FullBits both = interleaved<0>(first, second);
        __builtin_memcpy(pairs + 2 * n, &both, sizeof both);
      }
      from += 2 * channels;
      pairs += 2 * channels;
    }
  });
}

// The same as add_tap, where `narrow` is pairs of pixels, narrow[image][row][p / 2][n][p % 2].
PK_INLINE void add_tap_of_pairs(const PixelRows<BFloat16>& narrow, const PixelRows<BFloat16>& wide,
                                const TapRange& range, float* partial) {
  alignas(64) static constexpr BFloat16 kZeros[4 * kLanes<float>] = {};
  const int64_t pairs_per_row = (range.width + 1) / 2;
  for_channel_tiles<float>(
      narrow.channels, wide.channels,
      [&](auto count, auto vectors, int64_t n, int64_t first) PK_LAMBDA {
        constexpr int kRows = decltype(count)::value, kVectors = decltype(vectors)::value;
        float* to = partial + n * wide.channels + first;
        accumulate<float, kRows, kVectors>(to, wide.channels, [&](auto& acc) PK_LAMBDA {
          for_rows_of(range, [&](int64_t image, int64_t row) PK_LAMBDA {
            const BFloat16* a = narrow.at(image, row) + 2 * n;
            const BFloat16* b = wide.at(image, row) + first;
            for (int64_t q = 0; q < pairs_per_row; ++q) {
              const BFloat16* c = 2 * q + 1 < range.width ? b + wide.channels : kZeros;
              FullBits w[kVectors];
              if constexpr (kVectors == 1) {
                w[0] = interleaved<0>(load_half_vector(b), load_half_vector(c));
              } else {
#pragma GCC unroll 2
                for (int v = 0; v < kVectors; v += 2) {
                  const FullHalves even = load_halves(b + v * 16), odd = load_halves(c + v * 16);
                  w[v] = interleaved<0>(even, odd);
                  w[v + 1] = interleaved<16>(even, odd);
                }
              }
#pragma GCC unroll 32
              for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; ++v) {
                  acc[i][v] = multiply_add(acc[i][v], a + 2 * i, w[v]);
                }
              }
              a += 2 * narrow.channels;
              b += 2 * wide.channels;
            }
          });
        });
      });
}
#endif

// dweight[tap][narrow][wide] += the part of a strip. `a` is bordered, `dy` is not; the input
// channels are wide if `input_last`. `pairs` is memory for the narrow operand of the strip.
template <class O>
PK_INLINE void strip_weight_gradient(const PixelRows<O>& a, const PixelRows<O>& dy,
                                     const Strip& strip, const Conv& conv, bool input_last,
                                     O* pairs, Accumulate<O>* dweight) {
  for (int64_t s = 0; s < conv.kernel_w; ++s) {
    // 0 * NaN is NaN: only pixels where the tap falls inside the image, no border.
    const int64_t right = s - conv.halo_w();
    const int64_t column = std::max<int64_t>(0, -right);
    const int64_t width = std::min(strip.width, strip.width - right) - column;
    if (width <= 0) continue;
    const int64_t pair_channels = input_last ? dy.channels : a.channels;
    const int64_t pair_pitch = (width + 1) / 2 * 2 * pair_channels;
    const PixelRows<O> all_pairs{pairs, strip.rows * pair_pitch, pair_pitch, pair_channels};
    if constexpr (kDepth<O> == 2) {
      // Where `a` is narrow, the kernel is 1x1.
      fill_pairs(input_last ? dy.from(0, column) : a, {strip.images, strip.rows, width}, pairs);
    }
    for (int64_t r = 0; r < conv.kernel_h; ++r) {
      const int64_t down = strip.row + r - conv.halo_h();
      const int64_t row = std::max<int64_t>(0, -down);
      const int64_t rows = std::min(strip.rows, strip.image_rows - down) - row;
      if (rows <= 0) continue;
      const PixelRows<O> a_of_tap = a.from(row + r, column + s), dy_of_tap = dy.from(row, column);
      const PixelRows<O>& narrow = input_last ? dy_of_tap : a_of_tap;
      const PixelRows<O>& wide = input_last ? a_of_tap : dy_of_tap;
      const TapRange range{strip.images, rows, width};
      Accumulate<O>* partial = dweight + (r * conv.kernel_w + s) * a.channels * dy.channels;
      if constexpr (kDepth<O> == 2) {
        add_tap_of_pairs(all_pairs.from(row, 0), wide, range, partial);
      } else {
        add_tap(narrow, wide, range, partial);
      }
    }
  }
}
