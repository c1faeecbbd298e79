// The g of a fold that no kernel stored: g = [p > 0] * dz * weight, where dz is the gradient of the
// output of a 1x1 convolution of relu(p), and is folded itself. The kernel of that convolution
// computed the sums of g, and these are the same bits.
#pragma once

#include "conv_tile.cuh"

namespace preact_kernels::cuda {

// The batch norm that p is from is that of the fold of g. dz has as many channels as the input of
// the convolution whose kernel this is.
struct ProductPointers {
  const void* g;       // that the fold of dz applies to, in the dtype of operands
  FoldPointers fold;   // of dz, without skip
  const void* weight;  // [channels of dz][channels of g]
  const float* bias;   // of the batch norm
};

// A fold without a product. 0: sizes that the compiler does not know.
struct NoProduct {
  static constexpr int kChannels = 0, kOutChannels = 0, kPixels = 0;
};

// A product in a kernel for bottlenecks of one inner width. It executes 30% fewer instructions than
// one for any width, which would cost more time than the bytes of g.
template <int CHANNELS, int PIXELS>
struct Product {
  static constexpr int kChannels = CHANNELS, kOutChannels = 4 * CHANNELS;
  static constexpr int kPixels = PIXELS;  // of a tile

  const ProductPointers& pointers;
};

// Shared memory of a product, in this order.
template <class T>
struct ProductShared {
  static constexpr int kWidth = kFullWidth<T>;
  using Ahead = VectorsAhead<T, kWidth>;  // of g and of the fold's x

  int weights, fold, bias, ahead;  // where each begins
  int bytes;

  // Of a tile of `pixels`, for g of `columns` channels and dz of `channels`.
  __host__ __device__ ProductShared(int pixels, int columns, int channels) {
    weights = 0;
    fold = weights + channels * (columns * int(sizeof(T)) + 16);
    bias = fold + InputGradient<kWidth>::kRows * channels * 4;
    ahead = bias + columns * 4;
    bytes = ahead + Ahead::bytes(pixels, channels, 2);
  }
};

// The products of one tile of pixels after the other.
template <class T>
class ProductTiles {
  static constexpr int kWidth = kFullWidth<T>;
  using Ahead = typename ProductShared<T>::Ahead;

 public:
  // The thread's vectors of dz are those of `own`.
  __device__ ProductTiles(const ProductPointers& product, unsigned char* memory,
                          const ThreadColumn& own, int pixels, int columns, int channels)
      : product_(product),
        memory_(memory),
        own_(own),
        pixels_(pixels),
        columns_(columns),
        channels_(channels),
        shared_(pixels, columns, channels) {}

  // What no kernel ahead of this one writes.
  __device__ void load_parameters() const {
    const T* weight = static_cast<const T*>(product_.weight);
    cuda::load_weights<T, 1>(weight, weights(), channels_, columns_);
    float* bias = reinterpret_cast<float*>(memory_ + shared_.bias);
    for (int c = threadIdx.x; c < columns_; c += kThreads) bias[c] = product_.bias[c];
    InputGradient<kWidth>::load_parameters(product_.fold, channels_, fold());
  }

  __device__ void read_sums() const {
    InputGradient<kWidth>::read_sums(product_.fold, channels_, fold());
  }

  __device__ void copy_ahead(const Tile<0>& tile) const {
    const T* g = static_cast<const T*>(product_.g) + own_.channel;
    const T* x = static_cast<const T*>(product_.fold.x) + own_.channel;
    for_own_pixels([&](int i, int p) {
      const int64_t pixel = tile.pixel(p), at = pixel * channels_;
      g_ahead().copy(i, g + at, pixel >= 0);
      if (product_.fold.reads_x()) x_ahead().copy(i, x + at, pixel >= 0);
    });
  }

  // Forms dz [pixels][channels + one vector] of a tile that was copied ahead.
  __device__ void form_dz(const Tile<0>& tile, T* dz) const {
    if (!own_.is_active) return;
    const InputGradient<kWidth> gradient(FromShared{}, fold(), channels_, own_.channel);
    for_own_pixels([&](int i, int p) {
      FullVector<T> operand{};
      if (tile.pixel(p) >= 0) {
        operand = as_operand<T>(
            gradient.template unfold<T>(product_.fold, i, g_ahead(), x_ahead(), x_ahead()));
      }
      operand.store(dz + p * (channels_ + kWidth) + own_.channel);
    });
  }

  // Fills products [pixels][columns + one vector] from dz, which is complete.
  __device__ void multiply(const T* dz, T* products) const {
    multiply_weights<T, 0, true>(dz, weights(), pixels_, channels_, columns_, products,
                                 columns_ + kWidth);
  }

  // Of the batch norm, [columns].
  __device__ const float* bias() const {
    return reinterpret_cast<const float*>(memory_ + shared_.bias);
  }

 private:
  __device__ T* weights() const { return reinterpret_cast<T*>(memory_ + shared_.weights); }
  __device__ float* fold() const { return reinterpret_cast<float*>(memory_ + shared_.fold); }
  __device__ Ahead g_ahead() const { return Ahead(memory_ + shared_.ahead, 0, 2); }
  __device__ Ahead x_ahead() const { return Ahead(memory_ + shared_.ahead, 1, 2); }

  template <class Body>
  __device__ void for_own_pixels(const Body& body) const {
    if (!own_.is_active) return;
#pragma unroll
    for (int i = 0; i < kTileVectors<T, 0>; ++i) {
      const int p = own_.lane + i * own_.lanes;
      if (p >= pixels_) break;
      body(i, p);
    }
  }

  const ProductPointers& product_;
  unsigned char* memory_;
  const ThreadColumn& own_;
  int pixels_, columns_, channels_;
  ProductShared<T> shared_;
};

// Vectors of g from their products, which are `stride` apart, and from x.
template <class T, class OfX>
struct MaskedProducts {
  static constexpr int kWidth = kFullWidth<T>;

  const InputGradient<kWidth>& gradient;  // of the fold: its a is the scale of the batch norm
  float bias[kWidth];
  const T* products;
  int stride;
  const OfX& x;

  __device__ MaskedProducts(const InputGradient<kWidth>& gradient, const float* bias,
                            const T* products, int stride, const OfX& x)
      : gradient(gradient), products(products), stride(stride), x(x) {
    load_floats(this->bias, bias);
  }

  __device__ Vector<float, kWidth> operator[](int i) const {
    FullVector<T> product;
    Vector<float, kWidth> masked;
    float g[kWidth], p[kWidth];
    product.load(products + i * stride);
    product.unpack(g);
    x[i].unpack(p);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      p[j] = (p[j] - gradient.mean[j]) * gradient.a[j] + bias[j];
      g[j] = is_zero_operand<T>(p[j]) ? 0 : g[j];
    }
    masked.pack(g);
    return masked;
  }
};

}  // namespace preact_kernels::cuda
