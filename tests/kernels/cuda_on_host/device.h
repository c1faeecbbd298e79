// What `csrc/cuda/device.cuh` is on the host: CUDA's vocabulary, and the wrappers by definition.
//
// There is no `__shared__`: kernels take all their shared memory from `dynamic_shared()`, so that
// its bounds are known here.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "numbers.h"
#include "stream.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define __grid_constant__

#define threadIdx (cuda_on_host::Block::running->current->index)
#define blockIdx (cuda_on_host::Block::running->index)
#define blockDim (cuda_on_host::Block::running->dim)
#define gridDim (cuda_on_host::Block::running->grid)

// The line of the call, as a default argument.
#define PK_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

using cudaStream_t = void*;

inline void __syncthreads(PK_SITE) { cuda_on_host::Block::running->barrier(0, {file, line}); }
inline int __syncthreads_or(int vote, PK_SITE) {
  return cuda_on_host::Block::running->barrier(vote != 0, {file, line});
}

namespace cuda_on_host {

constexpr unsigned kAllLanes = 0xffffffffu;

inline void check_lanes(unsigned mask) {
  if (mask != kAllLanes) Block::running->fail("a warp collective with some lanes only");
}

template <class T, class Source>
T shuffle(const char* name, unsigned mask, T value, Site site, const Source& source) {
  check_lanes(mask);
  struct {
    T value, result;
  } own = {value, value};
  Block::running->collective(name, site, own, [&](auto& lanes) {
    for (unsigned i = 0; i < kLanes; ++i) lanes[i]->result = lanes[source(i)]->value;
  });
  return own.result;
}

inline unsigned ballot(const char* name, unsigned mask, int predicate, Site site) {
  check_lanes(mask);
  struct {
    int predicate;
    unsigned result;
  } own = {predicate, 0};
  Block::running->collective(name, site, own, [](auto& lanes) {
    unsigned votes = 0;
    for (unsigned i = 0; i < kLanes; ++i) votes |= unsigned(lanes[i]->predicate != 0) << i;
    for (auto* lane : lanes) lane->result = votes;
  });
  return own.result;
}

}  // namespace cuda_on_host

inline void __syncwarp(unsigned mask = cuda_on_host::kAllLanes, PK_SITE) {
  cuda_on_host::ballot("__syncwarp", mask, 0, {file, line});
}
inline unsigned __ballot_sync(unsigned mask, int predicate, PK_SITE) {
  return cuda_on_host::ballot("__ballot_sync", mask, predicate, {file, line});
}
inline int __any_sync(unsigned mask, int predicate, PK_SITE) {
  return cuda_on_host::ballot("__any_sync", mask, predicate, {file, line}) != 0;
}
inline int __all_sync(unsigned mask, int predicate, PK_SITE) {
  return cuda_on_host::ballot("__all_sync", mask, predicate, {file, line}) == 0xffffffffu;
}
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, PK_SITE) {
  return cuda_on_host::shuffle("__shfl_sync", mask, value, {file, line}, [=](unsigned own) {
    return own / width * width + static_cast<unsigned>(lane) % width;
  });
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, PK_SITE) {
  return cuda_on_host::shuffle("__shfl_xor_sync", mask, value, {file, line}, [=](unsigned own) {
    const unsigned from = own ^ static_cast<unsigned>(lanes);
    return from / width > own / width ? own : from;
  });
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, PK_SITE) {
  return cuda_on_host::shuffle("__shfl_down_sync", mask, value, {file, line}, [=](unsigned own) {
    return own % width + delta < static_cast<unsigned>(width) ? own + delta : own;
  });
}

// Where blocks meet: others may run before and after each of these.
inline void __threadfence() { cuda_on_host::Block::running->yield(); }
template <class T>
T atomicAdd(T* address, std::decay_t<T> value) {
  static_assert(std::is_integral_v<T>, "sums of floats depend on the order of the blocks");
  cuda_on_host::Block::running->yield();
  const T before = *address;
  *address += value;
  cuda_on_host::Block::running->yield();
  return before;
}
template <class T>
T __ldcg(const T* address) {
  cuda_on_host::Block::running->yield();
  return *address;
}
template <class T>
T __ldg(const T* address) {
  return *address;
}
inline float rsqrtf(float value) { return 1 / std::sqrt(value); }
inline double rsqrt(double value) { return 1 / std::sqrt(value); }
inline unsigned __float_as_uint(float value) { return cuda_on_host::bits_as<unsigned>(value); }
inline float __uint_as_float(unsigned value) { return cuda_on_host::bits_as<float>(value); }
using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;

