// Division by a number that the host knows.
#pragma once

#include "device.cuh"

namespace preact_kernels::cuda {

// Divides by multiplying and shifting: exact for 0 <= n < 2^31 and divisors from 1 (Granlund and
// Montgomery, "Division by invariant integers using multiplication", 1994).
struct Divisor {
  uint32_t multiplier = 0;
  int shift = 0;

  Divisor() = default;
  explicit Divisor(int divisor) : shift(31) {
    while (int64_t(1) << (shift - 31) < divisor) ++shift;
    multiplier = uint32_t(((int64_t(1) << shift) + divisor - 1) / divisor);
  }
  __device__ int divide(int n) const { return int(uint64_t(n) * multiplier >> shift); }
};

}  // namespace preact_kernels::cuda
