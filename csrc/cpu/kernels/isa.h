// The instruction set of a translation unit. setup.py compiles the sources of this folder for each
// instruction set, with PK_AVX2 or its like defined. Kernels are in the namespace of that
// instruction set, between PK_BEGIN_ISA and PK_END_ISA.
//
// Include other headers before PK_BEGIN_ISA: the linker keeps one copy of an inline function, such
// as of the standard library, which must run on every machine.
#pragma once

#include "../types.h"

// Call macro(T) for the storage types of all kernels, and of convolutions; macro(A) for the types
// of sums; macro(W) for the types of values that are only moved.
#define PK_FOR_DTYPES(macro) macro(double) PK_FOR_CONV_DTYPES(macro)
#define PK_FOR_CONV_DTYPES(macro) macro(float) macro(BFloat16) macro(Float16)
#define PK_FOR_SUM_TYPES(macro) macro(float) macro(double)
#define PK_FOR_WORDS(macro) macro(uint16_t) macro(uint32_t)

#if !defined(__x86_64__) && !defined(PK_EMULATED) && !defined(PK_GENERIC)
// An empty unit.
#undef PK_FOR_DTYPES
#undef PK_FOR_CONV_DTYPES
#undef PK_FOR_SUM_TYPES
#undef PK_FOR_WORDS
#define PK_FOR_DTYPES(macro)
#define PK_FOR_CONV_DTYPES(macro)
#define PK_FOR_SUM_TYPES(macro)
#define PK_FOR_WORDS(macro)
#undef PK_AVX2
#undef PK_AVX512
#undef PK_AVX512_BF16
#undef PK_AMX_BF16
#define PK_GENERIC
#endif

#if defined(PK_AMX_BF16)  // the products of strips of bfloat16, on tiles
#define PK_HAS_TILES
#define PK_ISA amx_bf16
#elif defined(PK_AVX512_BF16)  // the products of bfloat16, as dot products of pairs
#define PK_ISA avx512_bf16
#endif
#if defined(PK_AMX_BF16) || defined(PK_AVX512_BF16)
#define PK_HAS_DOT
#if !defined(PK_EMULATED)
#define PK_TARGET "avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"
#endif
#undef PK_FOR_CONV_DTYPES
#define PK_FOR_CONV_DTYPES(macro) macro(BFloat16)
#elif defined(PK_AVX512)
#define PK_ISA avx512
#define PK_TARGET "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c"
#elif defined(PK_AVX2)
#define PK_ISA avx2
#define PK_TARGET "avx2,fma,f16c"
#elif defined(PK_GENERIC)
#define PK_ISA generic
#else
#error "expected PK_GENERIC, PK_AVX2, PK_AVX512, PK_AVX512_BF16 or PK_AMX_BF16"
#endif

#if defined(PK_TARGET)
#pragma GCC diagnostic push
#ifndef __clang__  // GCC 12 warns in its own header
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(__x86_64__)
#include <emmintrin.h>
#endif

#define PK_PRAGMA(text) _Pragma(#text)
#if !defined(PK_TARGET)
#define PK_BEGIN_TARGET(isa)
#define PK_END_TARGET
#elif defined(__clang__)
#define PK_BEGIN_TARGET(isa) \
  PK_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define PK_END_TARGET PK_PRAGMA(clang attribute pop)
#else
#define PK_BEGIN_TARGET(isa) PK_PRAGMA(GCC push_options) PK_PRAGMA(GCC target(isa))
#define PK_END_TARGET PK_PRAGMA(GCC pop_options)
#endif
#define PK_BEGIN_ISA         \
  PK_BEGIN_TARGET(PK_TARGET) \
  namespace preact_kernels::PK_ISA {
#define PK_END_ISA \
  }                \
  PK_END_TARGET

namespace preact_kernels::PK_ISA {

#if defined(PK_HAS_DOT) || defined(PK_AVX512)
constexpr int kVectorBytes = 64, kRegisters = 32;
#elif defined(PK_AVX2)
constexpr int kVectorBytes = 32, kRegisters = 16;
#else
constexpr int kVectorBytes = 16, kRegisters = 16;
#endif

#if defined(PK_TARGET) && !defined(PK_AVX2)
#define PK_MAX_PS _mm512_max_ps
#define PK_MAX_PD _mm512_max_pd
#define PK_FROM_HALF(half) _mm512_cvtph_ps(reinterpret_cast<__m256i>(half))
#define PK_TO_HALF(v) _mm512_cvtps_ph(reinterpret_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT)
#elif defined(PK_TARGET)
#define PK_MAX_PS _mm256_max_ps
#define PK_MAX_PD _mm256_max_pd
#define PK_FROM_HALF(half) _mm256_cvtph_ps(reinterpret_cast<__m128i>(half))
#define PK_TO_HALF(v) _mm256_cvtps_ph(reinterpret_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT)
#elif defined(__x86_64__) && defined(PK_GENERIC)
#define PK_MAX_PS _mm_max_ps
#define PK_MAX_PD _mm_max_pd
#endif

#if defined(__x86_64__) && !defined(PK_TARGET)
constexpr bool kHasFma = false;
#else
constexpr bool kHasFma = true;  // part of AArch64
#endif

}  // namespace preact_kernels::PK_ISA
