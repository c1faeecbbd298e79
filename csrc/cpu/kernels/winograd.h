// 3x3 convolutions of stride 1 by Winograd's minimal filtering F(2x2, 3x3) (Lavin and Gray, "Fast
// Algorithms for Convolutional Neural Networks", arXiv 1509.09308): 16 products for a tile of 2x2
// pixels in place of 36, with errors like those of direct sums.
//
// With pixels d (4x4, two of each side shared with the next tile), weights g and gradients e of a
// tile, positions p (4x4), and sums over input channels, or over tiles:
//   forward, input gradient   y = A^T m A,    m[p] = sum of v[p] * u[p],  v = B^T d B,  u = G g G^T
//   weight gradient           dg = G^T n G,   n[p] = sum of v[p] * w[p],  w = A e A^T
// An error is relative to the largest products of a sum, also to those that cancel in it. Direct
// sums serve weights with a zero or with one tap that outweighs the others, and operands that are
// not finite, would overflow in sums of neighbours, or have products that vanish.
#pragma once

#include <limits>

#include "conv_product.h"
#include "weight_gradient.h"

PK_BEGIN_ISA

template <class O>
constexpr bool kHasWinograd = kDepth<O> == 1;

// Whether values with this sum of squares may be multiplied: no sum of products of two such
// operands overflows, and the largest products do not vanish.
template <class A>
PK_INLINE bool is_in_range(A squares) {
  return squares >= A(0x1p-120f) && squares <= A(0x1p80f);
}

template <class A>
PK_INLINE A sum_of_lanes(const Vector<A>& v) {
  A sum = 0;
  for (int lane = 0; lane < kLanes<A>; ++lane) sum += v[lane];
  return sum;
}

// `count` is a multiple of the lanes.
template <class A>
PK_OUTLINE bool are_in_range(const A* values, int64_t count) {
  Vector<A> squares[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes<A> <= count; i += 4 * kLanes<A>) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const Vector<A> value = load(values + i + v * kLanes<A>);
      squares[v] += value * value;
    }
  }
  for (; i < count; i += kLanes<A>) {
    const Vector<A> value = load(values + i);
    squares[0] += value * value;
  }
  return is_in_range(sum_of_lanes<A>((squares[0] + squares[1]) + (squares[2] + squares[3])));
}

// Calls body(first, count, is_served) for runs of images of a strip with the same answer. An
// image's answer must not depend on other images: the number of images in a strip depends on the
// number of threads.
template <class O, class Body>
PK_INLINE void for_served_images(const ConvSizes& conv, const O* operand, const Haloed& size,
                                 int64_t images, const Body& body) {
  const auto is_served = [&](int64_t image) PK_LAMBDA {
    if constexpr (kHasWinograd<O>) {
      return Winograd::serves(conv) && are_in_range(operand + image * size.values(), size.values());
    }
    return false;
  };
  bool is_first_served = is_served(0);
  int64_t first = 0;
  for (int64_t image = 1; image < images; ++image) {
    const bool is_next_served = is_served(image);
    if (is_next_served == is_first_served) continue;
    body(first, image - first, is_first_served);
    first = image;
    is_first_served = is_next_served;
  }
  body(first, images - first, is_first_served);
}

// out[position][tile][channel] = B^T d B for a row of tiles from `in` on. Positions are `step`
// values apart.
template <class A>
PK_OUTLINE void transform_pixels(const A* in, int64_t pitch, int64_t channels, int64_t tiles,
                                 int64_t step, A* out) {
  const auto transform = [](const Vector<A>(&d)[4], Vector<A>(&b)[4]) PK_LAMBDA {
    b[0] = d[0] - d[2];
    b[1] = d[1] + d[2];
    b[2] = d[2] - d[1];
    b[3] = d[1] - d[3];
  };
  for (int64_t c = 0; c < channels; c += kLanes<A>) {
    const A* from = in + c;
    Vector<A> columns[4][4];  // transformed columns of the tile
    const auto next_column = [&](int s) PK_LAMBDA {
      const Vector<A> d[4] = {load(from), load(from + pitch), load(from + 2 * pitch),
                              load(from + 3 * pitch)};
      transform(d, columns[s]);
      from += channels;
    };
    next_column(0);
    next_column(1);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      next_column(2);
      next_column(3);
      A* to = out + tile * channels + c;
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        const Vector<A> row[4] = {columns[0][r], columns[1][r], columns[2][r], columns[3][r]};
        Vector<A> v[4];
        transform(row, v);
#pragma GCC unroll 4
        for (int s = 0; s < 4; ++s, to += step) store(to, v[s]);
        columns[0][r] = row[2];
        columns[1][r] = row[3];
      }
    }
  }
}

