// Norm and activation over a tile of pixels.

#include <algorithm>

#include "../kernels.h"
#include "normalise.h"
#include "tile_vectors.h"

PK_BEGIN_ISA

// Calls body(kRelu) with a constant.
template <class Body>
PK_INLINE void with_relu(const Activation& activation, const Body& body) {
  if (activation.kind == ActivationKind::kRelu) {
    body(std::true_type{});
  } else {
    body(std::false_type{});
  }
}

// y = act(p).
template <class T>
void tile_norm_act(const T* x, T* y, int64_t pixels, int64_t channels,
                   const NormRow<Accumulate<T>>& norm) {
  using A = Accumulate<T>;
  with_relu(norm.activation, [&](auto is_relu) PK_LAMBDA {
    for_tile_vectors<A>(pixels, channels,
                        [&](auto vectors, int64_t c, auto lanes, int64_t first, int64_t count,
                            int64_t step) PK_LAMBDA {
                          constexpr int kVectors = decltype(vectors)::value;
                          const NormVectors<A, kVectors> n(norm, c, lanes, true);
                          for (int64_t p = 0; p < count; ++p) {
                            for (int v = 0; v < kVectors; ++v) {
                              const int64_t at = first + p * step + v * kLanes<A>;
                              const Vector<A> d = load(x + at, lanes) - n.mean[v];
                              const Vector<A> result = d * n.scale[v] + n.bias[v];
                              if constexpr (decltype(is_relu)::value) {
                                store(y + at, relu(result), lanes);
                              } else {
                                store(y + at, result, lanes);
                              }
                            }
                          }
                        });
  });
  const ActivationKind kind = norm.activation.kind;
  if (kind == ActivationKind::kRelu || kind == ActivationKind::kIdentity) return;
  activate(norm.activation, y, pixels * channels);
}