namespace preact_kernels::cuda {

using BFloat16 = __nv_bfloat16;
using Half = __half;

#define PK_DISPATCH_KEY CPU  // tensors on which kernels run

template <class T>
float to_float(T value) {
  return cuda_on_host::widened(value);
}
template <class T>
T from_float(float value) {
  return cuda_on_host::narrowed<T>(value);
}
template <class T>
uint32_t pack_pair(float low, float high) {
  return from_float<T>(low).bits | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}
template <class T>
float2 unpack_pair(uint32_t pair) {
  return {to_float(T{static_cast<uint16_t>(pair)}), to_float(T{static_cast<uint16_t>(pair >> 16)})};
}

inline void wait_for_predecessors() { cuda_on_host::Block::running->wait_for_predecessors(); }
inline void let_dependents_start() { cuda_on_host::Block::running->let_dependents_start(); }

inline void add_relaxed(uint64_t* to, uint64_t added) { atomicAdd(to, added); }

inline unsigned char* dynamic_shared() { return cuda_on_host::Block::running->shared; }

// Lanes 8*m to 8*m + 7 name the rows of matrix m, eight 16-bit elements each. Of matrix m lane l
// gets elements 2*(l % 4) and the next of row l / 4; transposed, of column l / 4.
template <int kMatrices, bool kTransposed>
void load_matrices(const char* name, uint32_t* r, const void* row, cuda_on_host::Site site) {
  struct {
    const void* row;
    uint32_t* r;
  } own = {row, r};
  const unsigned lane = cuda_on_host::Block::running->current->linear % cuda_on_host::kLanes;
  if (lane < 8 * kMatrices) cuda_on_host::Block::running->check_shared(row, 16, name);
  cuda_on_host::Block::running->collective(name, site, own, [](auto& lanes) {
    for (int m = 0; m < kMatrices; ++m) {
      uint16_t matrix[8][8];
      for (int i = 0; i < 8; ++i) std::memcpy(matrix[i], lanes[8 * m + i]->row, 16);
      for (int l = 0; l < 32; ++l) {
        const int i = l / 4, j = 2 * (l % 4);
        const uint32_t low = kTransposed ? matrix[j][i] : matrix[i][j];
        const uint32_t high = kTransposed ? matrix[j + 1][i] : matrix[i][j + 1];
        lanes[l]->r[m] = low | high << 16;
      }
    }
  });
}
inline void ldmatrix_x4(uint32_t (&r)[4], const void* row, PK_SITE) {
  load_matrices<4, false>("ldmatrix_x4", r, row, {file, line});
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, PK_SITE) {
  load_matrices<4, true>("ldmatrix_x4_trans", r, row, {file, line});
}

// d += a * b for a [16, K] and b [K, 8], spread over a warp: `kPack` elements a register. With
// group l / 4 and rank l % 4, registers of a hold rows group, group + 8 in turn, of the first half
// of K, then of the second; those of b column group, of the first half, then of the second; d rows
// group (twice) and group + 8 (twice), columns 2 * rank and the next.
template <int kPack, class Element>
void multiply(const char* name, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
              cuda_on_host::Site site, const Element& element) {
  struct {
    float* d;
    const uint32_t *a, *b;
  } own = {d, a, b};
  cuda_on_host::Block::running->collective(name, site, own, [&](auto& lanes) {
    constexpr int kK = 8 * kPack;
    float left[16][kK], right[kK][8];
    for (int l = 0; l < 32; ++l) {
      const int group = l / 4, rank = l % 4;
      for (int half = 0; half < 2; ++half) {
        for (int i = 0; i < kPack; ++i) {
          const int k = half * kK / 2 + rank * kPack + i;
          left[group][k] = element(lanes[l]->a[2 * half], i);
          left[group + 8][k] = element(lanes[l]->a[2 * half + 1], i);
          right[k][group] = element(lanes[l]->b[half], i);
        }
      }
    }
    for (int l = 0; l < 32; ++l) {
      for (int i = 0; i < 4; ++i) {
        const int row = l / 4 + 8 * (i / 2), column = 2 * (l % 4) + i % 2;
        double sum = lanes[l]->d[i];
        for (int k = 0; k < kK; ++k) sum += double(left[row][k]) * right[k][column];
        lanes[l]->d[i] = static_cast<float>(sum);
      }
    }
  });
}
template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], T, PK_SITE) {
  multiply<2>("mma_m16n8k16", d, a, b, {file, line}, [](uint32_t pair, int i) {
    const float2 both = unpack_pair<T>(pair);
    return i == 0 ? both.x : both.y;
  });
}
constexpr uint32_t kTf32Nan = 0x7fffffffu;
inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                             PK_SITE) {
  for (const uint32_t bits : {a[0], a[1], a[2], a[3], b[0], b[1]}) {
    // The hardware cuts bits off: numbers would be less exact, and a NaN may become infinite.
    if (bits & 0x1fffu && bits != kTf32Nan) {
      cuda_on_host::Block::running->fail("mma_m16n8k8_tf32: an operand that to_tf32 did not round");
    }
  }
  multiply<1>("mma_m16n8k8_tf32", d, a, b, {file, line},
              [](uint32_t bits, int) { return __uint_as_float(bits); });
}
// To nearest, ties away from zero.
inline uint32_t to_tf32(float value) {
  const uint32_t bits = __float_as_uint(value);
  if (value != value) return kTf32Nan;
  return std::isinf(value) ? bits : (bits + 0x1000u) & ~0x1fffu;
}

