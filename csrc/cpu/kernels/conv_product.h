// Products of the direct convolutions.
//
// The operand of a strip is normalised once into a scratch buffer, with a halo of zeros outside the
// image. Products read the buffer, with a tile of pixels by channels in registers. One operand is a
// vector of channels, the other a broadcast value:
//   forward   y[p][k]       += a[p + tap][c]  * w[tap][c][k]
//   dgrad     da[p][c]      += dy[p - tap][k] * w[tap][k][c]
//   wgrad     dw[tap][c][k] += a[p + tap][c]  * dy[p][k]
#pragma once

#include <algorithm>

#include "../conv_strips.h"
#include "amx_product.h"
#include "normalise.h"
#include "products.h"
#include "register_tiles.h"

PK_BEGIN_ISA

// The most pixels of a product_tile: more addresses would be read from the stack.
constexpr int kMostAddresses = 14;

// The address of the next pixel. The empty asm hides it from the optimiser, which would compute the
// addresses of all pixels of an unrolled loop first, in more registers than there are.
template <class T>
PK_INLINE T* next_pixel(T* pixel, int64_t channels) {
  pixel += channels;
  asm("" : "+r"(pixel));
  return pixel;
}

// Fills the operand `out` of some images. fill(row, pixel, image) writes a row of an image; the
// halo is zero.
template <class O, class Fill>
PK_INLINE void fill_haloed(O* out, const Haloed& operand, const Rows& rows, int64_t images,
                           const ConvSizes& conv, const Fill& fill) {
  const int64_t pitch = operand.pitch(), side = conv.halo_w() * operand.channels;
  for (int64_t image = 0; image < images; ++image) {
    const int64_t first_pixel = rows.first_pixel + image * rows.image_rows * rows.width;
    for (int64_t r = -conv.halo_h(); r < operand.rows - conv.halo_h(); ++r, out += pitch) {
      const int64_t image_row = rows.row + r;
      if (image_row < 0 || image_row >= rows.image_rows) {
        std::fill(out, out + pitch, O{});
        continue;
      }
      std::fill(out, out + side, O{});
      fill(out + side, first_pixel + r * rows.width, image);
      std::fill(out + pitch - side, out + pitch, O{});
    }
  }
}

// out = the output gradient of `pixels` pixels of `image`, rounded to T, `step` values apart. With
// `stores`, also stores it in dx unless that is null.
template <class T, class O>
PK_INLINE void apply_step(const OutputGradient<T>& dy, bool stores, O* out, int64_t step,
                          int64_t first_pixel, int64_t pixels, int64_t channels, int64_t image) {
  using A = Accumulate<T>;
  const int64_t offset = first_pixel * channels;
  const T* g = dy.tensors.g + offset;
  for_channel_vectors<A>(channels, [&](auto vectors, int64_t first, auto lanes) PK_LAMBDA {
    constexpr int kVectors = decltype(vectors)::value;
    const InputGradient<A>* coefficients = dy.coefficients;
    if (coefficients == nullptr) {
      for (int64_t p = 0; p < pixels; ++p) {
        for (int v = 0; v < kVectors; ++v) {
          const int64_t c = first + v * kLanes<A>;
          store(out + p * step + c, load(g + p * channels + c, lanes), lanes);
        }
      }
      return;
    }
    const T* x = dy.tensors.x + offset;
    const T* skip = dy.tensors.skip == nullptr ? nullptr : dy.tensors.skip + offset;
    T* stored = stores && dy.tensors.dx != nullptr ? dy.tensors.dx + offset : nullptr;
    const GradientRow<A> row = coefficients->row(image);
    Vector<A> m[kVectors], a[kVectors], b[kVectors], c[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = first + v * kLanes<A>;
      m[v] = load(row.mean + at, lanes);
      a[v] = load(row.a + at, lanes);
      b[v] = load(row.b + at, lanes);
      c[v] = load(row.c + at, lanes);
    }
    for (int64_t p = 0; p < pixels; ++p) {
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = p * channels + first + v * kLanes<A>;
        const Vector<A> centred = row.in_training ? load(x + at, lanes) - m[v] : Vector<A>{};
        Vector<A> value = a[v] * load(g + at, lanes) + (b[v] * centred + c[v]);
        if (skip != nullptr) value += load(skip + at, lanes);
        if constexpr (std::is_same_v<O, A>) value = as_stored(g, value);
        if (stored != nullptr) store(stored + at, value, lanes);
        store(out + p * step + first + v * kLanes<A>, value, lanes);
      }
    }
  });
}

