// Work distribution of memory-bound kernels over a matrix [pixels, channels]. An access has the
// most numbers, up to 16 bytes, that divide the channels and to which memory is aligned.
//
// A thread keeps its channels and loops over pixels: the coefficients of its channels stay in
// registers. Neighbouring threads take neighbouring vectors of a pixel, then the next pixel. The
// number of thread blocks, and so the order of sums, depends only on the shape and the device.
#pragma once

#include <type_traits>

#include "../args.h"
#include "device.cuh"

namespace preact_kernels::cuda {

constexpr int kThreads = 256;

struct PixelRows {
  int64_t pixels;
  int channels;
  int columns;  // vectors of a pixel that one thread block takes; blockIdx.y selects which
  int thread_block_pixels;  // pixels at a time: kThreads / columns, one a thread
  unsigned per_column;      // 2^16 / columns, rounded up: divides numbers below kThreads
};

// kWidth numbers of type T that one access loads or stores.
template <class T, int kWidth>
struct Vector {
  static_assert(kWidth == 1);
  T value;

  __device__ void load(const T* from) { value = *from; }
  __device__ void store(T* to) const { *to = value; }
  __device__ void unpack(float (&to)[1]) const { to[0] = to_float(value); }
  __device__ void pack(const float (&from)[1]) { value = from_float<T>(from[0]); }
};

template <>
struct Vector<float, 4> {
  float4 value;

  __device__ void load(const float* from) { value = *reinterpret_cast<const float4*>(from); }
  __device__ void store(float* to) const { *reinterpret_cast<float4*>(to) = value; }
  __device__ void unpack(float (&to)[4]) const {
    to[0] = value.x, to[1] = value.y, to[2] = value.z, to[3] = value.w;
  }
  __device__ void pack(const float (&from)[4]) {
    value = make_float4(from[0], from[1], from[2], from[3]);
  }
};

template <>
struct Vector<float, 8> {
  Vector<float, 4> half[2];

  __device__ void load(const float* from) { half[0].load(from), half[1].load(from + 4); }
  __device__ void store(float* to) const { half[0].store(to), half[1].store(to + 4); }
  __device__ void unpack(float (&to)[8]) const {
    for (int i = 0; i < 2; ++i) {
      const float4 v = half[i].value;
      to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
    }
  }
  __device__ void pack(const float (&from)[8]) {
    for (int i = 0; i < 2; ++i) {
      half[i].value = make_float4(from[4 * i], from[4 * i + 1], from[4 * i + 2], from[4 * i + 3]);
    }
  }
};

template <>
struct Vector<float, 2> {
  float2 value;

  __device__ void load(const float* from) { value = *reinterpret_cast<const float2*>(from); }
  __device__ void store(float* to) const { *reinterpret_cast<float2*>(to) = value; }
  __device__ void unpack(float (&to)[2]) const { to[0] = value.x, to[1] = value.y; }
  __device__ void pack(const float (&from)[2]) { value = make_float2(from[0], from[1]); }
};

// Four bytes.
template <class T>
struct Vector<T, 2> {
  uint32_t value;

  __device__ void load(const T* from) { value = *reinterpret_cast<const uint32_t*>(from); }
  __device__ void store(T* to) const { *reinterpret_cast<uint32_t*>(to) = value; }
  __device__ void unpack(float (&to)[2]) const {
    const float2 both = unpack_pair<T>(value);
    to[0] = both.x, to[1] = both.y;
  }
  __device__ void pack(const float (&from)[2]) { value = pack_pair<T>(from[0], from[1]); }
};

// Eight bytes.
template <class T>
struct Vector<T, 4> {
  uint2 value;

  __device__ void load(const T* from) { value = *reinterpret_cast<const uint2*>(from); }
  __device__ void store(T* to) const { *reinterpret_cast<uint2*>(to) = value; }
  __device__ void unpack(float (&to)[4]) const {
    const float2 low = unpack_pair<T>(value.x), high = unpack_pair<T>(value.y);
    to[0] = low.x, to[1] = low.y, to[2] = high.x, to[3] = high.y;
  }
  __device__ void pack(const float (&from)[4]) {
    value = make_uint2(pack_pair<T>(from[0], from[1]), pack_pair<T>(from[2], from[3]));
  }
};

template <class T>
struct Vector<T, 8> {
  uint4 value;

  __device__ void load(const T* from) { value = *reinterpret_cast<const uint4*>(from); }
  __device__ void store(T* to) const { *reinterpret_cast<uint4*>(to) = value; }
  __device__ void unpack(float (&to)[8]) const {
    const uint32_t pairs[4] = {value.x, value.y, value.z, value.w};
    for (int i = 0; i < 4; ++i) {
      const float2 both = unpack_pair<T>(pairs[i]);
      to[2 * i] = both.x;
      to[2 * i + 1] = both.y;
    }
  }
  __device__ void pack(const float (&from)[8]) {
    value = make_uint4(pack_pair<T>(from[0], from[1]), pack_pair<T>(from[2], from[3]),
                       pack_pair<T>(from[4], from[5]), pack_pair<T>(from[6], from[7]));
  }
};

// Stores a vector to global memory.
template <class T, int kWidth>
__device__ inline void store_global(const Vector<T, kWidth>& vector, T* to) {
  using Value = decltype(vector.value);
  if constexpr (sizeof(Value) > 4) {
    store_global(reinterpret_cast<Value*>(to), vector.value);
  } else {
    vector.store(to);
  }
}

// A value rounded to T.
template <class T>
__device__ inline float rounded(float value) {
  return to_float(from_float<T>(value));
}

template <class T>
constexpr int kFullWidth = 16 / sizeof(T);

// Loads the first `steps` of kSteps vectors that are `stride` elements apart.
template <class T, int kWidth, int kSteps>
__device__ inline void load_rows(Vector<T, kWidth> (&to)[kSteps], const T* from, int64_t stride,
                                 int steps) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    if (s < steps) to[s].load(from + s * stride);
  }
}

