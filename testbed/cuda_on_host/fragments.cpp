// Entry points for the wrappers of csrc/cuda/device.cuh that compute, for Divisor, for activations,
// and for the exact sums of csrc/cuda/exact_sums.cuh; for the host and for a GPU.

#include <type_traits>

#include "cuda/activation.cuh"
#include "cuda/conv_operand.cuh"
#include "cuda/divisor.cuh"
#include "cuda/exact_sums.cuh"
#include "entry.h"

using namespace preact_kernels;
using namespace preact_kernels::cuda;

namespace {

template <class T>
constexpr int kDepth = 32 / sizeof(T);  // depth of one product

struct ProductParams {
  const void *a, *b;
  float* d;
  bool a_by_rows, b_by_rows;  // stored [depth, 16]
  bool is_rounded;            // false: float operands as they are, which is a mistake
};

template <class T>
__device__ void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, float>) {
    mma_m16n8k8_tf32(d, a, b);
  } else {
    mma_m16n8k16(d, a, b, T());
  }
}

// d [16, 16] += a * b^T for a and b [16, kDepth], by one warp, as the convolutions do: through
// shared memory and ldmatrix. Operands of 16 bits may be stored [kDepth, 16].
template <class T>
__global__ void product_kernel(ProductParams p) {
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  constexpr int kCount = 16 * kDepth<T>;
  Bits* left = reinterpret_cast<Bits*>(dynamic_shared());
  Bits* right = left + kCount;
  const int lane = threadIdx.x;
  for (int i = lane; i < kCount; i += 32) {
    left[i] = static_cast<const Bits*>(p.a)[i];
    right[i] = static_cast<const Bits*>(p.b)[i];
    if constexpr (sizeof(T) == 4) {
      if (p.is_rounded) {
        left[i] = __float_as_uint(as_operand(__uint_as_float(left[i])));
        right[i] = __float_as_uint(as_operand(__uint_as_float(right[i])));
      }
    }
  }
  __syncwarp();

  uint32_t a[4], both[4];
  constexpr int kHalf = kDepth<T> / 2;  // 16 bytes
  if (p.a_by_rows) {
    ldmatrix_x4_trans(a, left + (lane % 8 + lane / 16 * 8) * 16 + lane / 8 % 2 * 8);
  } else {
    ldmatrix_x4(a, left + lane % 16 * kDepth<T> + lane / 16 * kHalf);
  }
  if (p.b_by_rows) {
    ldmatrix_x4_trans(both, right + (lane % 8 + lane / 8 % 2 * 8) * 16 + lane / 16 * 8);
  } else {
    ldmatrix_x4(both, right + (lane % 8 + lane / 16 * 8) * kDepth<T> + lane / 8 % 2 * kHalf);
  }
  for (int half = 0; half < 2; ++half) {
    const uint32_t b[2] = {both[2 * half], both[2 * half + 1]};
    float* corner = p.d + lane / 4 * 16 + half * 8 + lane % 4 * 2;
    float d[4] = {corner[0], corner[1], corner[128], corner[129]};
    multiply<T>(d, a, b);
    corner[0] = d[0], corner[1] = d[1], corner[128] = d[2], corner[129] = d[3];
  }
}

struct ConversionParams {
  const float* in;
  float* out;
  bool is_mask;
};

// out = in, rounded to T, or to TF32 if T is float. Even thread blocks convert pairs, odd ones
// single values. If `is_mask`, pairs become 1 where they are not zero.
template <class T>
__global__ void conversion_kernel(ConversionParams p) {
  const unsigned i = (blockIdx.x * 32 + threadIdx.x) * 2;
  if constexpr (std::is_same_v<T, float>) {
    for (unsigned j = i; j < i + 2; ++j) p.out[j] = as_operand(p.in[j]);
  } else if (blockIdx.x % 2 == 0) {
    const uint32_t packed = pack_pair<T>(p.in[i], p.in[i + 1]);
    const uint32_t mask = mask_of_nonzero<T>(packed) & pack_pair<T>(1, 1);
    const float2 pair = unpack_pair<T>(p.is_mask ? mask : packed);
    p.out[i] = pair.x, p.out[i + 1] = pair.y;
  } else {
    for (unsigned j = i; j < i + 2; ++j) p.out[j] = to_float(from_float<T>(p.in[j]));
  }
}

struct ShuffleParams {
  const float* in;
  const int* lanes;
  float* out;
};

// out[i] = in[lanes[i]], from lane to lane of one warp.
__global__ void shuffle_kernel(ShuffleParams p) {
  const unsigned i = threadIdx.x;
  p.out[i] = __shfl_sync(0xffffffffu, p.in[i], p.lanes[i]);
}

struct CopyParams {
  const float* in;
  float* out;
};