// out[position][tile][channel] = A e A^T for a row of tiles from `in` on.
template <class A>
PK_OUTLINE void transform_gradient(const A* in, int64_t pitch, int64_t channels, int64_t tiles,
                                   int64_t step, A* out) {
  const auto transform = [](const Vector<A>& e0, const Vector<A>& e1, Vector<A>(&a)[4]) PK_LAMBDA {
    a[0] = e0;
    a[1] = e0 + e1;
    a[2] = e0 - e1;
    a[3] = -e1;
  };
  for (int64_t c = 0; c < channels; c += kLanes<A>) {
    const A* from = in + c;
    for (int64_t tile = 0; tile < tiles; ++tile, from += 2 * channels) {
      Vector<A> columns[2][4];
#pragma GCC unroll 2
      for (int s = 0; s < 2; ++s) {
        transform(load(from + s * channels), load(from + s * channels + pitch), columns[s]);
      }
      A* to = out + tile * channels + c;
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        Vector<A> w[4];
        transform(columns[0][r], columns[1][r], w);
#pragma GCC unroll 4
        for (int s = 0; s < 4; ++s, to += step) store(to, w[s]);
      }
    }
  }
}

// y = A^T m A, two rows for kTiles tiles, for products m of positions `step` values apart.
template <class A, int kTiles, int kVectors>
PK_INLINE void transform_products(const A* products, int64_t step,
                                  Vector<A> (&y)[2][2 * kTiles][kVectors]) {
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    for (int tile = 0; tile < kTiles; ++tile) {
      const A* m = products + (tile * kVectors + v) * kLanes<A>;
      Vector<A> rows[2][4];
#pragma GCC unroll 4
      for (int s = 0; s < 4; ++s, m += step) {
        const Vector<A> m1 = load(m + 4 * step), m2 = load(m + 8 * step);
        rows[0][s] = load(m) + m1 + m2;
        rows[1][s] = m1 - m2 - load(m + 12 * step);
      }
#pragma GCC unroll 2
      for (int r = 0; r < 2; ++r) {
        y[r][2 * tile][v] = rows[r][0] + rows[r][1] + rows[r][2];
        y[r][2 * tile + 1][v] = rows[r][1] - rows[r][2] - rows[r][3];
      }
    }
  }
}

// m[position][tile][kWidth] = the sums over channels of v[position][tile][channel] and
// u[position][channel][kWidth].
template <class A, int kVectors>
PK_OUTLINE void position_products(const A* v, int64_t tiles, int64_t channels, const A* u, A* m) {
  constexpr int kMost = std::min(max_tile_rows(kVectors), int(Winograd::kTiles));
  constexpr int64_t kWidth = kVectors * kLanes<A>;
  Taps one;
  one.add(0, 0, 0, 0);
  const int64_t sum_channels = channels <= kSumChannels<A> ? 0 : kSumChannels<A>;
  for (int64_t position = 0; position < Winograd::kPositions; ++position) {
    for (int64_t tile = 0; tile < tiles;) {
      const int64_t rows = next_rows<kMost>(tiles - tile);
      with_rows<kMost>(rows, [&](auto count) PK_LAMBDA {
        constexpr int kRows = decltype(count)::value;
        const A* from = v + tile * channels;
        A* to = m + tile * kWidth;
        const auto store_sums = [&](auto& acc) PK_LAMBDA {
#pragma GCC unroll 32
          for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
            for (int j = 0; j < kVectors; ++j) {
              store(to + i * kWidth + j * kLanes<A>, acc[i][j]);
            }
          }
        };
        if (channels == kLanes<A>) {  // all addresses are constant
          Vector<A> acc[kRows][kVectors] = {};
#pragma GCC unroll 16
          for (int c = 0; c < kLanes<A>; ++c) {
            Vector<A> wide[kVectors];
#pragma GCC unroll 4
            for (int j = 0; j < kVectors; ++j) wide[j] = load(u + (c * kVectors + j) * kLanes<A>);
#pragma GCC unroll 32
            for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
              for (int j = 0; j < kVectors; ++j) {
                acc[i][j] = multiply_add(acc[i][j], load_narrow(from + i * kLanes<A> + c), wide[j]);
              }
            }
          }
          store_sums(acc);
        } else {
          product_tile<A, kRows, kVectors>(
              from, [&](int i) PK_LAMBDA { return i * channels; }, one, channels, sum_channels, u,
              store_sums);
        }
      });
      tile += rows;
    }
    v += Winograd::step(tiles, channels);
    u += channels * kWidth;
    m += Winograd::step(tiles, kWidth);
  }
}

