// Replaces the kernels of instruction sets that a variant does not contain.

#include <cstdio>
#include <cstdlib>

extern "C" void missing_kernel() {
  std::fputs("PREACT_KERNELS_CPU_ISA: not in this variant of the CPU library\n", stderr);
  std::abort();
}
