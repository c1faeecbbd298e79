// Norm and activation over a tile of pixels.

#include <algorithm>

#include "../kernels.h"
#include "normalise.h"

PK_BEGIN_ISA

// y = act(p).
template <class T>
void tile_norm_act(const T* x, T* y, int64_t pixels, int64_t channels,
                   const NormRow<Accumulate<T>>& norm) {
  constexpr int64_t kPartValues = 2048, kLeastPixels = 8;  // p stays in the first-level cache
  const int64_t part = norm.activation.kind == ActivationKind::kRelu
                           ? pixels
                           : std::max(kPartValues / channels, kLeastPixels);
  for (int64_t first = 0; first < pixels; first += part) {
    const int64_t at = first * channels, count = std::min(part, pixels - first);
    normalise(x + at, y + at, channels, count, channels, norm);
  }
}

// Calls body(kRelu) with a constant.
template <class Body>
PK_INLINE void with_relu(const Activation& activation, const Body& body) {
  if (activation.kind == ActivationKind::kRelu) {
    body(std::true_type{});
  } else {
    body(std::false_type{});
  }
}

// The most channels of a block. Kernels that read several images visit all channels of a block
// before the next pixel: that is the order of memory, which processors prefetch.
constexpr int64_t kBlockChannels = 512;

// Calls body(first channel, channels) for every block.
template <class Body>
PK_INLINE void for_channel_blocks(int64_t channels, const Body& body) {
  for (int64_t c = 0; c < channels; c += kBlockChannels) {
    body(c, std::min(kBlockChannels, channels - c));
  }
}

// The channels rounded up to whole vectors.
template <class A>
PK_INLINE int64_t in_whole_vectors(int64_t channels) {
  return (channels + kLanes<A> - 1) / kLanes<A> * kLanes<A>;
}

// A table of a block, with 0 behind it: all of its vectors are whole.
template <class A>
struct BlockTable {
  alignas(64) A values[kBlockChannels];

  BlockTable(const A* table, int64_t channels) {
    for (int64_t c = 0; c < channels; ++c) values[c] = table[c];
    for (int64_t c = channels; c < in_whole_vectors<A>(channels); ++c) values[c] = 0;
  }
};

// y = act(p + residual), with p and the sum rounded to T. The activation is ReLU or the identity.
template <class T>
void tile_norm_add_act(const T* x, const T* residual, T* y, int64_t pixels, int64_t channels,
                       const NormRow<Accumulate<T>>& norm) {
  using A = Accumulate<T>;
  for_channel_blocks(channels, [&](int64_t block, int64_t width) PK_LAMBDA {
    const BlockTable<A> mean(norm.mean + block, width), scale(norm.scale + block, width),
        bias(norm.bias + block, width);
    with_relu(norm.activation, [&](auto is_relu) PK_LAMBDA {
      for (int64_t p = 0; p < pixels; ++p) {
        for_channel_vectors<A>(width, [&](auto vectors, int64_t first, auto lanes) PK_LAMBDA {
          for (int v = 0; v < decltype(vectors)::value; ++v) {
            const int64_t c = first + v * kLanes<A>, at = p * channels + block + c;
            const Vector<A> d = load(x + at, lanes) - load(mean.values + c);
            const Vector<A> rounded =
                as_stored(x, d * load(scale.values + c) + load(bias.values + c));
            const Vector<A> sum = rounded + load(residual + at, lanes);
            store(y + at, decltype(is_relu)::value ? relu(sum) : sum, lanes);
          }
        });
      }
    });
  });
}

// The most pixels of a sum in vectors.
constexpr int64_t kShortSum = 16;

// dy * act'(p) for kVectors vectors of channels of a few pixels: computed on demand if kRelu, else
// buffered.
template <class T, int kVectors, bool kRelu>
struct MaskedGradient {
  using A = Accumulate<T>;
  static constexpr int64_t kWidth = kVectors * kLanes<A>;
  alignas(64) A values[kRelu ? 1 : kShortSum * kWidth];

