// The only header with PTX and CUDA runtime calls: thin wrappers that kernels and launchers use.
//
// Kernels are plain CUDA over raw pointers, with one parameter struct each. All shared memory comes
// from `dynamic_shared()`, warp collectives name all 32 lanes, and every thread reaches every
// barrier. The same sources can therefore run on the host, where PK_CUDA_ON_HOST replaces the
// contents of this header by testbed/cuda_on_host/device.h.
#pragma once

#if defined(PK_CUDA_ON_HOST)
#include "device.h"
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

namespace preact_kernels::cuda {

using BFloat16 = __nv_bfloat16;
using Half = __half;

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(BFloat16 value) { return __bfloat162float(value); }
__device__ inline float to_float(Half value) { return __half2float(value); }

// Rounds to nearest, ties to even.
template <class T>
__device__ inline T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline BFloat16 from_float<BFloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ inline Half from_float<Half>(float value) {
  return __float2half_rn(value);
}

// Returns the same value, but the compiler cannot tell: it computes anew what depends on it, in
// place of keeping registers from an earlier use.
__device__ inline int untraced(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// 2^x, 1/x and log2(x), one instruction each. The relative error is at most 2^-22 for 2^x, 2^-23
// for 1/x and 2^-22 for log2(x), where from 0.5 to 2 it is the absolute error. Subnormal numbers
// are zeros, as arguments and as results.
__device__ inline float approximate_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ inline float approximate_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ inline float approximate_log2(float x) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Two 16-bit numbers in a register, the first in the low half.
template <class T>
__device__ inline uint32_t pack_pair(float low, float high);
template <>
__device__ inline uint32_t pack_pair<BFloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ inline uint32_t pack_pair<Half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <class T>
__device__ inline float2 unpack_pair(uint32_t pair);
template <>
__device__ inline float2 unpack_pair<BFloat16>(uint32_t pair) {
  // The upper half of a float32; CUDA's conversion of two takes three instructions.
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
template <>
__device__ inline float2 unpack_pair<Half>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// A mask with all bits of the numbers of a pair that are not zero. NaN is not zero.
template <class T>
__device__ inline uint32_t mask_of_nonzero(uint32_t pair);
template <>
__device__ inline uint32_t mask_of_nonzero<BFloat16>(uint32_t pair) {
  return __hneu2_mask(*reinterpret_cast<const __nv_bfloat162*>(&pair), __nv_bfloat162{});
}
template <>
__device__ inline uint32_t mask_of_nonzero<Half>(uint32_t pair) {
  return __hneu2_mask(*reinterpret_cast<const __half2*>(&pair), __half2{});
}

// The shared memory that the thread block was launched with.
__device__ inline unsigned char* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char preact_kernels_shared[];
  return preact_kernels_shared;
}
__device__ inline uint32_t shared_address(const void* smem) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(smem));
}

// Stores a vector to global memory. A plain store under a condition becomes several, one for each
// word (nvcc 13.0).
__device__ inline void store_global(uint4* to, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
__device__ inline void store_global(uint2* to, uint2 v) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(v.x), "r"(v.y) : "memory");
}
__device__ inline void store_global(float4* to, float4 v) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z),
               "f"(v.w)
               : "memory");
}
__device__ inline void store_global(float2* to, float2 v) {
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(v.x), "f"(v.y) : "memory");
}

// Prefetches a line of global memory into L2.
__device__ inline void prefetch_to_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// Starts an asynchronous copy of 16 bytes to shared memory. Unless `exists`, it writes zeros and
// does not read `from`.
__device__ inline void cp_async_16(void* smem, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(smem)),
               "l"(from), "r"(exists ? 16 : 0)
               : "memory");
}
// Ends a group of copies.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most the newest `kGroups` groups of this thread are in flight.
template <int kGroups>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Lanes 8*m to 8*m + 7 hold the addresses of the rows of matrix m: eight 16-bit elements each,
// 16-byte aligned. Lane l gets elements 2*(l % 4) and 2*(l % 4) + 1 of row l / 4 of each matrix, or
// of column l / 4 if transposed.
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// Programmatic dependent launch. A kernel that is launched as `dependent` may start while the
// kernel before it runs; past this call it sees all that earlier kernels wrote. Before it, a kernel
// reads only what was written before the kernel ahead of it began.
__device__ inline void wait_for_predecessors() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets a dependent kernel start if there is room. Called after `wait_for_predecessors`: when a
// kernel starts, the one two before it has ended.
__device__ inline void let_dependents_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Adds to a word of global memory, in no order, with wraparound.
__device__ inline void add_relaxed(uint64_t* to, uint64_t added) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(added) : "memory");
}

