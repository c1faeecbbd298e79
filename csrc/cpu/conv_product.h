// What the direct convolutions share. Included once for each instruction set.
//
// A strip is some rows of one image (for a 1x1 kernel: some pixels of the whole batch). Its
// operand is first formed in a scratch buffer, normalised once, with a border of zeros where the
// kernel reaches over the image; the products then run over the buffer with a tile of pixels by
// channels in registers. One operand of each product is a vector of channels, the other a single
// value that is broadcast:
//   forward   y[p][k]     += a[p + tap][c]  * w[tap][c][k]
//   dgrad     da[p][c]    += dy[p - tap][k] * w[tap][k][c]
//   wgrad     dw[tap][c][k] += a[p + tap][c] * dy[p][k]

constexpr int kMaxVectors = 4;
// Rows of accumulators beside `vectors` vectors of the other operand.
constexpr int max_tile_rows(int vectors) { return (kRegisters - 4) / vectors; }

// Writes operand(pixel, channel, ...) for the strip and its border to `out`
// [rows + 2 * halo_h][width + 2 * halo_w][channels].
template <class A, class Operand>
PK_INLINE void fill_bordered(A* out, const Strip& strip, const ConvSize& conv, int64_t channels,
                             const Operand& operand) {
  const int64_t pitch = (strip.width + 2 * conv.halo_w()) * channels;
  const int64_t side = conv.halo_w() * channels;
  for (int64_t r = -conv.halo_h(); r < strip.rows + conv.halo_h(); ++r) {
    A* row = out + (r + conv.halo_h()) * pitch;
    const int64_t image_row = strip.row + r;
    if (image_row < 0 || image_row >= strip.image_rows) {
      std::fill(row, row + pitch, A(0));
      continue;
    }
    std::fill(row, row + side, A(0));
    operand(row + side, strip.first_pixel + r * strip.width);
    std::fill(row + pitch - side, row + pitch, A(0));
  }
}

// out = relu((x - mean) * scale + bias), `pixels` of them.
template <class T, class A>
PK_INLINE void normalise(const T* x, A* out, int64_t pixels, int64_t channels,
                         const Normalisation<A>& norm) {
  for_channel_blocks<A>(channels, [&](auto vectors, int64_t c, auto lanes) PK_LAMBDA {
    constexpr int kVectors = decltype(vectors)::value;
    Vector<A> m[kVectors], s[kVectors], b[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      m[v] = load(norm.mean + c + v * kLanes<A>, lanes);
      s[v] = load(norm.scale.data() + c + v * kLanes<A>, lanes);
      b[v] = load(norm.bias + c + v * kLanes<A>, lanes);
    }
    for (int64_t p = 0; p < pixels; ++p) {
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = p * channels + c + v * kLanes<A>;
        store(out + at, relu((load(x + at, lanes) - m[v]) * s[v] + b[v]), lanes);
      }
    }
  });
}

// out = the gradient that arrives at `pixels` pixels from the first on, as stored in type T; also
// left in `dz` where `keep` says so.
template <class T, class A>
PK_INLINE void unfold(const Arriving<T, A>& arriving, bool keep, A* out, int64_t first_pixel,
                      int64_t pixels, int64_t channels) {
  const int64_t offset = first_pixel * channels;
  const T* dy = arriving.dy + offset;
  for_channel_blocks<A>(channels, [&](auto vectors, int64_t first, auto lanes) PK_LAMBDA {
    constexpr int kVectors = decltype(vectors)::value;
    const InputGradient<A>* fold = arriving.coefficients;
    if (fold == nullptr) {
      for (int64_t p = 0; p < pixels; ++p) {
        for (int v = 0; v < kVectors; ++v) {
          const int64_t at = p * channels + first + v * kLanes<A>;
          store(out + at, load(dy + at, lanes), lanes);
        }
      }
      return;
    }
    const T* z = arriving.z + offset;
    const T* skip = arriving.skip == nullptr ? nullptr : arriving.skip + offset;
    T* dz = keep && arriving.dz != nullptr ? arriving.dz + offset : nullptr;
    Vector<A> m[kVectors], a[kVectors], b[kVectors], c[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = first + v * kLanes<A>;
      m[v] = load(fold->mean + at, lanes);
      a[v] = load(fold->a.data() + at, lanes);
      b[v] = load(fold->b.data() + at, lanes);
      c[v] = load(fold->c.data() + at, lanes);
    }
    for (int64_t p = 0; p < pixels; ++p) {
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = p * channels + first + v * kLanes<A>;
        const Vector<A> centred = fold->constant ? Vector<A>{} : load(z + at, lanes) - m[v];
        Vector<A> value = a[v] * load(dy + at, lanes) + (b[v] * centred + c[v]);
        if (skip != nullptr) value += load(skip + at, lanes);
        value = as_stored(dy, value);
        if (dz != nullptr) store(dz + at, value, lanes);
        store(out + at, value, lanes);
      }
    }
  });
}