// Adds `values` over the threads of a thread block with the same column. `row` is the thread's. The
// threads of row 0 find their sums in `shared` [kValues, kThreads].
template <int kValues>
__device__ inline void sum_over_rows(const double (&values)[kValues], int row,
                                     const PixelRows& rows, double* shared) {
  const int thread = threadIdx.x;
  __syncthreads();  // all threads have read an earlier sum
#pragma unroll
  for (int i = 0; i < kValues; ++i) shared[i * kThreads + thread] = values[i];
  for (int left = rows.thread_block_pixels; left > 1;) {
    const int half = (left + 1) / 2;
    __syncthreads();
    if (row + half < left) {  // implies row < half
#pragma unroll
      for (int i = 0; i < kValues; ++i) {
        shared[i * kThreads + thread] += shared[i * kThreads + thread + half * rows.columns];
      }
    }
    left = half;
  }
  __syncthreads();
}

// The pixels and channels of a thread: kSteps pixels of kWidth channels at a time.
template <int kWidth, int kSteps>
struct ThreadRows {
  int row, channel;   // the first channel
  int block_channel;  // the first channel of the thread block
  bool is_used;       // whether the thread has pixels, and `channel` is one
  const PixelRows& of;

  __device__ explicit ThreadRows(const PixelRows& of) : of(of) {
    row = threadIdx.x * of.per_column >> 16;
    block_channel = blockIdx.y * of.columns * kWidth;
    channel = block_channel + (threadIdx.x - row * of.columns) * kWidth;
    is_used = row < of.thread_block_pixels && channel < of.channels;
  }

  // Channels of the thread block, at most kThreads.
  __device__ int block_channels() const {
    const int left = of.channels - block_channel, most = of.columns * kWidth;
    return left < most ? left : most;
  }

  // Calls body(at, stride, steps) for the elements at, at + stride, ... of `steps` <= kSteps
  // pixels, in every `parts`-th tile from `part` on.
  template <class Body>
  __device__ void for_each(const Body& body, unsigned part, unsigned parts) const {
    if (!is_used) return;
    const int tile = of.thread_block_pixels * kSteps;
    const int64_t stride = int64_t(of.thread_block_pixels) * of.channels;
    const int64_t pixel = int64_t(part) * tile + row, step = int64_t(parts) * tile;
    int64_t at = pixel * of.channels + channel;
    for (int64_t left = of.pixels - pixel; left > 0; left -= step) {
      const int of_tile = left < tile ? static_cast<int>(left) : tile;
      int steps = 1;
#pragma unroll
      for (int s = 1; s < kSteps; ++s) steps += of_tile > s * of.thread_block_pixels;
      body(at, stride, steps);
      at += step * of.channels;
    }
  }
  template <class Body>
  __device__ void for_each(const Body& body) const {
    for_each(body, blockIdx.x, gridDim.x);
  }
};

// The thread blocks of a kernel, and what each thread takes.
struct Grid {
  PixelRows rows;
  dim3 thread_blocks;
};

// A grid for channels in vectors of `width`; a thread block takes at most `most_columns` vectors.
inline Grid grid_for(const ImageSizes& size, int width, int steps, int most_columns,
                     int thread_blocks_per_multiprocessor) {
  const int64_t pixels = size.pixels(), channels = size.channels;
  const int vectors = static_cast<int>(channels / width);
  const int thread_blocks_y = (vectors + most_columns - 1) / most_columns;
  const int columns = (vectors + thread_blocks_y - 1) / thread_blocks_y;
  const int thread_block_pixels = kThreads / columns;
  const int64_t tile = int64_t(thread_block_pixels) * steps;
  const int64_t tiles = (pixels + tile - 1) / tile;
  const int most = thread_blocks_per_multiprocessor * multiprocessors() / thread_blocks_y;
  const int64_t thread_blocks_x = tiles < most ? tiles : (most > 1 ? most : 1);
  const auto per_column = static_cast<unsigned>(((1 << 16) + columns - 1) / columns);
  return {{pixels, static_cast<int>(channels), columns, thread_block_pixels, per_column},
          dim3(static_cast<unsigned>(thread_blocks_x), static_cast<unsigned>(thread_blocks_y))};
}

// Whether accesses may have kWidth numbers: the channels are a multiple, and memory is aligned or
// null.
template <class T, int kWidth, class... Pointers>
bool fills_vectors(int64_t channels, const Pointers*... pointers) {
  const bool aligned[] = {reinterpret_cast<uintptr_t>(pointers) % (kWidth * sizeof(T)) == 0 ...};
  for (const bool a : aligned) {
    if (!a) return false;
  }
  return channels % kWidth == 0;
}

// Calls body(width), an integral constant, with the widest accesses that the channels and the
// pointers allow.
template <class T, int kMost = kFullWidth<T>, class Body, class... Pointers>
void with_width(const Body& body, int64_t channels, const Pointers*... pointers) {
  if constexpr (kMost > 1) {
    if (!fills_vectors<T, kMost>(channels, pointers...)) {
      return with_width<T, kMost / 2>(body, channels, pointers...);
    }
  }
  body(std::integral_constant<int, kMost>{});
}

}  // namespace preact_kernels::cuda
