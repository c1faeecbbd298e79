// Kernels for the tests of the harness: variant 0 is right, every other variant has one planted
// mistake.

#include "entry.h"

using namespace preact_kernels::cuda;

namespace {

constexpr unsigned kThreads = 64;

struct Params {
  const float* in;
  float* out;
  int variant;
  unsigned* counter = nullptr;  // zero
};

// out = in, reversed within each thread block through shared memory. 1: lacks the barrier.
__global__ void reverse_kernel(Params p) {
  float* tile = reinterpret_cast<float*>(dynamic_shared());
  const unsigned first = blockIdx.x * kThreads;
  tile[threadIdx.x] = p.in[first + threadIdx.x];
  if (p.variant == 0) __syncthreads();
  p.out[first + threadIdx.x] = tile[kThreads - 1 - threadIdx.x];
}

// out = in, with an access one element too far. 1: after shared memory; 2: after the input; 3:
// after the output.
__global__ void stray_kernel(Params p) {
  float* tile = reinterpret_cast<float*>(dynamic_shared());
  const unsigned i = threadIdx.x;
  tile[i + (p.variant == 1)] = p.in[i + (p.variant == 2)];
  p.out[i + (p.variant == 3)] = tile[i];
}

// Barriers that threads do not reach together.
__global__ void divergent_kernel(Params p) {
  const bool is_odd = threadIdx.x % 2;
  if (p.variant == 1 && is_odd) return;
  if (p.variant == 2 && is_odd) {
    __syncthreads();
  } else if (p.variant == 3 && threadIdx.x == 0) {
    __syncwarp();
  } else {
    __syncthreads();
  }
  float sum = p.in[threadIdx.x];
  if (p.variant != 4 || threadIdx.x % 32 != 7) {
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  }
  p.out[threadIdx.x] = sum;
}

// out = in by asynchronous copies. 1: reads before the wait. 2: the wait allows the group to be in
// flight. 3: reads the destination after the copy began. 4, 5: not aligned.
__global__ void copy_kernel(Params p) {
  float* tile = reinterpret_cast<float*>(dynamic_shared());
  const unsigned at = 4 * threadIdx.x;
  if (p.variant == 3) {
    for (int i = 0; i < 4; ++i) tile[at + i] = p.in[at + i];
  }
  cp_async_16(tile + at + (p.variant == 4), p.in + at + (p.variant == 5), threadIdx.x != 1);
  cp_async_commit();
  if (p.variant == 2) cp_async_wait<1>();
  if (p.variant == 0) cp_async_wait<0>();
  for (int i = 0; i < 4; ++i) p.out[at + i] = tile[at + i];
}

// out = in, four at a time. 1: loads are not aligned. 2: stores are not.
__global__ void vector_kernel(Params p) {
  const unsigned at = 4 * threadIdx.x;
  const float4 four = *reinterpret_cast<const float4*>(p.in + at + 2 * (p.variant == 1));
  *reinterpret_cast<float4*>(p.out + at + 2 * (p.variant == 2)) = four;
}

// out[0] = the number of thread blocks. 1: reads and writes in two steps.
__global__ void count_kernel(Params p) {
  if (p.variant == 0) {
    if (threadIdx.x == 0) atomicAdd(p.counter, 1u);
  } else {
    const unsigned before = *p.counter;
    __syncthreads();
    if (threadIdx.x == 0) *p.counter = before + 1;
  }
  if (threadIdx.x == 0) p.out[0] = static_cast<float>(*p.counter);
}

// out = the sum of in up to and including each thread block's, by the last thread block to count
// itself. 1: by the last thread block of the grid. 2: a thread block counts itself before it has
// stored its part.
__global__ void last_thread_block_kernel(Params p) {
  float* parts = p.out + gridDim.x;
  bool is_last = false;
  if (threadIdx.x == 0) {
    if (p.variant != 2) parts[blockIdx.x] = p.in[blockIdx.x];
    if (p.variant == 1) {
      is_last = blockIdx.x == gridDim.x - 1;
    } else {
      __threadfence();
      is_last = atomicAdd(p.counter, 1u) == gridDim.x - 1;
    }
    if (p.variant == 2) parts[blockIdx.x] = p.in[blockIdx.x];
  }
  if (!__syncthreads_or(is_last) || threadIdx.x != 0) return;
  float sum = 0;
  for (unsigned i = 0; i < gridDim.x; ++i) p.out[i] = sum += parts[i];
}

// out = twice in, in reverse order, from a tile that a copy then overwrites. 1: the copy does not
// wait for the other threads to have read.
__global__ void overwrite_kernel(Params p) {
  float* tile = reinterpret_cast<float*>(dynamic_shared());
  const unsigned i = threadIdx.x;
  tile[i] = 2 * p.in[i];
  __syncthreads();
  p.out[i] = tile[kThreads - 1 - i];
  if (p.variant == 0) __syncthreads();
  if (i % 4 == 0) cp_async_16(tile + i, p.in + i, true);
  cp_async_commit();
  cp_async_wait<0>();
}

// out = the sum of in over all thread blocks, in each thread block of a cooperative launch. 1: does
// not wait for the other thread blocks. 2: a thread block counts itself before it has stored its
// part.
__global__ void all_thread_blocks_kernel(Params p) {
  float* parts = p.out + gridDim.x;
  if (threadIdx.x == 0) {
    if (p.variant != 2) parts[blockIdx.x] = p.in[blockIdx.x];
    add_release(p.counter, 1);
    if (p.variant == 2) parts[blockIdx.x] = p.in[blockIdx.x];
    while (p.variant != 1 && load_acquire(p.counter) < gridDim.x) {
    }
  }
  __syncthreads();
  if (threadIdx.x != 1) return;
  float sum = 0;
  for (unsigned i = 0; i < gridDim.x; ++i) sum += parts[i];
  p.out[blockIdx.x] = sum;
}

// Launched one after the other: first = 2 * in, second = 2 * first, out = first + second.
struct ChainParams {
  const float* in;
  float *first, *second, *out;
  int variant;
};

__device__ unsigned own_index() { return blockIdx.x * kThreads + threadIdx.x; }

__global__ void first_kernel(ChainParams p) { p.first[own_index()] = 2 * p.in[own_index()]; }

__global__ void second_kernel(ChainParams p) {
  wait_for_predecessors();
  let_dependents_start();
  p.second[own_index()] = 2 * p.first[own_index()];
}

// Before it waits, it may read `first`. 1: reads `second`. 2: copies `second`. 3: writes what the
// kernel ahead reads. 4: does not wait. 5: half of the threads do not. 6: lets the next start
// first.
__global__ void third_kernel(ChainParams p) {
  float* tile = reinterpret_cast<float*>(dynamic_shared());
  const unsigned i = own_index();
  const float first = p.first[i];
  const float early = p.variant == 1 ? p.second[i] : 0;
  const auto copy = [&] {
    if (threadIdx.x % 4 == 0) cp_async_16(tile + threadIdx.x, p.second + i, true);
    cp_async_commit();
  };
  if (p.variant == 2) copy();
  if (p.variant == 3) p.first[i] = 0;
  if (p.variant == 6) let_dependents_start();
  if (p.variant != 4 && (p.variant != 5 || threadIdx.x % 2)) {
    wait_for_predecessors();
    let_dependents_start();
  }
  if (p.variant != 2) copy();
  cp_async_wait<0>();
  __syncthreads();
  p.out[i] = first + (p.variant == 1 ? early : tile[threadIdx.x]);
}

}  // namespace

