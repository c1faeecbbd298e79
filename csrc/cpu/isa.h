// Instruction sets. Every kernel is compiled for each of them; the choice is made at run time.
#pragma once

#include <cstdint>

namespace preact_kernels {

enum class Isa { kGeneric, kAvx2, kAvx512 };

// The best instruction set of this processor, or a lesser one that PREACT_KERNELS_CPU_ISA names
// (generic, avx2, avx512). Read once.
Isa isa();

// Bytes of a vector register of that instruction set.
int64_t vector_bytes();

}  // namespace preact_kernels

// Calls `function<...>(...)` in the namespace of the chosen instruction set.
#if defined(__x86_64__)
#define PK_CALL(function, ...)                                                               \
  (::preact_kernels::isa() == ::preact_kernels::Isa::kAvx512 ? avx512::function(__VA_ARGS__) \
   : ::preact_kernels::isa() == ::preact_kernels::Isa::kAvx2 ? avx2::function(__VA_ARGS__)   \
                                                             : generic::function(__VA_ARGS__))
#else
#define PK_CALL(function, ...) generic::function(__VA_ARGS__)
#endif
