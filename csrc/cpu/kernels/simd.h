// Vectors of one instruction set, built on the compiler's vector extensions.
#pragma once

#include <utility>

#include "../types.h"
#include "isa.h"

PK_BEGIN_ISA

template <class A>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float type __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VectorOf<double> {
  typedef double type __attribute__((vector_size(kVectorBytes)));
};
template <class A>
using Vector = typename VectorOf<A>::type;
template <class A>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(A));

typedef uint16_t HalfBits __attribute__((vector_size(kVectorBytes / 2)));
typedef uint32_t FullBits __attribute__((vector_size(kVectorBytes)));

template <class A>
PK_INLINE Vector<A> load(const A* from) {
  Vector<A> v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

PK_INLINE Vector<float> load(const BFloat16* from) {
  HalfBits half;
  __builtin_memcpy(&half, from, sizeof half);
  return reinterpret_cast<Vector<float>>(__builtin_convertvector(half, FullBits) << 16);
}

#ifdef PK_FROM_HALF
PK_INLINE Vector<float> load(const Float16* from) {
  HalfBits half;
  __builtin_memcpy(&half, from, sizeof half);
  return reinterpret_cast<Vector<float>>(PK_FROM_HALF(half));
}
PK_INLINE void store(Float16* to, Vector<float> v) {
  const auto half = PK_TO_HALF(v);
  __builtin_memcpy(to, &half, sizeof half);
}
#else
typedef int32_t SignedBits __attribute__((vector_size(kVectorBytes)));

// `upcast` for a vector.
PK_INLINE Vector<float> load(const Float16* from) {
  HalfBits half;
  __builtin_memcpy(&half, from, sizeof half);
  const FullBits bits = __builtin_convertvector(half, FullBits), rest = bits & 0x7fff;
  const SignedBits size = reinterpret_cast<SignedBits>(rest);
  const Vector<float> denormal = __builtin_convertvector(size, Vector<float>) * 0x1p-24f;
  FullBits found = (rest << 13) + (112u << 23);
  found = size < 0x400 ? reinterpret_cast<FullBits>(denormal) : found;
  found = size >= 0x7c00 ? rest << 13 | 0x7f800000 : found;
  return reinterpret_cast<Vector<float>>(found | (bits & 0x8000) << 16);
}

// `rounded_to` for a vector.
PK_INLINE void store(Float16* to, Vector<float> v) {
  const FullBits bits = reinterpret_cast<FullBits>(v), rest = bits & 0x7fffffff;
  const SignedBits size = reinterpret_cast<SignedBits>(rest);
  const Vector<float> denormal = reinterpret_cast<Vector<float>>(rest) + 0.5f;  // in units of 2^-24
  FullBits found = (rest + 0xfff + ((rest >> 13) & 1) - (112u << 23)) >> 13;
  found = size < 0x38800000 ? reinterpret_cast<FullBits>(denormal) - 0x3f000000 : found;
  found = size >= 0x477ff000 ? FullBits{} + 0x7c00 : found;
  found = size > 0x7f800000 ? (rest >> 13 & 0x3ff) | 0x7e00 : found;
  const HalfBits half = __builtin_convertvector(found | (bits >> 16 & 0x8000), HalfBits);
  __builtin_memcpy(to, &half, sizeof half);
}
#endif

template <class A>
PK_INLINE void store(A* to, Vector<A> v) {
  __builtin_memcpy(to, &v, sizeof v);
}

#if defined(PK_HAS_DOT) && defined(PK_TARGET)
// Rounds to nearest even. NaN stays NaN. Denormal numbers become 0, as in dot products.
PK_INLINE void store(BFloat16* to, Vector<float> v) {
  const __m256bh half = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(v));
  __builtin_memcpy(to, &half, sizeof half);
}
#else
// Rounds to nearest even. NaN stays NaN.
PK_INLINE void store(BFloat16* to, Vector<float> v) {
  const FullBits bits = reinterpret_cast<FullBits>(v);
  const FullBits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const FullBits quiet = (bits >> 16) | 0x40;
  const FullBits is_nan = reinterpret_cast<FullBits>(v != v);
  const HalfBits half = __builtin_convertvector((quiet & is_nan) | (rounded & ~is_nan), HalfBits);
  __builtin_memcpy(to, &half, sizeof half);
}
#endif