PK_ENTRY reverse(const float* in, float* out, int variant) {
  return run("reverse", reverse_kernel, 4, kThreads, kThreads * 4, Params{in, out, variant});
}
PK_ENTRY stray(const float* in, float* out, int variant) {
  return run("stray", stray_kernel, 1, kThreads, kThreads * 4, Params{in, out, variant});
}
PK_ENTRY divergent(const float* in, float* out, int variant) {
  return run("divergent", divergent_kernel, 1, kThreads, 0, Params{in, out, variant});
}
PK_ENTRY copy(const float* in, float* out, int variant) {
  return run("copy", copy_kernel, 1, kThreads / 4, kThreads * 4, Params{in, out, variant});
}
PK_ENTRY vectors(const float* in, float* out, int variant) {
  return run("vectors", vector_kernel, 1, kThreads / 4, 0, Params{in, out, variant});
}
// Eight thread blocks; `out` has room for 16 values.
template <class Kernel>
const char* run_meeting(const char* name, Kernel kernel, const float* in, float* out, int variant,
                        LaunchKind kind = LaunchKind::kPlain) {
  unsigned counter = 0;
  return run(name, kernel, 8, kThreads, 0, Params{in, out, variant, &counter}, kind);
}
PK_ENTRY count(const float* in, float* out, int variant) {
  return run_meeting("count", count_kernel, in, out, variant);
}
PK_ENTRY last_thread_block(const float* in, float* out, int variant) {
  return run_meeting("last_thread_block", last_thread_block_kernel, in, out, variant);
}
PK_ENTRY overwrite(const float* in, float* out, int variant) {
  return run("overwrite", overwrite_kernel, 1, kThreads, kThreads * 4, Params{in, out, variant});
}
PK_ENTRY all_thread_blocks(const float* in, float* out, int variant) {
  return run_meeting("all_thread_blocks", all_thread_blocks_kernel, in, out, variant,
                     LaunchKind::kCooperative);
}
PK_ENTRY empty_grid() { return run("empty", reverse_kernel, 0, kThreads, 0, Params{}); }

// Eight thread blocks each.
const char* run_chain(const float* in, float* out, int variant, bool is_dependent) {
  alignas(16) float first[8 * kThreads], second[8 * kThreads];
  std::fill(first, first + 8 * kThreads, NAN);
  std::fill(second, second + 8 * kThreads, NAN);
  const ChainParams params{in, first, second, out, variant};
  const LaunchKind kind = is_dependent ? LaunchKind::kDependent : LaunchKind::kPlain;
  return run_all([&] {
    launch("first", first_kernel, 8, kThreads, 0, nullptr, params);
    launch("second", second_kernel, 8, kThreads, 0, nullptr, params, kind);
    launch("third", third_kernel, 8, kThreads, kThreads * 4, nullptr, params, kind);
  });
}
PK_ENTRY chain(const float* in, float* out, int variant) {
  return run_chain(in, out, variant, true);
}
PK_ENTRY plain_chain(const float* in, float* out, int variant) {
  return run_chain(in, out, variant, false);
}