// Tiles that are multiplied at once: some rows of tiles of a strip's images, or a part of a row.
struct TileRange {
  int64_t first_row, rows, first_column, columns;
  int64_t image_rows;

  int64_t tiles() const { return rows * columns; }
  int64_t image(int64_t i) const { return (first_row + i) / image_rows; }
  int64_t row(int64_t i) const { return (first_row + i) % image_rows; }  // row in its image
};

// Calls body(range) for ranges of at most `most` tiles that cover images of `image_rows` rows of
// `columns` tiles.
template <class Body>
PK_INLINE void for_tile_ranges(int64_t images, int64_t image_rows, int64_t columns, int64_t most,
                               const Body& body) {
  const int64_t width = std::min(columns, most), height = most / width;
  const int64_t rows = images * image_rows;
  for (int64_t row = 0; row < rows; row += height) {
    for (int64_t column = 0; column < columns; column += width) {
      body(TileRange{row, std::min(height, rows - row), column, std::min(width, columns - column),
                     image_rows});
    }
  }
}

// Calls body(count) with `count`, 1 to kMost, as a constant.
template <int kMost, class Body>
PK_INLINE void with_tiles(int64_t count, const Body& body) {
  if constexpr (kMost > 1) {
    if (count < kMost) return with_tiles<kMost - 1>(count, body);
  }
  body(std::integral_constant<int, kMost>{});
}

// strip_product by minimal filtering, with scratch memory of Winograd::values(conv) values.
template <class A, class Finish>
PK_INLINE void winograd_product(const A* in, const ProductPixels<Haloed>& pixels, int64_t images,
                                const ConvSizes& conv, const PackedWeights& packed, A* memory,
                                const Finish& finish) {
  const int64_t channels = packed.in_channels;
  const Haloed& operand = pixels.operand;
  // Products of one vector replace their operands, which are not smaller: all then fits a
  // first-level cache more often.
  const bool in_place = packed.out_channels == kLanes<A>;
  A* m = in_place ? memory : memory + Winograd::values(Winograd::kTiles, channels);
  for_tile_ranges(
      images, pixels.rows / 2, pixels.width / 2, Winograd::kTiles,
      [&](const TileRange& range) PK_LAMBDA {
        const int64_t tiles = range.tiles(), step = Winograd::step(tiles, channels);
        for (int64_t i = 0; i < range.rows; ++i) {
          const A* from = in + range.image(i) * operand.values() +
                          operand.offset(2 * range.row(i), 2 * range.first_column);
          transform_pixels(from, operand.pitch(), channels, range.columns, step,
                           memory + i * range.columns * channels);
        }
        for_channel_tiles<A>(
            packed.out_channels, tile_vectors(conv), [&](auto vectors, int64_t k) PK_LAMBDA {
              constexpr int kVectors = decltype(vectors)::value, kWidth = kVectors * kLanes<A>;
              const A* u =
                  static_cast<const A*>(packed.transformed) + k * Winograd::kPositions * channels;
              position_products<A, kVectors>(memory, tiles, channels, u, m);
              for (int64_t i = 0; i < range.rows; ++i) {
                const int64_t image = range.image(i);
                const int64_t first = pixels.first + image * pixels.result_image +
                                      2 * range.row(i) * pixels.result_width +
                                      2 * range.first_column;
                for (int64_t tile = 0; tile < range.columns;) {
                  const int64_t count = std::min<int64_t>(range.columns - tile, 4);
                  with_tiles<4>(count, [&](auto constant) PK_LAMBDA {
                    constexpr int kCount = decltype(constant)::value;
                    Vector<A> y[2][2 * kCount][kVectors];
                    transform_products<A, kCount, kVectors>(m + (i * range.columns + tile) * kWidth,
                                                            Winograd::step(tiles, kWidth), y);
                    const int64_t pixel = first + 2 * tile;
                    finish(y[0], image, pixel, k);
                    finish(y[1], image, pixel + pixels.result_width, k);
                  });
                  tile += count;
                }
              }
            });
      });
}

