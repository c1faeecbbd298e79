// Two kernels that bench/probes.py compiles, launches and times.
//
// A barrier of the whole grid: what it costs decides whether the blocks of a stage can stay on
// their multiprocessors from one convolution to the next. And a kernel that depends on the one
// ahead: in a plain launch, or by programmatic dependent launch.
#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 256;
constexpr int kValues = 2 * 64;  // statistics of 64 channels

// Waits for every block of a grid whose blocks are all resident. What any thread wrote ahead of the
// barrier every thread sees behind it: the first __syncthreads orders the writes of the block ahead
// of the release of its thread 0, the second orders what the block reads behind the acquire.
// `arrived` is never reset: `expected` is the number of blocks times that of barriers so far.
__device__ void grid_barrier(unsigned* arrived, unsigned expected) {
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived) : "memory");
    unsigned seen;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrived) : "memory");
    } while (seen < expected);
  }
  __syncthreads();
}

struct BarrierParams {
  unsigned* arrived;         // zero
  unsigned long long* sums;  // [rounds][words][kValues] zeros
  unsigned* wrong;           // counts sums that were read too early
  int rounds, words;         // no words: the barrier alone
};

// In each round every block adds its integers to the sums, waits for all others, and reads the
// sums.
__global__ void __launch_bounds__(kThreads) barrier_kernel(BarrierParams p) {
  const unsigned long long blocks = gridDim.x;
  const int count = p.words * kValues;
  unsigned wrong = 0;
  for (int round = 0; round < p.rounds; ++round) {
    unsigned long long* sums = p.sums + size_t(round) * count;
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const unsigned long long own = (blockIdx.x + 1ull) * (i + 1);
      asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(sums + i), "l"(own) : "memory");
    }
    grid_barrier(p.arrived, (round + 1) * gridDim.x);
    for (int i = threadIdx.x; i < count; i += kThreads) {
      wrong += __ldcg(sums + i) != blocks * (blocks + 1) / 2 * (i + 1);
    }
  }
  if (wrong) atomicAdd(p.wrong, wrong);
}

// Numbers that a thread of the chain holds in registers, and its block in shared memory: 108 KB, so
// that two blocks fit on a multiprocessor, as of the kernels in csrc/cuda.
constexpr int kHeld = 108;
constexpr int kChainSharedBytes = kHeld * kThreads * sizeof(float);

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

const char* text(cudaError_t status) {
  return status == cudaSuccess ? nullptr : cudaGetErrorString(status);
}

}  // namespace

// Each returns the text of an error, or null.

// A cooperative launch: refused unless all blocks are resident.
extern "C" const char* launch_barrier(cudaStream_t stream, int blocks, int rounds, int words,
                                      unsigned* arrived, unsigned long long* sums,
                                      unsigned* wrong) {
  BarrierParams params{arrived, sums, wrong, rounds, words};
  void* arguments[] = {&params};
  return text(cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(barrier_kernel),
                                          dim3(blocks), dim3(kThreads), arguments, 0, stream));
}

extern "C" const char* launch_chain(cudaStream_t stream, int blocks, bool is_dependent,
                                    unsigned* number) {
  const auto set = [](cudaFuncAttribute what, int value) {
    return cudaFuncSetAttribute(reinterpret_cast<const void*>(chain_kernel), what, value);
  };
  if (const char* error =
          text(set(cudaFuncAttributeMaxDynamicSharedMemorySize, kChainSharedBytes))) {
    return error;
  }
  if (const char* error = text(
          set(cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared))) {
    return error;
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kChainSharedBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = is_dependent;
  return text(cudaLaunchKernelEx(&config, chain_kernel, number, false));
}
