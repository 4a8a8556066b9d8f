// Which instruction sets were compiled in, which of them this machine runs, and the choice.

#include "isa.h"

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace attnplat_cpu {
namespace {

// Lowest first; each includes those above it.
const Kernels *const kCompiled[] = {
    &scalar::kKernels,
#if defined(ATTNPLAT_HAVE_AVX2)
    &avx2::kKernels,
#endif
#if defined(ATTNPLAT_HAVE_AVX512)
    &avx512::kKernels,
#endif
#if defined(ATTNPLAT_HAVE_AVX512_BF16)
    &avx512_bf16::kKernels,
#endif
#if defined(ATTNPLAT_HAVE_AMX)
    &amx::kKernels,
#endif
#if defined(ATTNPLAT_HAVE_NEON)
    &neon::kKernels,
#endif
#if defined(ATTNPLAT_HAVE_NEON_BF16)
    &neon_bf16::kKernels,
#endif
};
constexpr int32_t kCount = sizeof(kCompiled) / sizeof(kCompiled[0]);

#if defined(__x86_64__)
struct Registers {
  uint32_t a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(uint32_t leaf, uint32_t part) {
  Registers r;
  if (!__get_cpuid_count(leaf, part, &r.a, &r.b, &r.c, &r.d)) r = Registers();
  return r;
}

bool bit(uint32_t word, int n) { return word >> n & 1; }

// Which register files the system saves: XCR0.
uint64_t saved_state() {
  if (!bit(cpuid(1, 0).c, 27)) return 0;  // OSXSAVE
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

bool has_avx2() {
  Registers one = cpuid(1, 0), seven = cpuid(7, 0);
  bool saved = (saved_state() & 0x6) == 0x6;
  return saved && bit(one.c, 12) && bit(one.c, 29) && bit(seven.b, 5);  // FMA, F16C, AVX2
}

bool has_avx512() {
  Registers seven = cpuid(7, 0);
  bool saved = (saved_state() & 0xe6) == 0xe6;
  // F, DQ, BW, VL
  return saved && has_avx2() && bit(seven.b, 16) && bit(seven.b, 17) && bit(seven.b, 30) &&
         bit(seven.b, 31);
}

bool has_avx512_bf16() { return has_avx512() && bit(cpuid(7, 1).a, 5); }

// Tile registers must be asked for, once a process; the answer is the system's to give.
bool allowed_amx() {
#if defined(__linux__)
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

bool has_amx() {
  Registers seven = cpuid(7, 0);
  bool saved = (saved_state() & 0x60000) == 0x60000;
  // TILE, BF16; every processor that has them has VBMI
  return saved && has_avx512_bf16() && bit(seven.d, 24) && bit(seven.d, 22) &&
         bit(seven.c, 1) && allowed_amx();
}
#endif

#if defined(__aarch64__)
bool has_arm_bf16() {
#if defined(__linux__)
  return getauxval(AT_HWCAP2) >> 14 & 1;  // HWCAP2_BF16
#else
  return false;
#endif
}
#endif

int32_t named(const char *name) {
  for (int32_t n = 0; n < kCount; n++)
    if (strcmp(kCompiled[n]->name, name) == 0) return n;
  return -1;
}

}  // namespace

bool machine_runs(const char *isa) {
  if (strcmp(isa, "scalar") == 0) return true;
#if defined(__x86_64__)
  if (strcmp(isa, "avx2") == 0) return has_avx2();
#if defined(ATTNPLAT_EMULATE)
  if (strcmp(isa, "amx") == 0 || strcmp(isa, "avx512_bf16") == 0) return has_avx2();
#endif
  if (strcmp(isa, "avx512") == 0) return has_avx512();
  if (strcmp(isa, "avx512_bf16") == 0) return has_avx512_bf16();
  if (strcmp(isa, "amx") == 0) return has_amx();
#endif
#if defined(__aarch64__)
  if (strcmp(isa, "neon") == 0) return true;
  if (strcmp(isa, "neon_bf16") == 0) return has_arm_bf16();
#endif
  return false;
}

const Kernels *isa_kernels(int32_t index) {
  return index >= 0 && index < kCount ? kCompiled[index] : nullptr;
}

}  // namespace attnplat_cpu

using namespace attnplat_cpu;

extern "C" uint32_t attnplat_cpu_abi(void) { return ATTNPLAT_CPU_ABI; }

extern "C" int32_t attnplat_cpu_isa_count(void) { return kCount; }

extern "C" const char *attnplat_cpu_isa_name(int32_t index) {
  const Kernels *kernels = isa_kernels(index);
  return kernels ? kernels->name : nullptr;
}

extern "C" int32_t attnplat_cpu_isa_usable(int32_t index) {
  const Kernels *kernels = isa_kernels(index);
  return kernels && machine_runs(kernels->name) ? 1 : 0;
}

extern "C" int32_t attnplat_cpu_isa_index(const char *limit) {
  int32_t last = limit ? named(limit) : kCount - 1;
  if (limit) return last >= 0 && machine_runs(limit) ? last : -1;
  while (last > 0 && !machine_runs(kCompiled[last]->name)) last--;
  return last;
}