// The product of some images from `first_image` of a strip on, by minimal filtering if `is_served`
// and the weights are served, with scratch `memory` of Winograd::values(conv) values.
template <class O, class Finish>
PK_INLINE void images_product(const O* in, const ProductPixels<Haloed>& of_strip,
                              int64_t first_image, int64_t images, bool is_served,
                              const ConvSizes& conv, const PackedWeights& packed, O* memory,
                              const Finish& finish_pixels) {
  in += first_image * of_strip.operand.values();
  ProductPixels<Haloed> pixels = of_strip;
  pixels.first += first_image * of_strip.result_image;
  const auto finish = [=, &finish_pixels](auto& acc, int64_t image, int64_t pixel, int64_t k)
                          PK_LAMBDA { finish_pixels(acc, first_image + image, pixel, k); };
  if constexpr (kHasWinograd<O>) {
    if (is_served && packed.transformed != nullptr) {
      winograd_product(in, pixels, images, conv, packed, memory, finish);
      return;
    }
  }
  strip_product(in, pixels, images, conv, packed, finish);
}

// n[position][K][C] += the part of a strip.
template <class A>
PK_INLINE void winograd_weight_gradient(const A* activated, const Haloed& a_operand,
                                        const A* gradient, const Haloed& dy_operand,
                                        const Strip& strip, const ConvSizes& conv, A* memory,
                                        A* n) {
  const int64_t channels = conv.in_channels, outputs = conv.out_channels;
  A* v = memory;
  A* w = memory + Winograd::values(Winograd::kGradientTiles, channels);
  for_tile_ranges(
      strip.images, strip.out.rows / 2, strip.out.width / 2, Winograd::kGradientTiles,
      [&](const TileRange& range) PK_LAMBDA {
        const int64_t tiles = range.tiles(), column = 2 * range.first_column;
        const int64_t v_step = Winograd::step(tiles, channels);
        const int64_t w_step = Winograd::step(tiles, outputs);
        for (int64_t i = 0; i < range.rows; ++i) {
          const int64_t image = range.image(i), row = 2 * range.row(i);
          const int64_t place = i * range.columns;
          transform_pixels(activated + image * a_operand.values() + a_operand.offset(row, column),
                           a_operand.pitch(), channels, range.columns, v_step,
                           v + place * channels);
          transform_gradient(
              gradient + image * dy_operand.values() + dy_operand.offset(row + 1, column + 1),
              dy_operand.pitch(), outputs, range.columns, w_step, w + place * outputs);
        }
        for (int64_t position = 0; position < Winograd::kPositions; ++position) {
          add_tap(PixelRows<A>(w + position * w_step, Haloed{1, tiles, outputs}),
                  PixelRows<A>(v + position * v_step, Haloed{1, tiles, channels}), {1, 1, tiles},
                  n + position * channels * outputs);
        }
      });
}