// Loads the first `lanes` values; the other lanes are 0.
template <class T>
PK_INLINE Vector<Accumulate<T>> load(const T* from, int lanes) {
  if (lanes == kLanes<Accumulate<T>>) return load(from);
  T values[kLanes<Accumulate<T>>] = {};
  for (int i = 0; i < lanes; ++i) values[i] = from[i];
  return load(values);
}

template <class T>
PK_INLINE void store(T* to, Vector<Accumulate<T>> v, int lanes) {
  if (lanes == kLanes<Accumulate<T>>) return store(to, v);
  T values[kLanes<Accumulate<T>>];
  store(values, v);
  for (int i = 0; i < lanes; ++i) to[i] = values[i];
}

// The value that `store` writes to memory.
PK_INLINE Vector<float> as_stored(const float*, Vector<float> v) { return v; }
PK_INLINE Vector<double> as_stored(const double*, Vector<double> v) { return v; }
template <class T>
PK_INLINE Vector<float> as_stored(const T*, Vector<float> v) {
  T values[kLanes<float>];
  store(values, v);
  return load(values);
}

// Stores `v`, and returns the value in memory.
template <class T>
PK_INLINE Vector<Accumulate<T>> stored(T* to, Vector<Accumulate<T>> v) {
  store(to, v);
  if constexpr (std::is_same_v<T, Accumulate<T>>) return v;
  return load(to);
}

// max(v, 0). NaN stays NaN: the instruction then returns its second operand.
#ifdef PK_MAX_PS
PK_INLINE Vector<float> relu(Vector<float> v) { return PK_MAX_PS(Vector<float>{}, v); }
PK_INLINE Vector<double> relu(Vector<double> v) { return PK_MAX_PD(Vector<double>{}, v); }
#else
template <class V>
PK_INLINE V relu(V v) {
  return 0 > v ? V{} : v;
}
#endif

// v, or 0 where v is not finite: a pivot must be finite.
template <class V>
PK_INLINE V finite_or_zero(V v) {
  return v - v == 0 ? v : V{};
}

// The largest number that rounds to 0 in T: half the least denormal number.
template <class T>
constexpr Accumulate<T> kRoundsToZero = 0;
template <>
constexpr float kRoundsToZero<Float16> = 0x1p-25f;
template <>
constexpr float kRoundsToZero<BFloat16> = 0x1p-134f;

// value where p, rounded to T, is > 0 or NaN, else 0: the gradient of relu(p), as in PyTorch.
template <class T>
PK_INLINE Vector<Accumulate<T>> where_active(Vector<Accumulate<T>> p, Vector<Accumulate<T>> value) {
  return p <= kRoundsToZero<T> ? Vector<Accumulate<T>>{} : value;
}

// Words of `a` and `b` in turn, from word kFrom of both.
template <int kFrom, int... kIndex>
PK_INLINE FullBits zipped(FullBits a, FullBits b, std::integer_sequence<int, kIndex...>) {
  return PK_SHUFFLE(a, b, FullBits, (kFrom + kIndex / 2 + kIndex % 2 * kLanes<float>)...);
}

// Transposes a square of words, in stages that zip each vector with the one half the square away.
PK_INLINE void transpose(FullBits (&square)[kLanes<float>]) {
  constexpr int lanes = kLanes<float>, half = lanes / 2;
  using Indices = std::make_integer_sequence<int, lanes>;
#pragma GCC unroll 4
  for (int stage = 1; stage < lanes; stage *= 2) {
    FullBits next[lanes];
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) {
      next[2 * i] = zipped<0>(square[i], square[i + half], Indices{});
      next[2 * i + 1] = zipped<half>(square[i], square[i + half], Indices{});
    }
#pragma GCC unroll 16
    for (int i = 0; i < lanes; ++i) square[i] = next[i];
  }
}

// Calls body(vectors, first channel, lanes) for vectors that cover all channels: first 4
// at a time, then 1, then one partly filled vector. `vectors` is a constant, and so is `lanes`
// except in the last call.
template <class A, class Body>
PK_INLINE void for_channel_vectors(int64_t channels, const Body& body) {
  constexpr int lanes = kLanes<A>;
  int64_t c = 0;
  for (; c + 4 * lanes <= channels; c += 4 * lanes) {
    body(std::integral_constant<int, 4>{}, c, std::integral_constant<int, lanes>{});
  }
  for (; c + lanes <= channels; c += lanes) {
    body(std::integral_constant<int, 1>{}, c, std::integral_constant<int, lanes>{});
  }
  if (c < channels) {
    body(std::integral_constant<int, 1>{}, c, static_cast<int>(channels - c));
  }
}

PK_END_ISA