// The most channels in one partial sum: the error grows with the length of a sum. Without FMA every
// product is rounded, and partial sums are short. 0: all channels.
template <class O>
constexpr int64_t kSumChannels = kDepth<O> > 1 ? 0
                                 : kHasFma     ? 256
                                               : 32;

// Channels per partial sum; 0: all channels and taps in one sum.
template <class O>
PK_INLINE int64_t sum_channels_of(const Taps& taps, int64_t channels) {
  constexpr int64_t kWhole = 640;
  return kHasFma && taps.count * channels <= kWhole ? 0 : kSumChannels<O>;
}

// One tile of accumulators: kRows pixels by kVectors vectors of output channels.
//   acc[i][v] = sum over taps and channels of in[at(i) + tap + c] * w[tap][c][v]
// in partial sums of at most `sum_channels` channels of a tap, or in one sum if that is 0.
template <class O, int kRows, int kVectors, class At, class Finish>
PK_INLINE void product_tile(const O* in, const At& at, const Taps& taps, int64_t channels,
                            int64_t sum_channels, const O* weights, const Finish& finish) {
  using A = Accumulate<O>;
  constexpr int kWidth = kVectors * kLanes<A>;
  Vector<A> acc[kRows][kVectors] = {}, sum[kRows][kVectors];
  bool has_sum = false;
  for (int64_t t = 0; t < taps.count; ++t) {
    const O* from = in + taps.offset[t];
    const O* w = weights + taps.place[t] * channels * kWidth;
    for (int64_t first = 0; first < channels; first += sum_channels) {
      const int64_t end = sum_channels == 0 ? channels : std::min(first + sum_channels, channels);
      for (int64_t c = first; c < end; c += kDepth<O>) {
        Wide<O> wide[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) wide[v] = load_wide(w + v * kLanes<A> * kDepth<O>);
        w += kWidth * kDepth<O>;
#pragma GCC unroll 32
        for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) {
            acc[i][v] = multiply_add(acc[i][v], load_narrow(from + at(i) + c), wide[v]);
          }
        }
      }
      if (sum_channels == 0) break;
#pragma GCC unroll 32
      for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          sum[i][v] = has_sum ? sum[i][v] + acc[i][v] : acc[i][v];
          acc[i][v] = Vector<A>{};
        }
      }
      has_sum = true;
    }
  }
  if (has_sum) {
#pragma GCC unroll 32
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[i][v] = sum[i][v];
    }
  }
  finish(acc);
}

// With one vector, loading a value for each multiplication is the bottleneck of product_tile. For
// kernels of this width, shared_tile loads a value once for the taps of a row.
constexpr int kSharedTaps = 3;
template <int kVectors>
constexpr bool kSharesValues = kRegisters >= 32 && kVectors == 1;

// Like product_tile, for kRows neighbours in an image row and one vector, in one sum in the order
// row, channel, tap.
template <class O, int kRows, class Finish>
PK_INLINE void shared_tile(const O* in, int64_t pitch, int64_t kernel_h, int64_t channels,
                           const O* weights, const Finish& finish) {
  using A = Accumulate<O>;
  constexpr int kTaps = kSharedTaps, kWidth = kLanes<A>;
  Vector<A> acc[kRows][1] = {};
  for (int64_t r = 0; r < kernel_h; ++r) {
    for (int64_t c = 0; c < channels; c += kDepth<O>) {
      Wide<O> wide[kTaps];
#pragma GCC unroll 3
      for (int s = 0; s < kTaps; ++s) wide[s] = load_wide(weights + (s * channels + c) * kWidth);
#pragma GCC unroll 32
      for (int j = 0; j < kRows + kTaps - 1; ++j) {
        const Wide<O> narrow = load_narrow(in + j * channels + c);
#pragma GCC unroll 3
        for (int s = 0; s < kTaps; ++s) {
          const int i = j - s;
          if (i >= 0 && i < kRows) acc[i][0] = multiply_add(acc[i][0], narrow, wide[s]);
        }
      }
    }
    in += pitch;
    weights += kTaps * channels * kWidth;
  }
  finish(acc);
}

// How many tiles ahead operands are prefetched.
constexpr int kAhead = 4;

// Whether a tile may continue in the next row of the image. Each pixel then needs its own address,
// for which only small tiles leave registers.
constexpr bool kTilesCrossRows = kRegisters < 32;

