// Instruction sets. Every kernel is compiled for each; the choice is made at run time.
#pragma once

#include <cstdint>
#include <type_traits>

#include "types.h"

namespace preact_kernels {

enum class Isa { kGeneric, kAvx2, kAvx512, kAvx512Bf16, kAmxBf16 };

// The best instruction set of this processor, or a lesser one that PREACT_KERNELS_CPU_ISA names.
// The variable is read once.
Isa isa();
const char* isa_name();

int64_t vector_bytes();

}  // namespace preact_kernels

// PK_FOR_EACH_ISA declares kernels in the namespace of every instruction set.
//
// PK_CALL calls `function(...)` of the chosen instruction set. avx512_bf16 has only the products of
// bfloat16, amx_bf16 only the products of strips of bfloat16; for everything else each uses the
// lesser instruction set.
//
// With PK_EMULATED, both are plain C++ that runs wherever avx2 does, and use avx2 for everything
// else.
#if defined(__x86_64__)
#if defined(PK_EMULATED)
#define PK_FOR_AVX512(...)
#define PK_CALL_AVX512 avx2
#else
#define PK_FOR_AVX512(...) \
  namespace avx512 {       \
  __VA_ARGS__              \
  }
#define PK_CALL_AVX512 avx512
#endif
#define PK_FOR_EACH_ISA(...) \
  namespace amx_bf16 {       \
  __VA_ARGS__                \
  }                          \
  namespace avx512_bf16 {    \
  __VA_ARGS__                \
  }                          \
  PK_FOR_AVX512(__VA_ARGS__) \
  namespace avx2 {           \
  __VA_ARGS__                \
  }                          \
  namespace generic {        \
  __VA_ARGS__                \
  }
#define PK_CALL(function, ...)                                                             \
  (::preact_kernels::isa() >= ::preact_kernels::Isa::kAvx512                               \
       ? PK_CALL_AVX512::function(__VA_ARGS__)                                             \
   : ::preact_kernels::isa() == ::preact_kernels::Isa::kAvx2 ? avx2::function(__VA_ARGS__) \
                                                             : generic::function(__VA_ARGS__))
#define PK_CALL_DOT(function, ...)                               \
  (::preact_kernels::isa() >= ::preact_kernels::Isa::kAvx512Bf16 \
       ? ::preact_kernels::avx512_bf16::function(__VA_ARGS__)    \
       : PK_CALL(function, __VA_ARGS__))
#define PK_CALL_TILES(function, ...)                          \
  (::preact_kernels::isa() == ::preact_kernels::Isa::kAmxBf16 \
       ? ::preact_kernels::amx_bf16::function(__VA_ARGS__)    \
       : PK_CALL_DOT(function, __VA_ARGS__))
#else
#define PK_FOR_EACH_ISA(...) \
  namespace generic {        \
  __VA_ARGS__                \
  }
#define PK_CALL(function, ...) generic::function(__VA_ARGS__)
#define PK_CALL_DOT(function, ...) generic::function(__VA_ARGS__)
#define PK_CALL_TILES(function, ...) generic::function(__VA_ARGS__)
#endif

// PK_CALL for products in storage type T, of strips and others: bfloat16 has its own kernels.
#define PK_CALL_STRIP(T, ...) PK_CALL_FOR(T, PK_CALL_TILES, __VA_ARGS__)
#define PK_CALL_PRODUCT(T, ...) PK_CALL_FOR(T, PK_CALL_DOT, __VA_ARGS__)
#define PK_CALL_FOR(T, call_bfloat16, function, ...) \
  [&] {                                              \
    if constexpr (std::is_same_v<T, BFloat16>) {     \
      return call_bfloat16(function, __VA_ARGS__);   \
    } else {                                         \
      return PK_CALL(function, __VA_ARGS__);         \
    }                                                \
  }()
