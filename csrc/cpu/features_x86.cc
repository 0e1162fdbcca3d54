// What an x86-64 CPU has, by CPUID.
#if defined(__x86_64__)

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>

#include "cpu_features.h"
#include "isas.h"

namespace regatta::cpu {
namespace {

// What the operating system saves of a thread: XCR0's bits.
constexpr uint64_t kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;

// A feature is there where CPUID has all of `bits` in register `reg` (of eax, ebx, ecx, edx) of a
// leaf, and the system saves `state`.
struct CpuFeature {
  const char* name;
  unsigned leaf, subleaf;
  int reg;
  uint32_t bits;
  uint64_t state;
};

constexpr CpuFeature kFeatures[] = {
    {"avx2", 7, 0, 1, 1u << 5, kYmm},        {"fma", 1, 0, 2, 1u << 12, kYmm},
    {"f16c", 1, 0, 2, 1u << 29, kYmm},       {"avx512f", 7, 0, 1, 1u << 16, kZmm},
    {"avx512bw", 7, 0, 1, 1u << 30, kZmm},   {"avx512dq", 7, 0, 1, 1u << 17, kZmm},
    {"avx512vl", 7, 0, 1, 1u << 31, kZmm},   {"avx512_vnni", 7, 0, 2, 1u << 11, kZmm},
    {"avx_vnni", 7, 1, 0, 1u << 4, kYmm},    {"avx512_bf16", 7, 1, 0, 1u << 5, kZmm},
    {"avx512_vbmi", 7, 0, 2, 1u << 1, kZmm}, {"amx_bf16", 7, 0, 3, 1u << 22, kTiles},
    {"amx_int8", 7, 0, 3, 3u << 24, kTiles}, {"amx_fp16", 7, 1, 0, 1u << 21, kTiles},
};

uint64_t enabled_states() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return 0;  // no OSXSAVE
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

bool is_there(const CpuFeature& feature, uint64_t states) {
  unsigned reg[4];
  if ((states & feature.state) != feature.state) return false;
  if (feature.subleaf > 0) {  // subleaf 0 counts the others in eax
    if (!__get_cpuid_count(feature.leaf, 0, &reg[0], &reg[1], &reg[2], &reg[3])) return false;
    if (reg[0] < feature.subleaf) return false;
  }
  return __get_cpuid_count(feature.leaf, feature.subleaf, &reg[0], &reg[1], &reg[2], &reg[3]) &&
         (reg[feature.reg] & feature.bits) == feature.bits;
}

}  // namespace

// CPUID is asked once, because it costs microseconds in a guest.
const std::vector<std::string>& cpu_feature_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> present;
    const uint64_t states = enabled_states();
    for (const CpuFeature& feature : kFeatures) {
      if (is_there(feature, states)) present.push_back(feature.name);
    }
    return present;
  }();
  return names;
}

// Linux hands out the tiles' state (8 KiB per thread) to processes that ask for it; once is enough
// for all threads.
std::string tiles_refusal() {
  static const std::string refusal = []() -> std::string {
    const char* wanted = std::getenv("REGATTA_AMX");
    if (wanted && std::string(wanted) == "0") return "REGATTA_AMX=0 turns tiles off";
#if !REGATTA_TILES
    return "built by a compiler that does not know tiles (GCC 11 and newer do)";
#elif defined(__linux__) && defined(SYS_arch_prctl)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return "";
    return "the system does not grant tiles to this process";
#else
    return "tiles are not asked for on this system";
#endif
  }();
  return refusal;
}

bool has_vnni() {
  static const bool present = has_feature("avx512f") && has_feature("avx512bw") &&
                              has_feature("avx512dq") && has_feature("avx512vl") &&
                              has_feature("avx512_vnni");
  return present;
}

bool streams_into_l2() {
  // Zen 4 (and 3, which no kernel asks for); measured in gemm_dense.cc.
  static const bool yes = (__builtin_cpu_init(), __builtin_cpu_is("amdfam19h"));
  return yes;
}

bool pairs_are_slow() {
  // Granite Rapids: one vdpbf16ps in two cycles, two multiply-adds of float in one.
  static const bool yes = (__builtin_cpu_init(), __builtin_cpu_is("intel"));
  return yes;
}

}  // namespace regatta::cpu

#endif  // __x86_64__
