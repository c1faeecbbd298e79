#include "isa.h"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace preact_kernels {
namespace {

constexpr const char* kNames[] = {"generic", "avx2", "avx512", "avx512_bf16",
                                  "amx_bf16"};  // indexed by Isa

#if defined(PK_EMULATED)
bool has_amx_bf16() { return true; }
bool may_use_tiles() { return true; }
#elif defined(__x86_64__) && defined(__linux__)
// Whether the processor has matrix instructions for bfloat16. __builtin_cpu_supports of older
// compilers does not know them.
bool has_amx_bf16() {
  constexpr unsigned kTile = 1u << 24, kBf16 = 1u << 22;
  unsigned eax, ebx, ecx, edx;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  return (edx & kTile) != 0 && (edx & kBf16) != 0;
}

// Whether the kernel lets this process use tile registers: Linux requires a request. It fails where
// the kernel is older than 5.16, a sandbox refuses it, or a thread has a small signal stack.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#else
bool has_amx_bf16() { return false; }
bool may_use_tiles() { return false; }
#endif

Isa supported() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  if (!has_avx2) return Isa::kGeneric;
#if defined(PK_EMULATED)
  return Isa::kAmxBf16;
#endif
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    if (!__builtin_cpu_supports("avx512bf16")) return Isa::kAvx512;
    return has_amx_bf16() ? Isa::kAmxBf16 : Isa::kAvx512Bf16;
  }
  return Isa::kAvx2;
#endif
  return Isa::kGeneric;
}

Isa wanted() {
  const Isa best = supported();
  const char* name = std::getenv("PREACT_KERNELS_CPU_ISA");
  if (name == nullptr) return best;
  for (int i = 0; i < static_cast<int>(best); ++i) {
    if (std::strcmp(name, kNames[i]) == 0) return static_cast<Isa>(i);
  }
  return best;
}

Isa chosen() {
  const Isa isa = wanted();
  return isa == Isa::kAmxBf16 && !may_use_tiles() ? Isa::kAvx512Bf16 : isa;
}

}  // namespace

Isa isa() {
  static const Isa isa = chosen();
  return isa;
}

const char* isa_name() { return kNames[static_cast<int>(isa())]; }

int64_t vector_bytes() { return isa() >= Isa::kAvx512 ? 64 : isa() == Isa::kAvx2 ? 32 : 16; }

}  // namespace preact_kernels
