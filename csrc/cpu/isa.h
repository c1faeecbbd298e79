// Instruction sets: every kernel is compiled once for each, and chosen at run time.
#pragma once

namespace preact_kernels {

enum class Isa { kGeneric, kAvx2, kAvx512 };

// The best that this processor has, or less where PREACT_KERNELS_CPU_ISA (generic, avx2, avx512)
// says so. Read once.
Isa isa();

// Bytes of a vector register of that instruction set.
int vector_bytes(Isa isa);

}  // namespace preact_kernels

// Calls `function<...>(...)` of the namespace of the instruction set in force.
#if defined(__x86_64__)
#define PK_CALL(function, ...)                                                               \
  (::preact_kernels::isa() == ::preact_kernels::Isa::kAvx512 ? avx512::function(__VA_ARGS__) \
   : ::preact_kernels::isa() == ::preact_kernels::Isa::kAvx2 ? avx2::function(__VA_ARGS__)   \
                                                             : generic::function(__VA_ARGS__))
#else
#define PK_CALL(function, ...) generic::function(__VA_ARGS__)
#endif