// In the first part, sums[tap][channel] = the sums of all parts + G^T n G, where
// n[position][channel] follows the taps. Taps and positions are `step` values apart, parts `part`
// values.
template <class A>
PK_OUTLINE void merge_transformed(A* sums, int64_t parts, int64_t part, int64_t step,
                                  int64_t channels) {
  const A half = A(0.5);
  const auto transform = [&](const Vector<A>(&n)[4], Vector<A>(&to)[3]) PK_LAMBDA {
    const Vector<A> sum = (n[1] + n[2]) * half;
    to[0] = n[0] + sum;
    to[1] = (n[1] - n[2]) * half;
    to[2] = sum + n[3];
  };
  for (int64_t c = 0; c < channels; c += kLanes<A>) {
    const auto total = [&](int64_t place) PK_LAMBDA {
      const A* from = sums + place * step + c;
      Vector<A> sum = load(from);
      for (int64_t i = 1; i < parts; ++i) sum += load(from + i * part);
      return sum;
    };
    Vector<A> columns[4][3];
    for (int s = 0; s < 4; ++s) {
      const Vector<A> n[4] = {total(9 + s), total(13 + s), total(17 + s), total(21 + s)};
      transform(n, columns[s]);
    }
    for (int r = 0; r < 3; ++r) {
      const Vector<A> row[4] = {columns[0][r], columns[1][r], columns[2][r], columns[3][r]};
      Vector<A> dg[3];
      transform(row, dg);
      for (int s = 0; s < 3; ++s) {
        store(sums + (3 * r + s) * step + c, total(3 * r + s) + dg[s]);
      }
    }
  }
}

// u[tile of k][position][c][k in tile] = G g G^T for the packed weights g of input channels from
// `first` to `end`. `found` gets the sums of squares of each tap: NaN if a weight is zero.
template <class A>
void transform_group(const A* packed, const ConvSizes& conv, int64_t in_channels,
                     int64_t out_channels, A* u, int64_t first, int64_t end, TapSquares<A>& found) {
  Vector<A> squares[9] = {}, smallest = Vector<A>{} + 1;
  const auto transform = [](const Vector<A>& g0, const Vector<A>& g1, const Vector<A>& g2,
                            Vector<A>(&to)[4]) PK_LAMBDA {
    const A half = A(0.5);
    to[0] = g0;
    to[1] = ((g0 + g2) + g1) * half;
    to[2] = ((g0 + g2) - g1) * half;
    to[3] = g2;
  };
  for_channel_tiles<A>(out_channels, tile_vectors(conv), [&](auto vectors, int64_t k) PK_LAMBDA {
    constexpr int kWidth = decltype(vectors)::value * kLanes<A>;
    const int64_t step = in_channels * kWidth;
    for (int64_t at = first * kWidth; at < end * kWidth; at += kLanes<A>) {
      const A* from = packed + k * conv.taps() * in_channels + at;
      A* to = u + k * Winograd::kPositions * in_channels + at;
      Vector<A> g[9], columns[3][4];
#pragma GCC unroll 9
      for (int t = 0; t < 9; ++t) {
        g[t] = load(from + t * step);
        squares[t] += g[t] * g[t];
        smallest = g[t] == 0 ? Vector<A>{} : smallest;
      }
#pragma GCC unroll 3
      for (int s = 0; s < 3; ++s) transform(g[s], g[3 + s], g[6 + s], columns[s]);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        Vector<A> row[4];
        transform(columns[0][r], columns[1][r], columns[2][r], row);
#pragma GCC unroll 4
        for (int s = 0; s < 4; ++s, to += step) store(to, row[s]);
      }
    }
  });
  const bool has_zero = sum_of_lanes<A>(smallest) < kLanes<A>;
  for (int t = 0; t < 9; ++t) {
    found.of_taps[t] = has_zero ? std::numeric_limits<A>::quiet_NaN() : sum_of_lanes<A>(squares[t]);
  }
}

// Whether weights with these sums of squares are served.
template <class A>
bool are_weights_served(const TapSquares<A>& squares) {
  A sum = 0, most = 0;
  for (const A of_tap : squares.of_taps) {
    sum += of_tap;
    most = std::max(most, of_tap);
  }
  return is_in_range(sum) && most <= Winograd::kMostOfOneTap * sum;
}

PK_END_ISA
