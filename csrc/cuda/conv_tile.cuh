// Tiles of pixels in shared memory, weights, and products.
//
// A tile is [pixels, channels] in the dtype of products (float32 as TF32). Rows are padded by 16
// bytes: the eight rows of an ldmatrix are then in different banks. A tile of a 1x1 convolution is
// consecutive pixels of the batch, of a 3x3 convolution (stride 1, padding 1) a rectangle of one
// image with a halo of one pixel.
#pragma once

#include "batch_norm.cuh"
#include "divisor.cuh"

namespace preact_kernels::cuda {

constexpr int kWarps = kThreads / 32;

// C is the number of channels of a 3x3 convolution (in and out), or 0 for a 1x1 convolution.

// The tiles of pixels of a batch. A 1x1 convolution treats the batch as one row.
struct TileGrid {
  int height, width;
  int tiles_down, tiles_across;  // tiles of one image
  int tiles;
  int tile_pixels;  // pixels in a tile without its halo; a multiple of 16
  Divisor tiles_of_image, tiles_of_row;
};

// One tile, and the indices of its pixels in the tensor: 32 bits, as a batch has at most 2^30
// pixels. Callers convert to 64 bits to address memory.
template <int C>
struct Tile {
  static constexpr int kTaps = 9, kHalo = 1;
  static constexpr int kWidth = C == 64 ? 8 : 16, kHeight = C == 16 ? 16 : 8;
  static constexpr int kHaloWidth = kWidth + 2 * kHalo;
  static constexpr int kPixels = kHeight * kWidth;
  static constexpr int kHaloPixels = (kHeight + 2 * kHalo) * kHaloWidth;

  int image;        // index of the image's first pixel
  int row, column;  // position of the tile's first pixel
  int height, width;

  __device__ Tile(const TileGrid& grid, int index) : height(grid.height), width(grid.width) {
    const int images = grid.tiles_of_image.divide(index);
    const int tile = index - images * grid.tiles_down * grid.tiles_across;
    const int rows = grid.tiles_of_row.divide(tile);
    image = images * height * width;
    row = rows * kHeight;
    column = (tile - rows * grid.tiles_across) * kWidth;
  }

  static __host__ __device__ int pixels(int) { return kPixels; }
  static __host__ __device__ int halo_pixels(int) { return kHaloPixels; }

  // The pixel of the tensor `down` and `right` of the tile's first, or -1 outside the image.
  __device__ int at(int down, int right) const {
    const int r = row + down, c = column + right;
    const bool exists = unsigned(r) < unsigned(height) && unsigned(c) < unsigned(width);
    return exists ? image + r * width + c : -1;
  }
  __device__ int pixel(int i) const { return at(i / kWidth, i % kWidth); }
  __device__ int halo_pixel(int i) const {
    return at(i / kHaloWidth - kHalo, i % kHaloWidth - kHalo);
  }
  // Whether a pixel of the halo tile is inside the tile.
  static __device__ bool is_interior(int i) {
    return unsigned(i / kHaloWidth - kHalo) < unsigned(kHeight) &&
           unsigned(i % kHaloWidth - kHalo) < unsigned(kWidth);
  }
  // The row of the halo tile that tap r, s of pixel i reads.
  static __device__ int halo_row(int i, int r, int s) {
    return (i / kWidth + r) * kHaloWidth + i % kWidth + s;
  }
  // Whether pixel i and the pixel at its tap r, s are both in the image.
  __device__ bool is_pair(int i, int r, int s) const {
    return pixel(i) >= 0 && halo_pixel(halo_row(i, r, s)) >= 0;
  }
};

template <>
struct Tile<0> {
  static constexpr int kTaps = 1;

  int first, end;

  __device__ Tile(const TileGrid& grid, int index)
      : first(index * grid.tile_pixels), end(grid.width) {}

  static __host__ __device__ int pixels(int tile_pixels) { return tile_pixels; }
  static __host__ __device__ int halo_pixels(int tile_pixels) { return tile_pixels; }