// strip_product for kVectors vectors of output channels from k on; if kShares, by shared_tile.
template <class O, int kVectors, bool kShares, class Finish>
PK_OUTLINE void channels_product(const O* in, const ProductPixels<Haloed>& pixels, int64_t images,
                                 const ConvSizes& conv, const PackedWeights& packed,
                                 int64_t sum_channels, int64_t k, const Finish finish) {
  constexpr int kMost =
      kShares ? max_tile_rows(kVectors) : std::min(max_tile_rows(kVectors), kMostAddresses);
  const int64_t in_channels = packed.in_channels, rows = pixels.rows, width = pixels.width;
  const int64_t operand_pitch = pixels.operand.pitch(), pitch = pixels.step.h * operand_pitch;
  const int64_t operand_values = pixels.operand.values(), step = pixels.step.w * in_channels;
  const int64_t result_step = pixels.result_step.w, result_image = pixels.result_image;
  const int64_t result_pitch = pixels.result_step.h * pixels.result_width;
  const int64_t result_first = pixels.first;
  const bool finite = packed.finite;
  const bool crosses_rows = kTilesCrossRows && result_step == 1 && result_pitch == width;
  const O* w = static_cast<const O*>(packed.values) + k * conv.taps() * in_channels;
  int64_t image = 0, row = 0, column = 0;
  const O *image_line = in, *line = in, *from = in;
  int64_t pixel = result_first, first_of_row = pixel;
  const auto advance = [&](int64_t count) PK_LAMBDA {  // within a row
    pixel += count * result_step;
    from += count * step;
    column += count;
    if (column == width) {
      column = 0;
      line += pitch;
      first_of_row += result_pitch;
      if (++row == rows) {
        row = 0;
        ++image;
        line = image_line += operand_values;
        first_of_row = result_first + image * result_image;
      }
      from = line;
      pixel = first_of_row;
    }
  };
  Taps inside;
  while (image < images) {
    const Taps* taps = &pixels.taps;
    const int64_t left = (crosses_rows ? (rows - row) * width : width) - column;
    int64_t tile = next_rows<kMost>(left);
    if (!finite) {
      inside = pixels.taps_inside(conv, row, column, column);
      taps = &inside;
      tile = 1;
    }
    with_rows<kMost>(tile, [&](auto count) PK_LAMBDA {
      constexpr int kRows = decltype(count)::value;
      const O* first = from;
      const int64_t first_pixel = pixel, first_image = image;
      int64_t at[kRows];
      for (int i = 0; i < kRows; ++i) {
        at[i] = kTilesCrossRows ? from - first : i * step;
        if (kTilesCrossRows) advance(1);
      }
      if (!kTilesCrossRows) advance(kRows);
      const auto finish_tile = [&](auto& acc)
                                   PK_LAMBDA { finish(acc, first_image, first_pixel, k); };
      if constexpr (kShares) {
        shared_tile<O, kRows>(first, operand_pitch, conv.kernel_h, in_channels, w, finish_tile);
      } else {
        product_tile<O, kRows, kVectors>(
            first, [&](int i) PK_LAMBDA { return at[i]; }, *taps, in_channels, sum_channels, w,
            finish_tile);
      }
    });
  }
}

// Computes out[p][k] for some pixels of a strip from its operand, and calls finish(accumulators,
// image, pixel, k) for the rows of a tile: pixels of the result from `pixel` on, `result_step`
// apart. 0 * NaN is NaN: if a weight is not finite, taps outside the image are left out.
template <class O, class Finish>
PK_INLINE void strip_product(const O* in, const ProductPixels<Haloed>& pixels, int64_t images,
                             const ConvSizes& conv, const PackedWeights& packed,
                             const Finish& finish) {
  const int64_t in_channels = packed.in_channels;
  const int64_t sum_channels = sum_channels_of<O>(pixels.taps, in_channels);
  if (pixels.rows <= 0 || pixels.width <= 0) return;
#ifdef PK_HAS_TILES
  if (packed.finite) return amx_strip_product(in, pixels, images, conv, packed, finish);
#endif
  const bool shares = packed.finite && conv.kernel_w == kSharedTaps && sum_channels == 0 &&
                      pixels.taps.count == conv.taps() && pixels.step.w == 1;
  for_channel_tiles<Accumulate<O>>(
      packed.out_channels, tile_vectors(conv), [&](auto vectors, int64_t k) PK_LAMBDA {
        constexpr int kVectors = decltype(vectors)::value;
        if constexpr (kSharesValues<kVectors>) {
          if (shares) {
            channels_product<O, kVectors, true>(in, pixels, images, conv, packed, sum_channels, k,
                                                finish);
            return;
          }
        }
        channels_product<O, kVectors, false>(in, pixels, images, conv, packed, sum_channels, k,
                                             finish);
      });
}

PK_END_ISA
