// The g of a step that was not stored: g = [p > 0] * dz * weight, where dz is the gradient of the
// output of a 1x1 convolution of relu(p), and has a step itself. The kernel of that convolution
// computed g by the same operations and added up its sums: the bits are equal.
#pragma once

#include "conv_params.cuh"

namespace preact_kernels::cuda {

// The kernel reads g.
struct StoredG {};

// The kernel recomputes g, for the last convolution of bottlenecks of one inner width. dz has
// CHANNELS, a tile PIXELS.
template <int CHANNELS, int PIXELS>
struct RecomputedGOfWidth {
  static constexpr int kChannels = CHANNELS, kOutChannels = 4 * CHANNELS, kPixels = PIXELS;

  const RecomputedGPointers& pointers;
};

// What this adds to the shared memory of a block.
template <class T>
struct RecomputedGShared {
  static constexpr int kWidth = kFullWidth<T>;
  using Ahead = VectorsAhead<T, kWidth>;  // g and x of the step of dz

  int weights, step, bn_bias, ahead;  // offsets in bytes
  int bytes;

  // For dz of `channels` and g of `out_channels`.
  __host__ __device__ RecomputedGShared(int pixels, int channels, int out_channels) {
    weights = 0;
    step = weights + channels * (out_channels * int(sizeof(T)) + 16);
    bn_bias = step + InputGradient<kWidth>::kRows * channels * 4;
    ahead = bn_bias + out_channels * 4;
    bytes = ahead + Ahead::bytes(pixels, channels, 2);
  }
};

// Computes dz * weight for one tile of pixels after the other.
template <class T, class G>
class RecomputedGTiles {
  static constexpr int kWidth = kFullWidth<T>;
  static constexpr int kChannels = G::kChannels, kOutChannels = G::kOutChannels;
  static constexpr int kPixels = G::kPixels;
  static_assert(kThreads % (kChannels / kWidth) == 0, "threads without vectors of dz");
  using Shared = RecomputedGShared<T>;
  using Ahead = typename Shared::Ahead;

 public:
  // `own` are the thread's vectors of dz.
  __device__ RecomputedGTiles(const RecomputedGPointers& pointers, unsigned char* memory,
                              const ThreadColumn& own)
      : pointers_(pointers),
        memory_(memory),
        own_(own),
        shared_(kPixels, kChannels, kOutChannels) {}

  // Loads what no kernel of this call writes.
  __device__ void load_parameters() const {
    const T* weight = static_cast<const T*>(pointers_.weight);
    cuda::load_weights<T, 1>(weight, weights(), kChannels, kOutChannels);
    float* bias = reinterpret_cast<float*>(memory_ + shared_.bn_bias);
    for (int c = threadIdx.x; c < kOutChannels; c += kThreads) bias[c] = pointers_.bn_bias[c];
    InputGradient<kWidth>::load_parameters(pointers_.step, kChannels, step());
  }

  __device__ void read_sums() const {
    InputGradient<kWidth>::read_sums(pointers_.step, kChannels, step());
  }

  __device__ void copy_ahead(const Tile<0>& tile) const {
    const T* g = static_cast<const T*>(pointers_.g) + own_.channel;
    const T* x = static_cast<const T*>(pointers_.step.x) + own_.channel;
    for_own_pixels([&](int i, int p) {
      const int64_t pixel = tile.pixel(p), at = pixel * kChannels;
      g_ahead().copy(i, g + at, pixel >= 0);
      if (pointers_.step.reads_x()) x_ahead().copy(i, x + at, pixel >= 0);
    });
  }

  // Forms dz [pixels][channels + one vector] of a tile that was copied ahead.
  __device__ void form_dz(const Tile<0>& tile, T* dz) const {
    const InputGradient<kWidth> gradient(FromShared{}, step(), kChannels, own_.channel);
    for_own_pixels([&](int i, int p) {
      FullVector<T> operand{};
      if (tile.pixel(p) >= 0) {
        operand = as_operand<T>(
            gradient.template apply<T>(pointers_.step, i, g_ahead(), x_ahead(), x_ahead()));
      }
      operand.store(dz + p * (kChannels + kWidth) + own_.channel);
    });
  }

  // Fills products [pixels][out_channels + one vector] from dz, which is complete.
  __device__ void multiply(const T* dz, T* products) const {
    multiply_weights<T, 0, true>(dz, weights(), kPixels, kChannels, kOutChannels, products,
                                 kOutChannels + kWidth);
  }

  __device__ const float* bn_bias() const {
    return reinterpret_cast<const float*>(memory_ + shared_.bn_bias);
  }

 private:
  __device__ T* weights() const { return reinterpret_cast<T*>(memory_ + shared_.weights); }
  __device__ float* step() const { return reinterpret_cast<float*>(memory_ + shared_.step); }
  __device__ Ahead g_ahead() const { return Ahead(memory_ + shared_.ahead, 0, 2); }
  __device__ Ahead x_ahead() const { return Ahead(memory_ + shared_.ahead, 1, 2); }

  template <class Body>
  __device__ void for_own_pixels(const Body& body) const {
#pragma unroll
    for (int i = 0; i < kTileVectors<T, 0>; ++i) {
      const int p = own_.lane + i * own_.lanes;
      if (p >= kPixels) break;
      body(i, p);
    }
  }

  const RecomputedGPointers& pointers_;
  unsigned char* memory_;
  const ThreadColumn& own_;
  Shared shared_;
};

// Vectors of g: the products, `stride` apart, masked. relu(p) is computed and rounded as in the
// kernel that added up the sums: the masks are equal.
template <class T, class XAhead>
struct RecomputedGVectors {
  static constexpr int kWidth = kFullWidth<T>;

  const Normalisation<kWidth>& norm;
  const T* products;
  int stride;
  const XAhead& x;

  __device__ Vector<float, kWidth> operator[](int i) const {
    float g[kWidth], a[kWidth];
    FullVector<T> product;
    Vector<float, kWidth> masked;
    product.load(products + i * stride);
    product.unpack(g);
    norm.template activation<T>(x[i]).unpack(a);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) g[j] = a[j] == 0 ? 0 : g[j];
    masked.pack(g);
    return masked;
  }
};

}  // namespace preact_kernels::cuda
