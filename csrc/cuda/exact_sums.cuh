// Sums over the thread blocks of a grid as exact integers: the order of additions changes no bit,
// and no thread block waits for another. The kernel that reads a sum rounds it.
//
// A sum is six words. Words 0 to 4 count units of 2^-96, 2^-48, ... 2^96: a float64 is split into
// integers of 48 bits, and each is added to its word with wraparound, which leaves 15 bits for the
// number of additions. Values below the lowest unit (1e-29) are lost; 2^143 and above, which
// squares of float32 do not reach, is infinite. Word 5 counts additions that are not finite. A
// channel has sums 0 and 1.
#pragma once

#include "../args.h"
#include "device.cuh"

namespace preact_kernels::cuda {

constexpr int kSumParts = 5, kSumWords = kSumParts + 1, kSumBits = 48;

// Word 5 holds three counts.
constexpr uint64_t kOneNaN = 1, kOnePositive = uint64_t(1) << 21, kOneNegative = uint64_t(1) << 42;

// Adds to sum `value` of a channel.
__device__ inline void add_exact(const Accumulators& sums, int channel, int value, double added) {
  constexpr double kUnits[] = {0x1p-96, 0x1p-48, 1, 0x1p48, 0x1p96};
  constexpr double kUnitsInOne[] = {0x1p96, 0x1p48, 1, 0x1p-48, 0x1p-96};
  uint64_t* words = sums.words + value * sums.second + channel;
  if (!(fabs(added) < 0x1p143)) {
    const uint64_t one = isnan(added) ? kOneNaN : added > 0 ? kOnePositive : kOneNegative;
    add_relaxed(words + kSumParts * sums.stride, one);
    return;
  }
#pragma unroll
  for (int w = kSumParts - 1; w >= 0; --w) {
    const int64_t units = static_cast<int64_t>(added * kUnitsInOne[w]);  // towards zero
    added -= static_cast<double>(units) * kUnits[w];                     // exact
    if (units != 0) add_relaxed(words + w * sums.stride, static_cast<uint64_t>(units));
  }
}

// Makes each part but the highest less than 2^48 and not negative.
__device__ inline void carry(int64_t (&parts)[kSumParts]) {
#pragma unroll
  for (int w = 0; w + 1 < kSumParts; ++w) {
    const int64_t carried = parts[w] >> kSumBits;
    parts[w] -= carried * (int64_t(1) << kSumBits);
    parts[w + 1] += carried;
  }
}

// Converts an integer from 0 to 2^52 - 1, by way of the fraction of a number from 2^52 on. The
// instruction that converts any integer is slow.
__device__ inline double small_to_double(int64_t value) {
  return __longlong_as_double(0x4330000000000000ll | value) - 0x1p52;
}

// The words of a sum. A thread can load them, and start copies, before it needs their value.
struct ExactSum {
  int64_t parts[kSumParts];
  uint64_t counts;

  __device__ void load(const Accumulators& sums, int channel, int value) {
    const uint64_t* words = sums.words + value * sums.second + channel;
#pragma unroll
    for (int w = 0; w < kSumParts; ++w) {
      parts[w] = static_cast<int64_t>(__ldcg(words + w * sums.stride));
    }
    counts = __ldcg(words + kSumParts * sums.stride);
  }
};

__device__ inline double read_exact(ExactSum of) {
  constexpr double kUnits[] = {0x1p-96, 0x1p-48, 1, 0x1p48, 0x1p96};
  int64_t (&parts)[kSumParts] = of.parts;
  // The parts of a negative sum cancel each other: negate it.
  carry(parts);
  const bool is_negative = parts[kSumParts - 1] < 0;
  if (is_negative) {
#pragma unroll
    for (int w = 0; w < kSumParts; ++w) parts[w] = -parts[w];
    carry(parts);
  }
  double sum = 0;
#pragma unroll
  for (int w = 0; w + 1 < kSumParts; ++w) sum += small_to_double(parts[w]) * kUnits[w];
  sum += static_cast<double>(parts[kSumParts - 1]) * kUnits[kSumParts - 1];
  if (is_negative) sum = -sum;
  if (of.counts != 0) {
    const bool has_positive = of.counts & (kOneNegative - kOnePositive);
    const bool has_negative = of.counts >= kOneNegative;
    const bool is_nan = of.counts & (kOnePositive - 1) || (has_positive && has_negative);
    sum = is_nan ? NAN : has_positive ? INFINITY : -INFINITY;
  }
  return sum;
}

__device__ inline double read_exact(const Accumulators& sums, int channel, int value) {
  ExactSum sum;
  sum.load(sums, channel, value);
  return read_exact(sum);
}

// The number of values in a sum, and its reciprocal.
struct Count {
  double value, reciprocal;

  Count() = default;
  explicit Count(double value_) : value(value_), reciprocal(1 / value_) {}

  // sum / value, rounded correctly (Markstein, 1990): the mean of a constant is the constant.
  __device__ double mean(double sum) const {
    const double near = sum * reciprocal;
    const double exact = fma(fma(-value, near, sum), reciprocal, near);
    return isfinite(exact) ? exact : near;
  }
};

// Mean and biased variance, from the sums of values and of their squares.
__device__ inline void read_moments(const ExactSum& sum, const ExactSum& squares,
                                    const Count& count, float& mean, float& var) {
  const double exact_mean = count.mean(read_exact(sum));
  const double exact_var = count.mean(read_exact(squares)) - exact_mean * exact_mean;
  mean = static_cast<float>(exact_mean);
  var = static_cast<float>(exact_var < 0 ? 0 : exact_var);  // NaN stays NaN
}

}  // namespace preact_kernels::cuda
