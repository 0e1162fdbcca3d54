// What this CPU has. Each architecture answers in a file of its own (features_*.cc).
#pragma once

#include <algorithm>
#include <string>
#include <vector>

namespace regatta::cpu {

// As reports and the lists of isas.h spell them: "avx2", "avx512_bf16", "asimddp", ...
const std::vector<std::string>& cpu_feature_names();

inline bool has_feature(const std::string& name) {
  const std::vector<std::string>& names = cpu_feature_names();
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Why a CPU with tiles does not use them; empty when it does.
std::string tiles_refusal();

bool has_vnni();         // AVX-512 with vpdpbusd
bool streams_into_l2();  // what is read once is best prefetched into L2 only
bool pairs_are_slow();   // vdpbf16ps does less than multiply-adds of float

}  // namespace regatta::cpu
