// Operands of tensor cores: dtypes, 16-byte vectors, fragments of a warp.
//
// One matrix product of a warp is 16 x 8 over a depth of 32 bytes: 16 values of half precision, 8
// of TF32. A fragment is the part of an operand that a lane holds.
#pragma once

#include <cstring>
#include <type_traits>

#include "pixel_rows.cuh"

namespace preact_kernels::cuda {

// Padding of a row of float sums in shared memory, which spreads the rows over banks.
constexpr int kSumsPadding = 8;

// Depth of one product.
template <class T>
constexpr int kStep = 32 / sizeof(T);

// 16 bytes of T.
template <class T>
using FullVector = Vector<T, kFullWidth<T>>;

// The dtypes of a convolution: of products and of what stays within a thread block, of x, and of y
// or its gradient. One of x and y may be a float32 stream mixed with half precision.
template <class Operand, class Input, class Output>
struct ConvTypes {
  using T = Operand;
  using X = Input;
  using Y = Output;
  static constexpr bool kHasStream = !std::is_same_v<X, T> || !std::is_same_v<Y, T>;
};

__device__ inline void store_pair(float* to, float low, float high) {
  *reinterpret_cast<float2*>(to) = make_float2(low, high);
}
template <class T>
__device__ void store_pair(T* to, float low, float high) {
  *reinterpret_cast<uint32_t*>(to) = pack_pair<T>(low, high);
}
template <int COUNT>
__device__ void load_floats(float (&values)[COUNT], const float* from) {
  Vector<float, COUNT> vector;
  vector.load(from);
  vector.unpack(values);
}
template <int COUNT>
__device__ void store_floats(float* to, const float (&values)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
    *reinterpret_cast<float4*>(to + i) =
        make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
  }
}

template <class T>
__device__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (sizeof(T) == 4) {
    mma_m16n8k8_tf32(d, a, b);
  } else {
    mma_m16n8k16(d, a, b, T{});
  }
}

// A value as an operand: float32 is rounded to TF32, and NaN stays NaN.
template <class T>
__device__ T as_operand(T value) {
  if constexpr (sizeof(T) == 4) return __uint_as_float(to_tf32(with_canonical_nan(value)));
  return value;
}
// Values that fill 16 bytes of T, rounded to it.
template <class T, class E>
__device__ FullVector<T> as_operand(const Vector<E, kFullWidth<T>>& v) {
  if constexpr (sizeof(T) == 4) {
    const float4 f = v.value;
    return {make_float4(as_operand(f.x), as_operand(f.y), as_operand(f.z), as_operand(f.w))};
  } else if constexpr (std::is_same_v<T, E>) {
    return v;
  } else {
    FullVector<T> rounded;
    float values[kFullWidth<T>];
    v.unpack(values);
    rounded.pack(values);
    return rounded;
  }
}

// `values` where `choices` is not zero, else 0. NaN is not zero.
template <class T>
__device__ FullVector<T> where_nonzero(const FullVector<T>& choices, const FullVector<T>& values) {
  uint32_t mask[4], kept[4];
  memcpy(mask, &choices.value, sizeof mask);
  memcpy(kept, &values.value, sizeof kept);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      kept[i] = __uint_as_float(mask[i]) == 0 ? 0 : kept[i];
    } else {
      kept[i] &= mask_of_nonzero<T>(mask[i]);
    }
  }
  FullVector<T> result;
  memcpy(&result.value, kept, sizeof kept);
  return result;
}

// The second operand [n][k] of 16 columns n, for two products. `first` is its first value.
template <class T>
__device__ void load_b_by_columns(uint32_t (&b)[2][2], const T* first, int pitch) {
  const int lane = threadIdx.x % 32;
  uint32_t r[4];
  ldmatrix_x4(r, first + (lane % 8 + lane / 16 * 8) * pitch + lane / 8 % 2 * (kStep<T> / 2));
  b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

// The same operand stored [k][n]: `row(i)` points to the first of the 16 columns of row k = i.
template <class T, class Row>
__device__ void load_b_by_rows(uint32_t (&b)[2][2], Row row) {
  const int lane = threadIdx.x % 32;
  if constexpr (sizeof(T) == 4) {
    const T *low = row(lane % 4) + lane / 4, *high = row(lane % 4 + 4) + lane / 4;
    b[0][0] = __float_as_uint(low[0]), b[0][1] = __float_as_uint(high[0]);
    b[1][0] = __float_as_uint(low[8]), b[1][1] = __float_as_uint(high[8]);
  } else {
    uint32_t r[4];
    ldmatrix_x4_trans(r, row(lane % 8 + lane / 8 % 2 * 8) + lane / 16 * 8);
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
  }
}

// The first operand of 16 rows m, stored [k][m]: `row(i)` points to the first of row k = i.
template <class T, class Row>
__device__ void load_a_by_rows(uint32_t (&a)[4], Row row) {
  const int lane = threadIdx.x % 32;
  if constexpr (sizeof(T) == 4) {
    const T *low = row(lane % 4) + lane / 4, *high = row(lane % 4 + 4) + lane / 4;
    a[0] = __float_as_uint(low[0]), a[1] = __float_as_uint(low[8]);
    a[2] = __float_as_uint(high[0]), a[3] = __float_as_uint(high[8]);
  } else {
    ldmatrix_x4_trans(a, row(lane % 8 + lane / 16 * 8) + lane / 8 % 2 * 8);
  }
}

// Zeroes the depth elements k = i of both operands of two products where keeps(i) is false.
template <class T, class Keeps>
__device__ void mask_depth(uint32_t (&a)[4], uint32_t (&b)[2][2], Keeps keeps) {
  const int lane = threadIdx.x % 32;
  for (int half = 0; half < 2; ++half) {
    uint32_t mask;
    if constexpr (sizeof(T) == 4) {
      mask = keeps(lane % 4 + 4 * half) ? 0xffffffffu : 0u;
    } else {
      const int first = lane % 4 * 2 + 8 * half;
      mask = (keeps(first) ? 0xffffu : 0u) | (keeps(first + 1) ? 0xffff0000u : 0u);
    }
    a[2 * half] &= mask, a[2 * half + 1] &= mask;
    b[0][half] &= mask, b[1][half] &= mask;
  }
}

// Finds NaN and infinity: adding one to an exponent with all bits set carries into the sign bit.
template <class T>
struct NonFinite {
  uint32_t carries = 0;

  __device__ void add(const FullVector<T>& vector) {
    uint32_t words[4];
    memcpy(words, &vector.value, sizeof words);
    constexpr uint32_t kOne = sizeof(T) == 4                ? 0x00800000u
                              : std::is_same_v<T, BFloat16> ? 0x00800080u
                                                            : 0x04000400u;
#pragma unroll
    for (int i = 0; i < 4; ++i) carries |= (words[i] & ~kSigns) + kOne;
  }
  __device__ bool any() const { return carries & kSigns; }

 private:
  static constexpr uint32_t kSigns = sizeof(T) == 4 ? 0x80000000u : 0x80008000u;
};

}  // namespace preact_kernels::cuda
