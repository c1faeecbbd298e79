// Compiles the header PK_KERNELS once for each instruction set, each time in its own namespace.
// With PK_FOR_DOT also for avx512_bf16, whose products of bfloat16 are dot products of pairs.
// There is no include guard: every op's .cpp includes this file once, after the standard headers,
// so that no standard code is compiled for an instruction set that the machine may lack.

#if defined(__clang__)
#define PK_PRAGMA(text) _Pragma(#text)
#define PK_BEGIN_ISA(isa) \
  PK_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define PK_END_ISA PK_PRAGMA(clang attribute pop)
#else
#define PK_PRAGMA(text) _Pragma(#text)
#define PK_BEGIN_ISA(isa) PK_PRAGMA(GCC push_options) PK_PRAGMA(GCC target(isa))
#define PK_END_ISA PK_PRAGMA(GCC pop_options)
#endif

#if defined(__x86_64__)
#define PK_MAX_PS _mm512_max_ps
#define PK_MAX_PD _mm512_max_pd
#define PK_FROM_HALF(half) _mm512_cvtph_ps(reinterpret_cast<__m256i>(half))
#define PK_TO_HALF(v) _mm512_cvtps_ph(reinterpret_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT)
#ifdef PK_FOR_DOT
PK_BEGIN_ISA("avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
#define PK_HAS_DOT
namespace preact_kernels::avx512_bf16 {
constexpr int kVectorBytes = 64;
constexpr int kRegisters = 32;
constexpr bool kHasFma = true;
#include "simd.h"
#include PK_KERNELS
}  // namespace preact_kernels::avx512_bf16
#undef PK_HAS_DOT
PK_END_ISA
#endif

PK_BEGIN_ISA("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
namespace preact_kernels::avx512 {
constexpr int kVectorBytes = 64;
constexpr int kRegisters = 32;
constexpr bool kHasFma = true;
#include "simd.h"
#include PK_KERNELS
}  // namespace preact_kernels::avx512
#undef PK_MAX_PS
#undef PK_MAX_PD
#undef PK_FROM_HALF
#undef PK_TO_HALF
PK_END_ISA

PK_BEGIN_ISA("avx2,fma,f16c")
#define PK_MAX_PS _mm256_max_ps
#define PK_MAX_PD _mm256_max_pd
#define PK_FROM_HALF(half) _mm256_cvtph_ps(reinterpret_cast<__m128i>(half))
#define PK_TO_HALF(v) _mm256_cvtps_ph(reinterpret_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT)
namespace preact_kernels::avx2 {
constexpr int kVectorBytes = 32;
constexpr int kRegisters = 16;
constexpr bool kHasFma = true;
#include "simd.h"
#include PK_KERNELS
}  // namespace preact_kernels::avx2
#undef PK_MAX_PS
#undef PK_MAX_PD
#undef PK_FROM_HALF
#undef PK_TO_HALF
PK_END_ISA
#endif

#define PK_MAX_PS _mm_max_ps
#define PK_MAX_PD _mm_max_pd
namespace preact_kernels::generic {
constexpr int kVectorBytes = 16;
constexpr int kRegisters = 16;
#ifdef __x86_64__
constexpr bool kHasFma = false;
#else
constexpr bool kHasFma = true;  // part of AArch64
#endif
#include "simd.h"
#include PK_KERNELS
}  // namespace preact_kernels::generic
#undef PK_MAX_PS
#undef PK_MAX_PD
