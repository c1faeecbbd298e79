// The exact sums of csrc/cuda/exact_sums.cuh: for the host, and for a GPU.

#include "cuda/exact_sums.cuh"

#include "entry.h"

using namespace preact_kernels;
using namespace preact_kernels::cuda;

namespace {

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

}  // namespace

// `words` are zeros, [kSumWords, 2, channels].
PK_ENTRY exact_sums(uint64_t* words, const double* values, double* out, int count, int channels) {
  const Accumulators sums{words, channels, 2 * channels};
  const unsigned blocks = (count * channels + 63) / 64;
  const char* message = run("add", add_kernel, blocks, 64, 0, {sums, values, count, channels});
  if (*message) return message;
  return run("read", read_kernel, 1, 64, 0, {sums, out, channels});
}
