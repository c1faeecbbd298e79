#include "isa.h"

#include <cstdlib>
#include <cstring>

namespace preact_kernels {
namespace {

Isa supported() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return Isa::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::kAvx2;
#endif
  return Isa::kGeneric;
}

Isa chosen() {
  const Isa best = supported();
  const char* name = std::getenv("PREACT_KERNELS_CPU_ISA");
  if (name == nullptr) return best;
  Isa wanted = best;
  if (std::strcmp(name, "generic") == 0) wanted = Isa::kGeneric;
  if (std::strcmp(name, "avx2") == 0) wanted = Isa::kAvx2;
  return wanted < best ? wanted : best;
}

}  // namespace

Isa isa() {
  static const Isa isa = chosen();
  return isa;
}

int64_t vector_bytes() { return isa() == Isa::kAvx512 ? 64 : isa() == Isa::kAvx2 ? 32 : 16; }

}  // namespace preact_kernels
