// A kernel that bench/probes.py compiles, launches and times. It depends on the launch ahead: in a
// plain launch, or by programmatic dependent launch.
#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 256;
// Numbers that a thread holds in registers, and its thread block in shared memory: 108 KB, so that
// two thread blocks fit on a multiprocessor, as of the kernels in csrc/cuda.
constexpr int kHeld = 108;
constexpr int kSharedBytes = kHeld * kThreads * sizeof(float);

// Adds one to what the launch ahead left. Waits for that launch, then lets the next one begin, as
// the kernels of csrc/cuda do; neither does anything in a plain launch. `uses_memory` is false,
// which the compiler does not know: it keeps the registers and the shared memory.
__global__ void __launch_bounds__(kThreads, 2) chain_kernel(unsigned* number, bool uses_memory) {
  extern __shared__ float memory[];
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  if (blockIdx.x == 0 && threadIdx.x == 0) *number += 1;
  if (uses_memory) {
    float held[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held[i] = memory[i * kThreads + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kHeld; ++i) memory[threadIdx.x * kHeld + i] = held[i];
  }
}

}  // namespace

// Returns the text of an error, or null.
extern "C" const char* launch_chain(cudaStream_t stream, int thread_blocks, bool is_dependent,
                                    unsigned* number) {
  const auto kernel = reinterpret_cast<const void*>(chain_kernel);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(thread_blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = is_dependent;
  cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared);
  }
  if (status == cudaSuccess) status = cudaLaunchKernelEx(&config, chain_kernel, number, false);
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}
