// Replaces the contents of `csrc/cuda/device.cuh` on the host: CUDA's vocabulary, and the wrappers
// by definition.
//
// There is no `__shared__`: kernels take all their shared memory from `dynamic_shared()`, so that
// its bounds are known here.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "grid.h"
#include "numbers.h"

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define __grid_constant__

#define threadIdx (cuda_on_host::position->thread)
#define blockIdx (cuda_on_host::position->thread_block)
#define blockDim (cuda_on_host::position->threads)
#define gridDim (cuda_on_host::position->thread_blocks)

// The line of the call, as a default argument.
#define PK_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

using cudaStream_t = void*;

inline void __syncthreads(PK_SITE) { cuda_on_host::barrier(0, {file, line}); }
inline int __syncthreads_or(int vote, PK_SITE) {
  return cuda_on_host::barrier(vote != 0, {file, line});
}

namespace cuda_on_host {

constexpr unsigned kAllLanes = 0xffffffffu;

// `body` gets the operands of all lanes of the warp.
template <class Operands, class Body>
void collective(const char* name, unsigned mask, Site site, Operands& own, const Body& body) {
  if (mask != kAllLanes) fail("a warp collective with some lanes only");
  const auto call = [](void** lanes, const void* body) {
    (*static_cast<const Body*>(body))(reinterpret_cast<Operands**>(lanes));
  };
  collective(name, site, &own, call, &body);
}

}  // namespace cuda_on_host

inline void __syncwarp(unsigned mask = cuda_on_host::kAllLanes, PK_SITE) {
  int none = 0;
  cuda_on_host::collective("__syncwarp", mask, {file, line}, none, [](int**) {});
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, PK_SITE) {
  struct {
    T value, result;
  } own = {value, value};
  cuda_on_host::collective("__shfl_xor_sync", mask, {file, line}, own, [=](auto** of) {
    for (unsigned i = 0; i < cuda_on_host::kLanes; ++i) of[i]->result = of[i ^ lanes]->value;
  });
  return own.result;
}
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, PK_SITE) {
  struct {
    T value, result;
    int lane;
  } own = {value, value, lane};
  cuda_on_host::collective("__shfl_sync", mask, {file, line}, own, [](auto** of) {
    for (unsigned i = 0; i < cuda_on_host::kLanes; ++i) of[i]->result = of[of[i]->lane]->value;
  });
  return own.result;
}

// Thread blocks communicate here: others may run before and after each of these.
inline void __threadfence() { cuda_on_host::yield(); }
template <class T>
T atomicAdd(T* address, std::decay_t<T> value) {
  static_assert(std::is_integral_v<T>, "sums of floats depend on the order of the thread blocks");
  cuda_on_host::yield();
  const T before = *address;
  *address += value;
  cuda_on_host::yield();
  return before;
}
template <class T>
T __ldcg(const T* address) {
  cuda_on_host::yield();
  return *address;
}
inline unsigned __float_as_uint(float value) { return cuda_on_host::bits_as<unsigned>(value); }
inline float __uint_as_float(unsigned value) { return cuda_on_host::bits_as<float>(value); }
inline double __longlong_as_double(long long bits) { return cuda_on_host::bits_as<double>(bits); }
using std::isfinite;
using std::isinf;
using std::isnan;

namespace preact_kernels::cuda {

using BFloat16 = __nv_bfloat16;
using Half = __half;

template <class T>
float to_float(T value) {
  return cuda_on_host::widened(value);
}
template <class T>
T from_float(float value) {
  return cuda_on_host::narrowed<T>(value);
}
inline int untraced(int value) { return value; }

template <class T>
uint32_t pack_pair(float low, float high) {
  return from_float<T>(low).bits | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}
template <class T>
float2 unpack_pair(uint32_t pair) {
  return {to_float(T{static_cast<uint16_t>(pair)}), to_float(T{static_cast<uint16_t>(pair >> 16)})};
}

template <class T>
uint32_t mask_of_nonzero(uint32_t pair) {
  const float2 numbers = unpack_pair<T>(pair);
  return (numbers.x != 0 ? 0xffffu : 0) | (numbers.y != 0 ? 0xffff0000u : 0);
}

// In instructions.cpp.
float approximate_exp2(float x);
float approximate_reciprocal(float x);
float approximate_log2(float x);

inline void wait_for_predecessors() { cuda_on_host::wait_for_predecessors(); }
inline void let_dependents_start() { cuda_on_host::let_dependents_start(); }

inline void add_relaxed(uint64_t* to, uint64_t added) { atomicAdd(to, added); }

inline void add_release(unsigned* to, unsigned added) { atomicAdd(to, added); }
inline unsigned load_acquire(const unsigned* from) { return __ldcg(from); }

inline unsigned char* dynamic_shared() { return cuda_on_host::position->shared; }

// In instructions.cpp.
void ldmatrix_x4(uint32_t (&r)[4], const void* row, PK_SITE);
void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, PK_SITE);
template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], T, PK_SITE);
void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], PK_SITE);
uint32_t to_tf32(float value);
inline float with_canonical_nan(float value) {
  return std::isnan(value) ? __uint_as_float(0x7fffffffu) : value;
}

inline void prefetch_to_l2(const void*) {}

template <class Value>
void store_global(Value* to, Value value) {
  *to = value;
}

inline void cp_async_16(void* smem, const void* global, bool valid) {
  cuda_on_host::copy_async_16(smem, valid ? global : nullptr);
}
inline void cp_async_commit() { cuda_on_host::commit_copies(); }
template <int kGroups>
void cp_async_wait() {
  cuda_on_host::wait_for_copies(kGroups);
}

inline int multiprocessors() { return cuda_on_host::settings.multiprocessors; }
inline int most_shared_bytes() { return int(cuda_on_host::settings.most_shared_bytes); }
inline int multiprocessor_shared_bytes() { return most_shared_bytes() + 1024; }

// The tiles of a convolution, or of the first of several.
template <class Params>
auto tiles_of(const Params& params, int) -> decltype(params.grid.tiles) {
  return params.grid.tiles;
}
template <class Params>
auto tiles_of(const Params& params, int) -> decltype(params.of[0].grid.tiles) {
  return params.of[0].grid.tiles;
}
template <class Params>
int tiles_of(const Params&, long) {
  return 0;
}

enum class LaunchKind { kPlain, kDependent, kCooperative };

template <class Params>
void launch(const char* name, void (*kernel)(Params), dim3 thread_blocks, dim3 threads,
            size_t shared_bytes, cudaStream_t, const Params& params,
            LaunchKind kind = LaunchKind::kPlain) {
  cuda_on_host::launch({name, thread_blocks, threads, shared_bytes, &params, sizeof(Params), 0,
                        kind == LaunchKind::kDependent, reinterpret_cast<const void*>(kernel),
                        tiles_of(params, 0), kind == LaunchKind::kCooperative},
                       [kernel, params] { kernel(params); });
}
inline void fill_zeros(void* memory, size_t bytes, cudaStream_t) {
  cuda_on_host::launch(
      {"fill_zeros", 1, 1, 0, &memory, sizeof(memory), bytes, false, nullptr, 0, false},
      [memory, bytes] { std::memset(memory, 0, bytes); });
}

}  // namespace preact_kernels::cuda
