// The only header through which kernels touch the machine: thin wrappers around PTX and launches.
//
// Kernels are plain CUDA over raw pointers, with one parameter struct each. They take all their
// shared memory from `dynamic_shared()`, name all 32 lanes in warp collectives, and reach every
// barrier with every thread; then the same sources also run on the host, where PK_CUDA_ON_HOST puts
// another header in the place of this one's contents (tests/cuda_on_host/device.h).
#pragma once

#if defined(PK_CUDA_ON_HOST)
#include "device.h"
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#define PK_DISPATCH_KEY CUDA  // tensors on which kernels run

namespace preact_kernels::cuda {

using BFloat16 = __nv_bfloat16;
using Half = __half;

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(BFloat16 value) { return __bfloat162float(value); }
__device__ inline float to_float(Half value) { return __half2float(value); }

// To nearest, ties to even.
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
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
}
template <>
__device__ inline float2 unpack_pair<Half>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// The shared memory that the block was launched with.
__device__ inline unsigned char* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char preact_kernels_shared[];
  return preact_kernels_shared;
}
__device__ inline uint32_t shared_address(const void* smem) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(smem));
}

// Lanes 8*m to 8*m + 7 name the rows of matrix m, eight 16-bit elements each, 16-byte aligned. Of
// matrix m lane l gets elements 2*(l % 4) and the next of row l / 4; transposed, of column l / 4.
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
__device__ inline void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
}
__device__ inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
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
__device__ inline uint32_t to_tf32(float value) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

// Begins a copy of 16 bytes to shared memory, both ends 16-byte aligned; of zeros where not
// `valid`, and then nothing is read.
__device__ inline void cp_async_16(void* smem, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(shared_address(smem)), "l"(__cvta_generic_to_global(global)),
                 "r"(valid ? 16 : 0)
               : "memory");
}
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until no more than the newest `kGroups` groups of this thread are in flight.
template <int kGroups>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kGroups) : "memory");
}

// Throws what a call of the CUDA runtime returned, if it is an error.
inline void check_cuda(const char* name, cudaError_t status) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // so that no later call reports it again
  throw std::runtime_error(std::string(name) + ": " + cudaGetErrorString(status));
}

// Of the current device.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check_cuda("cudaGetDevice", cudaGetDevice(&device));
  check_cuda("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}
inline int multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount); }
// Shared memory of a multiprocessor, and the most that one block may have of it, in bytes.
inline int multiprocessor_shared_bytes() {
  return device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
}
inline int most_shared_bytes() { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

// Launches kernel(params) on a grid of `blocks` blocks; throws where the launch fails.
template <class Params>
void launch(const char* name, void (*kernel)(Params), dim3 blocks, dim3 threads,
            size_t shared_bytes, cudaStream_t stream, const Params& params) {
  if (shared_bytes > 48 * 1024) {  // more than any kernel may take unasked
    check_cuda(name, cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                          cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(shared_bytes)));
  }
  void* arguments[] = {const_cast<Params*>(&params)};
  check_cuda(name, cudaLaunchKernel(reinterpret_cast<const void*>(kernel), blocks, threads,
                                    arguments, shared_bytes, stream));
}
// Zeros, in the order of the stream.
inline void fill_zeros(void* memory, size_t bytes, cudaStream_t stream) {
  check_cuda("cudaMemsetAsync", cudaMemsetAsync(memory, 0, bytes, stream));
}

}  // namespace preact_kernels::cuda

#endif