  __device__ int pixel(int i) const { return first + i < end ? first + i : -1; }
  __device__ int halo_pixel(int i) const { return pixel(i); }
  static __device__ bool is_interior(int) { return true; }
  static __device__ int halo_row(int i, int, int) { return i; }
  __device__ bool is_pair(int i, int, int) const { return pixel(i) >= 0; }
};

// Pixels that threads take at a time, for channels in vectors of `width`.
__host__ __device__ inline int lanes_of(int channels, int width) {
  return kThreads / (channels / width);
}

// The vectors of a thread in a tile: one column of every `lanes`-th pixel. Threads after the last
// full lane have none.
struct ThreadColumn {
  int lanes, lane, channel;
  bool is_active;

  __device__ ThreadColumn(int channels, int vector) {
    const int vectors = channels / vector;
    lanes = lanes_of(channels, vector);
    lane = threadIdx.x / vectors;
    channel = threadIdx.x % vectors * vector;
    is_active = lane < lanes;
  }

  // Calls body(i, pixel) for the thread's vectors in a tile, at most kMost.
  template <int kMost, class Body>
  __device__ void for_pixels(int pixels, const Body& body) const {
    if (!is_active) return;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const int p = lane + i * lanes;
      if (p >= pixels) break;
      body(i, p);
    }
  }
};

// The most vectors of a thread, in a tile without and with halo.
template <class T, int C>
constexpr int kTileVectors = C == 0 ? 4 : sizeof(T);
template <class T, int C>
constexpr int kHaloVectors =
    (Tile<C>::kHaloPixels * C * int(sizeof(T)) / 16 + kThreads - 1) / kThreads;
template <class T>
constexpr int kHaloVectors<T, 0> = kTileVectors<T, 0>;

// Pixels in a tile of a 1x1 convolution: a thread has at most `vectors` of its input or output.
template <class T>
__host__ __device__ constexpr int pixels_of_tile(int in_channels, int out_channels, int vectors) {
  const int channels = in_channels > out_channels ? in_channels : out_channels;
  const int pixels = kThreads / (channels / kFullWidth<T>)*vectors / 16 * 16;
  return pixels < 256 ? pixels : 256;
}

// Vectors that a thread copies to shared memory asynchronously. The same thread reads them, so no
// barrier is needed. A vector has parts of 16 bytes.
template <class T, int kWidth>
constexpr int kParts = kWidth * int(sizeof(T)) / 16;
template <class T, int kWidth>
class VectorsAhead {
  static constexpr int kParts = cuda::kParts<T, kWidth>, kPartBytes = kThreads * 16;

 public:
  // Bytes for a tile. Vectors of several tensors alternate, with `parts` in all.
  static __host__ __device__ int bytes(int pixels, int channels, int parts = kParts) {
    const int lanes = lanes_of(channels, kWidth);
    return (pixels + lanes - 1) / lanes * parts * kPartBytes;
  }

  // `first` counts the parts of the tensors before this one.
  __device__ explicit VectorsAhead(unsigned char* shared, int first = 0, int parts = kParts)
      : own_(shared + first * kPartBytes + threadIdx.x * 16), pitch_(parts * kPartBytes) {}

  // Zeros unless `exists`.
  __device__ void copy(int i, const T* from, bool exists) const {
#pragma unroll
    for (int j = 0; j < kParts; ++j) cp_async_16(part(i, j), from + j * kFullWidth<T>, exists);
  }
  __device__ Vector<T, kWidth> operator[](int i) const {
    Vector<T, kWidth> vector;
    if constexpr (kParts == 1) {
      vector.load(reinterpret_cast<const T*>(part(i, 0)));
    } else {
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        vector.half[j].load(reinterpret_cast<const T*>(part(i, j)));
      }
    }
    return vector;
  }

 private:
  __device__ unsigned char* part(int i, int j) const { return own_ + i * pitch_ + j * kPartBytes; }

  unsigned char* own_;
  int pitch_;
};

