// CUDA's number and vector types, for the host.
#pragma once

#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};
struct __half {
  uint16_t bits;
};

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace cuda_on_host {

template <class To, class From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline float widened(float value) { return value; }
inline float widened(__nv_bfloat16 value) {
  return bits_as<float>(static_cast<uint32_t>(value.bits) << 16);
}
inline float widened(__half value) { return static_cast<float>(bits_as<_Float16>(value.bits)); }

// Rounds to nearest, ties to even. Any NaN becomes the canonical one.
template <class T>
T narrowed(float value);
template <>
inline float narrowed<float>(float value) {
  return value;
}
template <>
inline __nv_bfloat16 narrowed<__nv_bfloat16>(float value) {
  const uint32_t bits = bits_as<uint32_t>(value);
  if (value != value) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
template <>
inline __half narrowed<__half>(float value) {
  if (value != value) return {0x7fff};
  return {bits_as<uint16_t>(static_cast<_Float16>(value))};
}

}  // namespace cuda_on_host