  // Fills the buffer for pixels of x and dy that begin at these pointers.
  template <class Lanes>
  PK_INLINE void fill(const T* x, const T* dy, int64_t pixels, int64_t channels,
                      const NormVectors<A, kVectors>& n, const Activation& activation,
                      Lanes lanes) {
    if constexpr (!kRelu) {
      alignas(64) A p_values[kShortSum * kWidth];
      for (int64_t p = 0; p < pixels; ++p) {
        for (int v = 0; v < kVectors; ++v) {
          const int64_t at = p * channels + v * kLanes<A>, to = p * kWidth + v * kLanes<A>;
          const Vector<A> d = load(x + at, lanes) - n.mean[v];
          store(p_values + to, as_stored(x, d * n.scale[v] + n.bias[v]));
          store(values + to, load(dy + at, lanes));
        }
      }
      multiply_by_derivative(activation, p_values, values, pixels * kWidth);
    }
  }

  PK_INLINE Vector<A> at(int64_t pixel, int v, Vector<A> p, Vector<A> dy) const {
    return kRelu ? where_active<T>(p, dy) : load(values + pixel * kWidth + v * kLanes<A>);
  }
};

// g = dy * act'(p), stored if kStore, and the TileSums of g as stored: few pixels are summed in
// vectors, these sums in float64.
template <class T, bool kStore>
void tile_mask(std::bool_constant<kStore>, const T* dy, const T* x, T* g, int64_t pixels,
               int64_t channels, const NormRow<Accumulate<T>>& norm, double* sums) {
  using A = Accumulate<T>;
  std::fill(sums, sums + 2 * channels, 0.0);
  with_relu(norm.activation, [&](auto is_relu) PK_LAMBDA {
    for_channel_vectors<A>(channels, [&](auto vectors, int64_t c, auto lanes) PK_LAMBDA {
      constexpr int kVectors = decltype(vectors)::value;
      const NormVectors<A, kVectors> n(norm, c, lanes, true);
      MaskedGradient<T, kVectors, decltype(is_relu)::value> gradient;
      for (int64_t first = 0; first < pixels; first += kShortSum) {
        const int64_t end = std::min(first + kShortSum, pixels);
        gradient.fill(x + first * channels + c, dy + first * channels + c, end - first, channels, n,
                      norm.activation, lanes);
        Vector<A> short_sum[kVectors] = {}, short_product[kVectors] = {};
        for (int64_t p = first; p < end; ++p) {
          for (int v = 0; v < kVectors; ++v) {
            const int64_t at = p * channels + c + v * kLanes<A>;
            const Vector<A> d = load(x + at, lanes) - n.mean[v];
            const Vector<A> masked = as_stored(
                x, gradient.at(p - first, v, d * n.scale[v] + n.bias[v], load(dy + at, lanes)));
            if constexpr (kStore) store(g + at, masked, lanes);
            short_sum[v] += masked;
            short_product[v] += masked * d;
          }
        }
        for (int v = 0; v < kVectors; ++v) {
          const int64_t at = c + v * kLanes<A>;
          for (int i = 0; i < lanes; ++i) {
            sums[at + i] += short_sum[v][i];
            sums[channels + at + i] += short_product[v][i];
          }
        }
      }
    });
  });
}

// g = 0 where y <= 0, else dy, stored if kStore, and the TileSums of g: few pixels are summed in A,
// these sums in float64.
template <class T, bool kStore>
void tile_mask_from_y(std::bool_constant<kStore>, const T* dy, const T* x, const T* y, T* g,
                      int64_t pixels, int64_t channels, const NormRow<Accumulate<T>>& norm,
                      double* sums) {
  using A = Accumulate<T>;
  std::fill(sums, sums + 2 * channels, 0.0);
  for_channel_blocks(channels, [&](int64_t block, int64_t width) PK_LAMBDA {
    const BlockTable<A> mean(norm.mean + block, width);
    for (int64_t first = 0; first < pixels; first += kShortSum) {
      alignas(64) A short_sum[kBlockChannels], short_product[kBlockChannels];
      std::fill_n(short_sum, in_whole_vectors<A>(width), A(0));
      std::fill_n(short_product, in_whole_vectors<A>(width), A(0));
      const int64_t end = std::min(first + kShortSum, pixels);
      for (int64_t p = first; p < end; ++p) {
        for_channel_vectors<A>(width, [&](auto vectors, int64_t from, auto lanes) PK_LAMBDA {
          for (int v = 0; v < decltype(vectors)::value; ++v) {
            const int64_t c = from + v * kLanes<A>, at = p * channels + block + c;
            const Vector<A> d = load(x + at, lanes) - load(mean.values + c);
            const Vector<A> masked = where_active<A>(load(y + at, lanes), load(dy + at, lanes));
            if constexpr (kStore) store(g + at, masked, lanes);
            store(short_sum + c, load(short_sum + c) + masked);
            store(short_product + c, load(short_product + c) + masked * d);
          }
        });
      }
      double *sum = sums + block, *product = sum + channels;
      for (int64_t c = 0; c < width; ++c) {
        sum[c] += short_sum[c];
        product[c] += short_product[c];
      }
    }
  });
}

