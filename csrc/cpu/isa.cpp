#include "isa.h"

#include <cstdlib>
#include <cstring>

namespace preact_kernels {
namespace {

constexpr const char* kNames[] = {"generic", "avx2", "avx512", "avx512_bf16"};  // by Isa

Isa supported() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  if (!has_avx2) return Isa::kGeneric;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    return __builtin_cpu_supports("avx512bf16") ? Isa::kAvx512Bf16 : Isa::kAvx512;
  }
  return Isa::kAvx2;
#endif
  return Isa::kGeneric;
}

Isa chosen() {
  const Isa best = supported();
  const char* name = std::getenv("PREACT_KERNELS_CPU_ISA");
  if (name == nullptr) return best;
  for (int i = 0; i < static_cast<int>(best); ++i) {
    if (std::strcmp(name, kNames[i]) == 0) return static_cast<Isa>(i);
  }
  return best;
}

}  // namespace

Isa isa() {
  static const Isa isa = chosen();
  return isa;
}

const char* isa_name() { return kNames[static_cast<int>(isa())]; }

int64_t vector_bytes() { return isa() >= Isa::kAvx512 ? 64 : isa() == Isa::kAvx2 ? 32 : 16; }

}  // namespace preact_kernels