// out = in [2, 32, 4] by asynchronous copies in two groups, and zeros for every fifth thread.
__global__ void copy_kernel(CopyParams p) {
  float* tile = reinterpret_cast<float*>(dynamic_shared());
  const unsigned first = 4 * threadIdx.x, second = 128 + first;
  const bool exists = threadIdx.x % 5 != 0;
  cp_async_16(tile + first, p.in + first, exists);
  cp_async_commit();
  cp_async_16(tile + second, p.in + second, exists);
  cp_async_commit();
  cp_async_wait<1>();
  for (int i = 0; i < 4; ++i) p.out[first + i] = tile[first + i];
  cp_async_wait<0>();
  for (int i = 0; i < 4; ++i) p.out[second + i] = tile[second + i];
}

struct DivisionParams {
  Divisor divisor;
  const int* n;
  int* quotients;
  int count;
};

__global__ void division_kernel(DivisionParams p) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < p.count) p.quotients[i] = p.divisor.divide(p.n[i]);
}

struct ActivationParams {
  KernelActivation activation;
  const float* p;
  float *values, *derivatives;
  int count;
};

// act(p) and act'(p) before they are rounded to T.
template <class T>
__global__ void activation_kernel(ActivationParams p) {
  with_activation<T>(p.activation, [&](const auto& function) {
    for (int i = threadIdx.x; i < p.count; i += 32) {
      p.values[i] = function.value(p.p[i]);
      p.derivatives[i] = function.gradient(1.0f, p.p[i]);
    }
  });
}

struct AddParams {
  Accumulators sums;
  const double* values;  // [count, channels]
  int count, channels;
};

// Every thread of the grid adds one value of the second sum of a channel.
__global__ void add_kernel(AddParams p) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < p.count * p.channels) add_exact(p.sums, i % p.channels, 1, p.values[i]);
}

struct ReadParams {
  Accumulators sums;
  double* out;  // [2, channels]
  int channels;
};

__global__ void read_kernel(ReadParams p) {
  const int i = threadIdx.x;
  if (i < 2 * p.channels) p.out[i] = read_exact(p.sums, i % p.channels, i / p.channels);
}

enum Type { kBFloat16, kHalf, kFloat };

}  // namespace

PK_ENTRY product(int type, const void* a, const void* b, float* d, bool a_by_rows, bool b_by_rows,
                 bool is_rounded) {
  const ProductParams params{a, b, d, a_by_rows, b_by_rows, is_rounded};
  const auto kernel = type == kBFloat16 ? product_kernel<BFloat16>
                      : type == kHalf   ? product_kernel<Half>
                                        : product_kernel<float>;
  return run("product", kernel, 1, 32, 2 * 16 * 32, params);
}

// A thread block converts 64 values.
PK_ENTRY conversion(int type, const float* in, float* out, unsigned thread_blocks, bool is_mask) {
  const auto kernel = type == kBFloat16 ? conversion_kernel<BFloat16>
                      : type == kHalf   ? conversion_kernel<Half>
                                        : conversion_kernel<float>;
  return run("conversion", kernel, thread_blocks, 32, 0, ConversionParams{in, out, is_mask});
}

PK_ENTRY shuffle(const float* in, const int* lanes, float* out) {
  return run("shuffle", shuffle_kernel, 1, 32, 0, ShuffleParams{in, lanes, out});
}

PK_ENTRY copy(const float* in, float* out) {
  return run("copy", copy_kernel, 1, 32, 256 * sizeof(float), CopyParams{in, out});
}

PK_ENTRY division(int divisor, const int* n, int* quotients, int count) {
  const DivisionParams params{Divisor(divisor), n, quotients, count};
  return run("division", division_kernel, (count + 31) / 32, 32, 0, params);
}

PK_ENTRY activation(int type, int kind, float parameter, const float* p, float* values,
                    float* derivatives, int count) {
  const auto kernel = type == kBFloat16 ? activation_kernel<BFloat16>
                      : type == kHalf   ? activation_kernel<Half>
                                        : activation_kernel<float>;
  const KernelActivation function{ActivationKind(kind), parameter};
  return run("activation", kernel, 1, 32, 0,
             ActivationParams{function, p, values, derivatives, count});
}

// `words` are zeros, [kSumWords, 2, channels].
PK_ENTRY exact_sums(uint64_t* words, const double* values, double* out, int count, int channels) {
  const Accumulators sums{words, channels, 2 * channels};
  const unsigned thread_blocks = (count * channels + 63) / 64;
  const char* message =
      run("add", add_kernel, thread_blocks, 64, 0, {sums, values, count, channels});
  if (*message) return message;
  return run("read", read_kernel, 1, 64, 0, {sums, out, channels});
}