// A copy in flight leaves NaN where it goes, and lands when its thread waits for it: neither a read
// before that nor one that the copy should have waited for finds what it expects.
inline void cp_async_16(void* smem, const void* global, bool valid) {
  cuda_on_host::Block& block = *cuda_on_host::Block::running;
  block.check_shared(smem, 16, "cp_async_16");
  if (valid && reinterpret_cast<uintptr_t>(global) % 16) block.fail("cp_async_16: not aligned");
  std::memset(smem, 0xff, 16);
  block.current->uncommitted.push_back({smem, valid ? global : nullptr});
}
inline void cp_async_commit() {
  cuda_on_host::Thread& thread = *cuda_on_host::Block::running->current;
  thread.groups.push_back(std::move(thread.uncommitted));
  thread.uncommitted.clear();
}
// Until no more than the newest `kGroups` groups of this thread are in flight.
template <int kGroups>
void cp_async_wait() {
  auto& groups = cuda_on_host::Block::running->current->groups;
  for (; groups.size() > kGroups; groups.pop_front()) {
    for (const cuda_on_host::Copy& copy : groups.front()) {
      if (copy.from) {
        std::memcpy(copy.to, copy.from, 16);
      } else {
        std::memset(copy.to, 0, 16);
      }
    }
  }
}

inline int multiprocessors() { return cuda_on_host::settings.multiprocessors; }
inline int most_shared_bytes() { return int(cuda_on_host::settings.most_shared_bytes); }
inline int multiprocessor_shared_bytes() { return most_shared_bytes() + 1024; }

// Runs kernel(params) on a grid of `blocks` blocks, when `stream` says; throws where the launch is
// refused, or the one ahead fails.
template <class Params>
void launch(const char* name, void (*kernel)(Params), dim3 blocks, dim3 threads,
            size_t shared_bytes, cudaStream_t, const Params& params, bool is_dependent = false) {
  if (cuda_on_host::settings.listener) {
    const void* address = reinterpret_cast<const void*>(kernel);
    const cuda_on_host::Launch launch{name,           blocks, threads,      shared_bytes, &params,
                                      sizeof(Params), 0,      is_dependent, address};
    return cuda_on_host::settings.listener(&launch);
  }
  cuda_on_host::stream.launch(std::make_unique<cuda_on_host::Grid>(
      name, blocks, threads, shared_bytes, is_dependent, [kernel, params] { kernel(params); }));
}
// Zeros, in the order of the stream.
inline void fill_zeros(void* memory, size_t bytes, cudaStream_t) {
  if (cuda_on_host::settings.listener) {
    const cuda_on_host::Launch launch{"fill_zeros", {}, {}, 0, &memory, sizeof(memory), bytes};
    return cuda_on_host::settings.listener(&launch);
  }
  cuda_on_host::stream.launch(std::make_unique<cuda_on_host::Grid>(
      "fill_zeros", 1, 1, 0, false, [memory, bytes] { std::memset(memory, 0, bytes); }));
}

}  // namespace preact_kernels::cuda
