// The step of a product: a few values of one operand, broadcast, times a vector of the other.
#pragma once

#include "simd.h"

PK_BEGIN_ISA

// The type of a product's operands for storage type T. Dot products read pairs of bfloat16.
#ifdef PK_HAS_DOT
template <class T>
using Operand = std::conditional_t<std::is_same_v<T, BFloat16>, BFloat16, Accumulate<T>>;
#else
template <class T>
using Operand = Accumulate<T>;
#endif

// Values of the reduction that one instruction multiplies.
template <class O>
constexpr int kDepth = std::is_same_v<O, BFloat16> ? 2 : 1;

// A vector of kLanes<Accumulate<O>> outputs, kDepth<O> values each.
template <class O>
struct WideOf {
  using type = Vector<O>;
};
template <>
struct WideOf<BFloat16> {
  using type = FullBits;
};
template <class O>
using Wide = typename WideOf<O>::type;

template <class O>
PK_INLINE Wide<O> load_wide(const O* from) {
  Wide<O> wide;
  __builtin_memcpy(&wide, from, sizeof wide);
  return wide;
}

// kDepth<O> values, the same for all outputs.
template <class A>
PK_INLINE Vector<A> load_narrow(const A* from) {
  return *from - Vector<A>{};
}
#ifdef PK_HAS_DOT
PK_INLINE FullBits load_narrow(const BFloat16* from) {
  uint32_t pair;
  __builtin_memcpy(&pair, from, sizeof pair);
  return pair - FullBits{};
}
#endif

// acc + the sum of kDepth<O> products.
template <class V>
PK_INLINE V multiply_add(V acc, V narrow, V wide) {
  return acc + narrow * wide;
}
#if defined(PK_HAS_DOT) && defined(PK_TARGET)
PK_INLINE Vector<float> multiply_add(Vector<float> acc, FullBits narrow, FullBits wide) {
  return reinterpret_cast<Vector<float>>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc),
                                                          reinterpret_cast<__m512bh>(wide),
                                                          reinterpret_cast<__m512bh>(narrow)));
}
#elif defined(PK_HAS_DOT)
// The first and the second values of pairs. Denormal numbers are 0.
PK_INLINE Vector<float> first_values(FullBits pairs) {
  const FullBits bits = pairs << 16;
  return reinterpret_cast<Vector<float>>((bits & 0x7f800000) == 0 ? FullBits{} : bits);
}
PK_INLINE Vector<float> second_values(FullBits pairs) { return first_values(pairs >> 16); }

PK_INLINE Vector<float> multiply_add(Vector<float> acc, FullBits narrow, FullBits wide) {
  acc += second_values(narrow) * second_values(wide);
  return acc + first_values(narrow) * first_values(wide);
}
#endif

PK_END_ISA