// dx = [skip +] a*g + b*(x - mean) + c; if kMask, g is first multiplied by act'(p).
template <class T, bool kMask, bool kHasSkip>
void tile_input_gradient(std::bool_constant<kMask>, std::bool_constant<kHasSkip>,
                         const GradientPointers<T>& tile, int64_t pixels, int64_t channels,
                         const NormRow<Accumulate<T>>& norm,
                         const GradientRow<Accumulate<T>>& gradient) {
  using A = Accumulate<T>;
  const T *skip = tile.skip, *g = tile.g, *x = tile.x;
  T* dx = tile.dx;
  const auto run = [&](auto is_relu) PK_LAMBDA {
    constexpr bool kRelu = decltype(is_relu)::value;
    for_channel_vectors<A>(channels, [&](auto vectors, int64_t first, auto lanes) PK_LAMBDA {
      constexpr int kVectors = decltype(vectors)::value;
      const NormVectors<A, kVectors> n(norm, first, lanes, kMask);
      Vector<A> a[kVectors], b[kVectors], c[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = first + v * kLanes<A>;
        a[v] = load(gradient.a + at, lanes);
        b[v] = load(gradient.b + at, lanes);
        c[v] = load(gradient.c + at, lanes);
      }
      MaskedGradient<T, kVectors, kRelu> activated;
      const int64_t part = kRelu ? pixels : kShortSum;
      for (int64_t begin = 0; begin < pixels; begin += part) {
        const int64_t end = std::min(begin + part, pixels), from = begin * channels + first;
        activated.fill(x + from, g + from, end - begin, channels, n, norm.activation, lanes);
        for (int64_t p = begin; p < end; ++p) {
          for (int v = 0; v < kVectors; ++v) {
            const int64_t at = p * channels + first + v * kLanes<A>;
            const Vector<A> d = load(x + at, lanes) - n.mean[v];
            Vector<A> masked = load(g + at, lanes);
            if constexpr (kMask) {
              masked = activated.at(p - begin, v, d * n.scale[v] + n.bias[v], masked);
            }
            Vector<A> result = a[v] * masked;
            if (gradient.in_training) result += b[v] * d + c[v];
            if constexpr (kHasSkip) result += load(skip + at, lanes);
            store(dx + at, result, lanes);
          }
        }
      }
    });
  };
  if constexpr (kMask) {
    with_relu(norm.activation, run);
  } else {
    run(std::true_type{});
  }
}

#define PK_INSTANTIATE(T)                                                                     \
  template decltype(tile_norm_act<T>) tile_norm_act<T>;                                       \
  template decltype(tile_norm_add_act<T>) tile_norm_add_act<T>;                               \
  template decltype(tile_mask<T, true>) tile_mask<T, true>;                                   \
  template decltype(tile_mask<T, false>) tile_mask<T, false>;                                 \
  template decltype(tile_mask_from_y<T, true>) tile_mask_from_y<T, true>;                     \
  template decltype(tile_mask_from_y<T, false>) tile_mask_from_y<T, false>;                   \
  template decltype(tile_input_gradient<T, true, false>) tile_input_gradient<T, true, false>; \
  template decltype(tile_input_gradient<T, false, true>) tile_input_gradient<T, false, true>; \
  template decltype(tile_input_gradient<T, false, false>) tile_input_gradient<T, false, false>;
PK_FOR_DTYPES(PK_INSTANTIATE)

PK_END_ISA
