// Two probes of a GPU, which bench/probes.py compiles and calls.
//
// A barrier of the whole grid: what it costs decides whether the blocks of a stage can stay on
// their multiprocessors from one convolution to the next. And the launch of a kernel that depends
// on the one ahead, in a CUDA graph: plain, or by programmatic dependent launch.
#include <cuda_runtime.h>

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string>

namespace {

constexpr int kThreads = 256;
constexpr int kValues = 2 * 64;  // statistics of 64 channels
constexpr int kRepeats = 5;      // of which the fastest counts

void check(const char* what, cudaError_t status) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
  }
}

// Zeros on the GPU.
template <class T>
class Memory {
 public:
  explicit Memory(size_t count) : bytes_(count * sizeof(T)) {
    check("cudaMalloc", cudaMalloc(&pointer, bytes_));
  }
  ~Memory() { cudaFree(pointer); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void clear(cudaStream_t stream) {
    check("cudaMemsetAsync", cudaMemsetAsync(pointer, 0, bytes_, stream));
  }
  T first() const {
    T value;
    check("cudaMemcpy", cudaMemcpy(&value, pointer, sizeof(T), cudaMemcpyDeviceToHost));
    return value;
  }

  T* pointer = nullptr;

 private:
  size_t bytes_;
};

// A stream, and the shortest time of some work in it, in us.
class Clock {
 public:
  Clock() {
    check("cudaStreamCreate", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    check("cudaEventCreate", cudaEventCreate(&start_));
    check("cudaEventCreate", cudaEventCreate(&end_));
  }
  ~Clock() {
    cudaEventDestroy(start_);
    cudaEventDestroy(end_);
    cudaStreamDestroy(stream);
  }
  Clock(const Clock&) = delete;
  Clock& operator=(const Clock&) = delete;

  double fastest_us(const std::function<void()>& prepare, const std::function<void()>& work) {
    float fastest_ms = 0;
    for (int i = 0; i < kRepeats; ++i) {
      prepare();
      check("cudaEventRecord", cudaEventRecord(start_, stream));
      work();
      check("cudaEventRecord", cudaEventRecord(end_, stream));
      check("cudaEventSynchronize", cudaEventSynchronize(end_));
      float ms;
      check("cudaEventElapsedTime", cudaEventElapsedTime(&ms, start_, end_));
      fastest_ms = i == 0 ? ms : std::min(fastest_ms, ms);
    }
    return 1e3 * fastest_ms;
  }

  cudaStream_t stream;

 private:
  cudaEvent_t start_, end_;
};

int multiprocessors() {
  int device, count;
  check("cudaGetDevice", cudaGetDevice(&device));
  check("cudaDeviceGetAttribute",
        cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

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
  unsigned* wrong;           // sums that were read too early
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

double barrier_us(int rounds, int words) {
  Memory<unsigned> arrived(1), wrong(1);
  Memory<unsigned long long> sums(std::max<size_t>(1, size_t(rounds) * words * kValues));
  Clock clock;
  BarrierParams params{arrived.pointer, sums.pointer, wrong.pointer, rounds, words};
  void* arguments[] = {&params};
  wrong.clear(clock.stream);
  const double us = clock.fastest_us(
      [&] {
        arrived.clear(clock.stream);
        sums.clear(clock.stream);
      },
      [&] {  // a cooperative launch: refused unless all blocks are resident
        check("cudaLaunchCooperativeKernel",
              cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(barrier_kernel),
                                          dim3(multiprocessors()), dim3(kThreads), arguments, 0,
                                          clock.stream));
      });
  if (wrong.first() != 0) throw std::runtime_error("a block left the barrier before all had come");
  return us / rounds;
}

// Adds one to what the launch ahead left. Lets the next launch begin, then waits for the one ahead:
// neither does anything in a plain launch.
__global__ void __launch_bounds__(kThreads) chain_kernel(unsigned* number) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (blockIdx.x == 0 && threadIdx.x == 0) *number += 1;
}

double launch_us(int launches, bool fills, bool is_dependent) {
  Memory<unsigned> number(1);
  Clock clock;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(fills ? multiprocessors() : 1);
  config.blockDim = dim3(kThreads);
  config.stream = clock.stream;
  config.attrs = &attribute;
  config.numAttrs = is_dependent;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  check("cudaStreamBeginCapture",
        cudaStreamBeginCapture(clock.stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < launches; ++i) {
    check("cudaLaunchKernelEx", cudaLaunchKernelEx(&config, chain_kernel, number.pointer));
  }
  check("cudaStreamEndCapture", cudaStreamEndCapture(clock.stream, &graph));
  check("cudaGraphInstantiate", cudaGraphInstantiate(&replay, graph, 0));
  const double us =
      clock.fastest_us([&] { number.clear(clock.stream); },
                       [&] { check("cudaGraphLaunch", cudaGraphLaunch(replay, clock.stream)); });
  if (number.first() != unsigned(launches)) {
    throw std::runtime_error("a kernel did not wait for the one ahead");
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  return us / launches;
}

// The text of the error, or an empty one.
const char* caught(const std::function<void()>& probe) {
  static std::string message;
  message.clear();
  try {
    probe();
  } catch (const std::exception& error) {
    message = error.what();
  }
  return message.c_str();
}

}  // namespace

// us of a barrier between blocks that fill the GPU, one a multiprocessor; with `words`, also of
// adding so many integers for each of `kValues` values, and of reading the sums.
extern "C" const char* probe_barrier(int rounds, int words, double* us) {
  return caught([=] { *us = barrier_us(rounds, words); });
}

// us of a launch in a CUDA graph, of one block or of one a multiprocessor.
extern "C" const char* probe_launch(int launches, bool fills, bool is_dependent, double* us) {
  return caught([=] { *us = launch_us(launches, fills, is_dependent); });
}
