// What an aarch64 CPU has, by the kernel's auxiliary vector.
#if defined(__aarch64__)

#include <sys/auxv.h>

#include "cpu_features.h"

namespace regatta::cpu {
namespace {

// Bits of AT_HWCAP and AT_HWCAP2 (Linux: arch/arm64/include/uapi/asm/hwcap.h), by the names that
// /proc/cpuinfo gives them.
struct CpuFeature {
  const char* name;
  unsigned long from;  // NOLINT(google-runtime-int): getauxval's
  int bit;
};

constexpr CpuFeature kFeatures[] = {
    {"asimd", AT_HWCAP, 1},  {"asimdhp", AT_HWCAP, 10}, {"asimddp", AT_HWCAP, 20},
    {"sve", AT_HWCAP, 22},   {"sve2", AT_HWCAP2, 1},    {"i8mm", AT_HWCAP2, 13},
    {"bf16", AT_HWCAP2, 14},
};

}  // namespace

const std::vector<std::string>& cpu_feature_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> present;
    for (const CpuFeature& feature : kFeatures) {
      if (getauxval(feature.from) >> feature.bit & 1) present.push_back(feature.name);
    }
    return present;
  }();
  return names;
}

std::string tiles_refusal() { return "aarch64 has no tiles"; }

// No kernel of Arm asks: nothing was measured there.
bool has_vnni() { return false; }
bool streams_into_l2() { return false; }
bool pairs_are_slow() { return false; }

}  // namespace regatta::cpu

#endif  // __aarch64__