// The most channels of a block. Kernels with a residual or y visit all channels of a block before
// the next pixel: with so many tensors, groups of pixels are slower.
constexpr int64_t kBlockChannels = 1024;

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

  // Fills the buffer for pixels of x and dy that begin at these pointers, `step` values apart.
  template <class Lanes>
  PK_INLINE void fill(const T* x, const T* dy, int64_t pixels, int64_t step,
                      const NormVectors<A, kVectors>& n, const Activation& activation,
                      Lanes lanes) {
    if constexpr (!kRelu) {
      alignas(64) A p_values[kShortSum * kWidth];
      for (int64_t p = 0; p < pixels; ++p) {
        for (int v = 0; v < kVectors; ++v) {
          const int64_t at = p * step + v * kLanes<A>, to = p * kWidth + v * kLanes<A>;
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

// sums = the TileSums of what body(vectors, first channel, lanes, first value, pixels, step, sum,
// product) adds to two arrays of vectors. kShortSum pixels are summed in A, these sums in float64.
template <class A, class Body>
PK_INLINE void sum_tile(int64_t pixels, int64_t channels, double* sums, const Body& body) {
  std::fill(sums, sums + 2 * channels, 0.0);
  const int64_t grouped = grouped_channels<A>(channels);
  for (int64_t begin = 0, end; begin < channels; begin = end) {
    const bool is_grouped = begin < grouped;
    end = std::min(is_grouped ? grouped : channels, begin + kBlockChannels);
    const int64_t size = is_grouped ? kGroupPixels : kShortSum, summed = kShortSum / size;
    const int64_t distance = is_grouped ? count_groups(pixels) : 1;
    const int64_t count = is_grouped ? std::min(distance, pixels) : (pixels + size - 1) / size;
    for (int64_t first = 0; first < count; first += summed) {
      alignas(64) A short_sum[kBlockChannels], short_product[kBlockChannels];
      for (int64_t group = first; group < std::min(first + summed, count); ++group) {
        const int64_t pixel = is_grouped ? group : group * size;
        const int64_t length = std::min(size, (pixels - pixel + distance - 1) / distance);
        for_channel_vectors<A>(end - begin, [&](auto vectors, int64_t c, auto lanes) PK_LAMBDA {
          constexpr int kVectors = decltype(vectors)::value;
          Vector<A> sum[kVectors] = {}, product[kVectors] = {};
          for (int v = 0; v < kVectors && group != first; ++v) {
            sum[v] = load(short_sum + c + v * kLanes<A>);
            product[v] = load(short_product + c + v * kLanes<A>);
          }
          const int64_t channel = begin + c;
          body(vectors, channel, lanes, pixel * channels + channel, length, distance * channels,
               sum, product);
          for (int v = 0; v < kVectors; ++v) {
            store(short_sum + c + v * kLanes<A>, sum[v]);
            store(short_product + c + v * kLanes<A>, product[v]);
          }
        });
      }
      double *sum = sums + begin, *product = sum + channels;
      for (int64_t c = 0; c < end - begin; ++c) {
        sum[c] += short_sum[c];
        product[c] += short_product[c];
      }
    }
  }
}

// g = dy * act'(p), stored if kStore, and the TileSums of g as stored.
template <class T, bool kStore>
void tile_mask(std::bool_constant<kStore>, const T* dy, const T* x, T* g, int64_t pixels,
               int64_t channels, const NormRow<Accumulate<T>>& norm, double* sums) {
  using A = Accumulate<T>;
  with_relu(norm.activation, [&](auto is_relu) PK_LAMBDA {
    sum_tile<A>(pixels, channels, sums,
                [&](auto vectors, int64_t c, auto lanes, int64_t first, int64_t count, int64_t step,
                    Vector<A>* sum, Vector<A>* product) PK_LAMBDA {
                  constexpr int kVectors = decltype(vectors)::value;
                  const NormVectors<A, kVectors> n(norm, c, lanes, true);
                  MaskedGradient<T, kVectors, decltype(is_relu)::value> gradient;
                  gradient.fill(x + first, dy + first, count, step, n, norm.activation, lanes);
                  for (int64_t p = 0; p < count; ++p) {
                    for (int v = 0; v < kVectors; ++v) {
                      const int64_t at = first + p * step + v * kLanes<A>;
                      const Vector<A> d = load(x + at, lanes) - n.mean[v];
                      const Vector<A> masked = as_stored(
                          x, gradient.at(p, v, d * n.scale[v] + n.bias[v], load(dy + at, lanes)));
                      if constexpr (kStore) store(g + at, masked, lanes);
                      sum[v] += masked;
                      product[v] += masked * d;
                    }
                  }
                });
  });
}

// g = 0 where y <= 0, else dy, stored if kStore, and the TileSums of g: few pixels are summed in A,
// these sums in float64. Visits all channels of a block before the next pixel: for four tensors
// this is faster than groups of pixels.
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
    for_tile_vectors<A>(
        pixels, channels,
        [&](auto vectors, int64_t channel, auto lanes, int64_t first, int64_t count, int64_t step)
            PK_LAMBDA {
              constexpr int kVectors = decltype(vectors)::value;
              const NormVectors<A, kVectors> n(norm, channel, lanes, kMask);
              Vector<A> a[kVectors], b[kVectors], c[kVectors];
              for (int v = 0; v < kVectors; ++v) {
                const int64_t at = channel + v * kLanes<A>;
                a[v] = load(gradient.a + at, lanes);
                b[v] = load(gradient.b + at, lanes);
                c[v] = load(gradient.c + at, lanes);
              }
              MaskedGradient<T, kVectors, kRelu> activated;
              const int64_t part = kRelu ? count : kShortSum;
              for (int64_t begin = 0; begin < count; begin += part) {
                const int64_t length = std::min(part, count - begin), from = first + begin * step;
                activated.fill(x + from, g + from, length, step, n, norm.activation, lanes);
                for (int64_t p = 0; p < length; ++p) {
                  for (int v = 0; v < kVectors; ++v) {
                    const int64_t at = from + p * step + v * kLanes<A>;
                    const Vector<A> d = load(x + at, lanes) - n.mean[v];
                    Vector<A> masked = load(g + at, lanes);
                    if constexpr (kMask) {
                      masked = activated.at(p, v, d * n.scale[v] + n.bias[v], masked);
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
  template decltype(tile_input_gradient<T, true, true>) tile_input_gradient<T, true, true>;   \
  template decltype(tile_input_gradient<T, true, false>) tile_input_gradient<T, true, false>; \
  template decltype(tile_input_gradient<T, false, true>) tile_input_gradient<T, false, true>; \
  template decltype(tile_input_gradient<T, false, false>) tile_input_gradient<T, false, false>;
PK_FOR_DTYPES(PK_INSTANTIATE)

PK_END_ISA