// One tile of accumulators: kRows pixels by kVectors vectors of output channels.
//   acc[i][v] = sum over taps and channels of in[i * pixel_stride + tap + c] * w[tap][c][v]
template <class A, int kRows, int kVectors, class Finish>
PK_INLINE void product_tile(const A* in, const int64_t* taps, int64_t tap_count, int64_t channels,
                            int64_t pixel_stride, const A* w, const Finish& finish) {
  Vector<A> acc[kRows][kVectors] = {};
  for (int64_t t = 0; t < tap_count; ++t) {
    const A* from = in + taps[t];
    for (int64_t c = 0; c < channels; ++c) {
      Vector<A> wide[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) wide[v] = load(w + v * kLanes<A>);
      w += kVectors * kLanes<A>;
#pragma GCC unroll 32
      for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) acc[i][v] += from[i * pixel_stride + c] * wide[v];
      }
    }
  }
  finish(acc);
}

// Rows of a tile that kernels are compiled for; between them, tiles are split.
constexpr int kTileRows[] = {16, 14, 8, 7, 6, 4, 2, 1};

// Rows of the next tile where `left` are left: equal parts as far as kTileRows has them.
template <int kMost>
PK_INLINE int64_t next_rows(int64_t left) {
  const int64_t parts = (left + kMost - 1) / kMost;
  const int64_t part = (left + parts - 1) / parts;
  for (const int rows : kTileRows) {
    if (rows <= part) return rows;
  }
  return 1;
}

// Calls body(rows) with `rows`, one of kTileRows of at most kMost, as a constant.
template <int kMost, int kIndex = 0, class Body>
PK_INLINE void with_rows(int64_t rows, const Body& body) {
  if constexpr (kIndex < sizeof(kTileRows) / sizeof(int)) {
    if constexpr (kTileRows[kIndex] <= kMost) {
      if (rows == kTileRows[kIndex]) {
        body(std::integral_constant<int, kTileRows[kIndex]>{});
        return;
      }
    }
    with_rows<kMost, kIndex + 1>(rows, body);
  }
}

// Calls body(vectors, first channel) for blocks of at most `most` vectors that cover `channels`.
template <class A, class Body>
PK_INLINE void for_vector_blocks(int64_t channels, int most, const Body& body) {
  int64_t c = 0;
  while (c < channels) {
    const int64_t left = (channels - c) / kLanes<A>;
    if (left >= 4 && most >= 4) {
      body(std::integral_constant<int, 4>{}, c);
      c += 4 * kLanes<A>;
    } else if (left >= 2) {
      body(std::integral_constant<int, 2>{}, c);
      c += 2 * kLanes<A>;
    } else {
      body(std::integral_constant<int, 1>{}, c);
      c += kLanes<A>;
    }
  }
}

// Vectors of output channels in a tile: wide tiles for 1x1 kernels; two vectors for others, whose
// weights pass through the first-level cache for every tile.
PK_INLINE int tile_vectors(const ConvSize& conv) { return conv.taps() == 1 ? 4 : 2; }

// out[p][k] for the pixels of a strip out of a bordered operand and packed weights.
template <class A, class Finish>
PK_INLINE void strip_product(const A* in, int64_t pitch, const Strip& strip, const ConvSize& conv,
                             const int64_t* taps, int64_t in_channels, int64_t out_channels,
                             const A* packed, const Finish& finish) {
  for_vector_blocks<A>(out_channels, tile_vectors(conv), [&](auto vectors, int64_t k) PK_LAMBDA {
    constexpr int kVectors = decltype(vectors)::value;
    const A* w = packed + k * conv.taps() * in_channels;
    for (int64_t r = 0; r < strip.rows; ++r) {
      int64_t column = 0;
      while (column < strip.width) {
        const int64_t rows = next_rows<max_tile_rows(kVectors)>(strip.width - column);
        const A* from = in + r * pitch + column * in_channels;
        const int64_t pixel = r * strip.width + column;
        with_rows<max_tile_rows(kVectors)>(rows, [&](auto count) PK_LAMBDA {
          product_tile<A, decltype(count)::value, kVectors>(
              from, taps, conv.taps(), in_channels, in_channels, w,
              [&](auto& acc) PK_LAMBDA { finish(vectors, count, acc, pixel, k); });
        });
        column += rows;
      }
    }
  });
}

// packed[block of k][tap][c][k in block] = weight[k][c][tap], for the strides of any [k][c][tap].
template <class T, class A>
void pack(A* packed, const ConvSize& conv, int64_t in_channels, int64_t out_channels,
          const T* weight, int64_t stride_k, int64_t stride_c, const int64_t* taps) {
  for_vector_blocks<A>(out_channels, tile_vectors(conv), [&](auto vectors, int64_t k) PK_LAMBDA {
    constexpr int kWidth = decltype(vectors)::value * kLanes<A>;
    for (int64_t t = 0; t < conv.taps(); ++t) {
      for (int64_t c = 0; c < in_channels; ++c) {
        const T* from = weight + taps[t] + c * stride_c + k * stride_k;
        for (int i = 0; i < kWidth; ++i) packed[i] = widened(from[i * stride_k]);
        packed += kWidth;
      }
    }
  });
}
