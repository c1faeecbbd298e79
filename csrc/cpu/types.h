// Storage and accumulation types of the CPU kernels.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../host/launch.h"

#define PK_INLINE inline __attribute__((always_inline))
#define PK_LAMBDA __attribute__((always_inline))

namespace preact_kernels {

struct BFloat16 {
  uint16_t bits;
};

template <class T>
struct AccumulateOf {
  using type = T;
};
template <>
struct AccumulateOf<BFloat16> {
  using type = float;
};
// The type of sums and statistics for storage type T.
template <class T>
using Accumulate = typename AccumulateOf<T>::type;

inline float widened(float value) { return value; }
inline double widened(double value) { return value; }
inline float widened(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Rounds to nearest even. NaN stays NaN.
template <class T>
T narrowed(Accumulate<T> value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
    return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
  } else {
    return value;
  }
}

// Runs `body(T{})` for the storage type T of `dtype`: float or BFloat16.
template <class Body>
auto for_single_dtype(ScalarType dtype, const Body& body) {
  if (dtype == ScalarType::Float) return body(float{});
  STD_TORCH_CHECK(dtype == ScalarType::BFloat16,
                  "x: expected dtype float32 or bfloat16 in the direct convolutions");
  return body(BFloat16{});
}

// Runs `body(T{})` for the storage type T of `dtype`.
template <class Body>
auto for_dtype(ScalarType dtype, const Body& body) {
  if (dtype == ScalarType::Float) return body(float{});
  if (dtype == ScalarType::Double) return body(double{});
  STD_TORCH_CHECK(dtype == ScalarType::BFloat16,
                  "x: expected dtype float32, bfloat16 or float64 on the cpu backend");
  return body(BFloat16{});
}

}  // namespace preact_kernels
