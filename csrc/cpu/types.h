// Storage and accumulation types of the CPU kernels.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../args.h"

#define PK_INLINE inline __attribute__((always_inline))
#define PK_LAMBDA __attribute__((always_inline))
// Keeps functions small, as compile time grows faster than their size.
#define PK_OUTLINE __attribute__((noinline))

// The values of two vectors of type `type` at the given indices.
#if defined(__clang__)
#define PK_SHUFFLE(a, b, type, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PK_SHUFFLE(a, b, type, ...) __builtin_shuffle(a, b, type{__VA_ARGS__})
#endif

namespace preact_kernels {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
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
template <>
struct AccumulateOf<Float16> {
  using type = float;
};
// The type of sums and statistics for storage type T.
template <class T>
using Accumulate = typename AccumulateOf<T>::type;

inline float upcast(float value) { return value; }
inline double upcast(double value) { return value; }
inline float upcast(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline float upcast(Float16 value) {
  const uint32_t sign = (value.bits & 0x8000u) << 16, rest = value.bits & 0x7fffu;
  uint32_t bits = rest << 13;
  if (rest >= 0x7c00) {  // infinite or NaN
    bits |= 0x7f800000;
  } else if (rest >= 0x400) {
    bits += 112u << 23;
  } else {
    const float denormal = rest * 0x1p-24f;
    std::memcpy(&bits, &denormal, sizeof bits);
  }
  bits |= sign;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

// Rounds to nearest even. NaN stays NaN.
template <class T>
T rounded_to(Accumulate<T> value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
    return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
  } else if constexpr (std::is_same_v<T, Float16>) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    uint32_t half;
    if (value != value) {
      half = 0x7e00 | (rest >> 13 & 0x3ff);
    } else if (rest >= 0x477ff000) {  // 65520: rounds to infinity
      half = 0x7c00;
    } else if (rest < 0x38800000) {  // 2^-14: a denormal number, in units of 2^-24
      half = static_cast<uint32_t>(std::nearbyint(std::fabs(value) * 0x1p24f));
    } else {
      half = (rest + 0xfff + ((rest >> 13) & 1) - (112u << 23)) >> 13;
    }
    return {static_cast<uint16_t>(sign | half)};
  } else {
    return value;
  }
}

}  // namespace preact_kernels