// Fills `shared` [taps][K][C + one vector] with a weight stored [K][taps][C], aligned to 16 bytes.
// Half precision is copied asynchronously, in a group of its own.
template <class T, int TAPS>
__device__ void load_weights(const T* packed, T* shared, int out_channels, int channels) {
  constexpr int kWidth = kFullWidth<T>;
  const int pitch = channels + kWidth, vectors = channels / kWidth;
#pragma unroll 4
  for (int i = threadIdx.x; i < TAPS * out_channels * vectors; i += kThreads) {
    const int c = i % vectors * kWidth, row = i / vectors;
    const int tap = row % TAPS, k = row / TAPS;
    T* to = shared + (tap * out_channels + k) * pitch + c;
    if constexpr (sizeof(T) == 2) {
      cp_async_16(to, packed + row * channels + c, true);
    } else {
      FullVector<T> vector;
      vector.load(packed + row * channels + c);
      as_operand<T>(vector).store(to);
    }
  }
  cp_async_commit();
}

// sums[p][n] = the sum over taps and k < depth of tile[p at that tap][k] * weights[tap][n][k], or,
// for the input gradient, of tile[p at the opposite tap][k] * weights[tap][k][n].
template <class T, int C, bool IS_GRADIENT, class Sum>
__device__ void multiply_weights(const T* tile, const T* weights, int tile_pixels, int depth,
                                 int columns, Sum* sums, int sums_pitch) {
  constexpr int kSide = Tile<C>::kTaps == 1 ? 1 : 3;
  constexpr int kColumns = C == 16 ? 16 : 32;  // the most that a warp computes at a time
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int pitch = depth + kFullWidth<T>;
  const int weight_pitch = (IS_GRADIENT ? columns : depth) + kFullWidth<T>;
  const int weight_rows = IS_GRADIENT ? depth : columns;
  const int row_tiles = tile_pixels / 16;
  // Fewer columns if there are fewer tasks than warps.
  const int step = row_tiles * ((columns + kColumns - 1) / kColumns) < kWarps ? 16 : kColumns;
  const int tasks = row_tiles * ((columns + step - 1) / step);
  for (int task = warp; task < tasks; task += kWarps) {
    const int first = task % row_tiles * 16, n = task / row_tiles * step;
    const bool is_full = step == kColumns && (C != 0 || columns - n > 16);
    float d[kColumns / 8][4] = {};
#pragma unroll 1
    for (int r = 0; r < kSide; ++r) {
#pragma unroll(C == 32 ? 1 : 3)  // unrolling by three spills for 32
      for (int s = 0; s < kSide; ++s) {
        const int row = IS_GRADIENT
                            ? Tile<C>::halo_row(first + lane % 16, kSide - 1 - r, kSide - 1 - s)
                            : Tile<C>::halo_row(first + lane % 16, r, s);
        const T* a_row = tile + row * pitch + lane / 16 * (kStep<T> / 2);
        const T* w = weights + (r * kSide + s) * weight_rows * weight_pitch;
#pragma unroll(C == 0 ? 2 : 4)
        for (int k = 0; k < depth; k += kStep<T>) {
          uint32_t a[4];
          ldmatrix_x4(a, a_row + k);
#pragma unroll
          for (int half = 0; half < kColumns / 16; ++half) {
            if (half > 0 && !is_full) break;
            uint32_t b[2][2];
            const int at = n + 16 * half;
            if constexpr (IS_GRADIENT) {
              load_b_by_rows<T>(b, [=](int i) { return w + (k + i) * weight_pitch + at; });
            } else {
              load_b_by_columns<T>(b, w + at * weight_pitch + k, weight_pitch);
            }
            mma<T>(d[2 * half], a, b[0]);
            mma<T>(d[2 * half + 1], a, b[1]);
          }
        }
      }
    }
    Sum* to = sums + (first + lane / 4) * sums_pitch + n + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      if (j >= 2 && !is_full) break;
      store_pair(to + 8 * j, d[j][0], d[j][1]);
      store_pair(to + 8 * sums_pitch + 8 * j, d[j][2], d[j][3]);
    }
  }
}

}  // namespace preact_kernels::cuda
