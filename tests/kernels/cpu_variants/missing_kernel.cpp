// Stands for the kernels of instruction sets that a variant was not compiled for.

#include <cstdio>
#include <cstdlib>

extern "C" void missing_kernel() {
  std::fputs("PREACT_KERNELS_CPU_ISA: not in this variant of the CPU library\n", stderr);
  std::abort();
}