// A counter in global memory on which the thread blocks of a cooperative launch wait. A thread that
// loads it sees what the thread blocks wrote before they added to it, and so do the threads that
// meet this thread at a barrier of their thread block.
__device__ inline void add_release(unsigned* to, unsigned added) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(added) : "memory");
}
__device__ inline unsigned load_acquire(const unsigned* from) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// d += a * b for a [16, 16] and b [16, 8] of BFloat16 or Half, which the last argument names.
__device__ inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                    BFloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                    Half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// d += a * b for a [16, 8] and b [8, 8] of numbers that `to_tf32` rounded.
__device__ inline void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Rounds to nearest, ties away from zero. NaN loses its last 13 bits, and may become infinity.
__device__ inline uint32_t to_tf32(float value) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

// The same number, or the canonical NaN for any NaN.
__device__ inline float with_canonical_nan(float value) {
  float result;  // nvcc would remove the product if it were not in PTX
  asm("mul.rn.f32 %0, %1, 0f3F800000;" : "=f"(result) : "f"(value));
  return result;
}

// Throws if a call of the CUDA runtime returned an error.
inline void check_cuda(const char* name, cudaError_t status) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // so that no later call reports it
  throw std::runtime_error(std::string(name) + ": " + cudaGetErrorString(status));
}

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check_cuda("cudaGetDevice", cudaGetDevice(&device));
  check_cuda("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}
inline int multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount); }
// Bytes of shared memory of a multiprocessor, and the most that one thread block may use.
inline int multiprocessor_shared_bytes() {
  return device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
}
inline int most_shared_bytes() { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

// Lets a kernel use all shared memory of a thread block, before its first launch on a device.
// Returns whether it may be launched as dependent: whether its code, perhaps PTX for an older GPU,
// has the instruction of `wait_for_predecessors`.
inline bool prepare_kernel(const char* name, const void* kernel) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, bool> prepared;  // kernels and devices
  int device = 0;
  check_cuda("cudaGetDevice", cudaGetDevice(&device));
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = prepared.find({kernel, device});
  if (found != prepared.end()) return found->second;
  check_cuda(name, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        most_shared_bytes()));
  // All kernels split a multiprocessor's memory alike, so that one can start while another runs.
  check_cuda(name, cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
  cudaFuncAttributes attributes{};
  check_cuda(name, cudaFuncGetAttributes(&attributes, kernel));
  return prepared[{kernel, device}] = attributes.ptxVersion >= 90;
}

// How a kernel is launched.
enum class LaunchKind {
  kPlain,
  kDependent,    // may start while the launch ahead runs; calls `wait_for_predecessors`
  kCooperative,  // all thread blocks are resident: they may wait for each other
};

// Launches kernel(params) on a grid of `thread_blocks`. Throws if the launch fails.
template <class Params>
void launch(const char* name, void (*kernel)(Params), dim3 thread_blocks, dim3 threads,
            size_t shared_bytes, cudaStream_t stream, const Params& params,
            LaunchKind kind = LaunchKind::kPlain) {
  const void* function = reinterpret_cast<const void*>(kernel);
  const bool may_depend = prepare_kernel(name, function);
  cudaLaunchAttribute attribute{};
  if (kind == LaunchKind::kCooperative) {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  } else {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = thread_blocks, config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes, config.stream = stream;
  if (kind == LaunchKind::kCooperative || (kind == LaunchKind::kDependent && may_depend)) {
    config.attrs = &attribute, config.numAttrs = 1;
  }
  void* arguments[] = {const_cast<Params*>(&params)};
  check_cuda(name, cudaLaunchKernelExC(&config, function, arguments));
}
// Fills memory with zeros, in the order of the stream.
inline void fill_zeros(void* memory, size_t bytes, cudaStream_t stream) {
  check_cuda("cudaMemsetAsync", cudaMemsetAsync(memory, 0, bytes, stream));
}

}  // namespace preact_kernels::cuda

#endif
