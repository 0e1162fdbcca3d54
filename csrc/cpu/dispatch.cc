#include "dispatch.h"

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>

#include "regatta/abi.h"

namespace regatta::cpu {
namespace {

struct CpuFeature {
  const char* name;
  bool present;
};

struct CpuFeatures {
  bool avx2 = false, fma = false, f16c = false;
  bool avx512f = false, avx512bw = false, avx512dq = false, avx512vl = false;
  bool avx512_vbmi = false, avx512_vnni = false, avx512_bf16 = false;
  bool avx_vnni = false, amx_bf16 = false, amx_int8 = false;
};

uint64_t enabled_states() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

CpuFeatures detect() {
  CpuFeatures has;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return has;  // no OSXSAVE
  const uint64_t states = enabled_states();
  const bool ymm = (states & 0x6) == 0x6;
  const bool zmm = (states & 0xe6) == 0xe6;
  const bool tiles = (states & 0x60000) == 0x60000;
  has.fma = ymm && (c >> 12 & 1);
  has.f16c = ymm && (c >> 29 & 1);
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
    has.avx2 = ymm && (b >> 5 & 1);
    has.avx512f = zmm && (b >> 16 & 1);
    has.avx512dq = zmm && (b >> 17 & 1);
    has.avx512bw = zmm && (b >> 30 & 1);
    has.avx512vl = zmm && (b >> 31 & 1);
    has.avx512_vbmi = zmm && (c >> 1 & 1);
    has.avx512_vnni = zmm && (c >> 11 & 1);
    has.amx_bf16 = tiles && (d >> 22 & 1);
    has.amx_int8 = tiles && (d >> 24 & 1) && (d >> 25 & 1);
    if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) {
      has.avx_vnni = ymm && (a >> 4 & 1);
      has.avx512_bf16 = zmm && (a >> 5 & 1);
    }
  }
  return has;
}

const CpuFeatures& features() {
  static const CpuFeatures detected = detect();
  return detected;
}

std::vector<CpuFeature> feature_list() {
  const CpuFeatures& has = features();
  return {{"avx2", has.avx2},
          {"fma", has.fma},
          {"f16c", has.f16c},
          {"avx512f", has.avx512f},
          {"avx512bw", has.avx512bw},
          {"avx512dq", has.avx512dq},
          {"avx512vl", has.avx512vl},
          {"avx512_vnni", has.avx512_vnni},
          {"avx_vnni", has.avx_vnni},
          {"avx512_bf16", has.avx512_bf16},
          {"avx512_vbmi", has.avx512_vbmi},
          {"amx_bf16", has.amx_bf16},
          {"amx_int8", has.amx_int8}};
}

std::vector<const OpTableBase*>& registered() {
  static std::vector<const OpTableBase*> tables;
  return tables;
}

// Forced candidates: "*" for all ops, else by op.
struct Forced {
  std::atomic<bool> any{false};
  std::mutex mutex;
  std::map<std::string, std::string> by_op;
};

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

Status parse_forced(const std::string& spec, std::map<std::string, std::string>* by_op) {
  for (size_t begin = 0; begin <= spec.size();) {
    const size_t end = std::min(spec.find(',', begin), spec.size());
    const std::string item = trimmed(spec.substr(begin, end - begin));
    begin = end + 1;
    if (item.empty()) continue;
    const size_t equals = item.find('=');
    const std::string op = equals == std::string::npos ? "*" : trimmed(item.substr(0, equals));
    const std::string name = equals == std::string::npos ? item : trimmed(item.substr(equals + 1));
    if (op.empty() || name.empty()) {
      return Status::error("REGATTA_KERNEL: got '" + item +
                           "', allowed are <candidate> for all ops or <op>=<candidate>");
    }
    if (op != "*") {
      std::string known;
      for (const OpTableBase* table : all_op_tables()) {
        if (op == table->op()) known.clear();
        if (op == table->op()) break;
        known += (known.empty() ? "" : ", ") + std::string(table->op());
      }
      if (!known.empty()) {
        return Status::error("REGATTA_KERNEL: op '" + op + "' is not known (known: " + known + ")");
      }
    }
    (*by_op)[op] = name;
  }
  return {};
}

Forced& forced_state() {
  static Forced* state = [] {
    auto* created = new Forced;
    if (const char* spec = std::getenv("REGATTA_KERNEL")) {
      // A bad spelling is kept as a candidate that nothing has: the first op reports it.
      if (!parse_forced(spec, &created->by_op).ok()) created->by_op = {{"*", spec}};
      created->any = !created->by_op.empty();
    }
    return created;
  }();
  return *state;
}

}  // namespace

const char* isa_name(Isa isa) {
  constexpr const char* kNames[] = {"scalar", "avx2", "avx512", "avx512_bf16"};
  return kNames[static_cast<int>(isa)];
}

std::string isa_refusal(Isa isa) {
  const CpuFeatures& has = features();
  std::string missing;
  const auto need = [&](bool present, const char* name) {
    if (!present) missing += (missing.empty() ? "this CPU lacks " : ", ") + std::string(name);
  };
  if (isa >= Isa::kAvx2) {
    need(has.avx2, "avx2");
    need(has.fma, "fma");
    need(has.f16c, "f16c");
  }
  if (isa >= Isa::kAvx512) {
    need(has.avx512f, "avx512f");
    need(has.avx512bw, "avx512bw");
    need(has.avx512dq, "avx512dq");
    need(has.avx512vl, "avx512vl");
  }
  if (isa >= Isa::kAvx512Bf16) {
    need(has.avx512_vbmi, "avx512_vbmi");
    need(has.avx512_vnni, "avx512_vnni");
    need(has.avx512_bf16, "avx512_bf16");
  }
  return missing;
}

bool isa_available(Isa isa) {
  static const bool available[] = {true, isa_refusal(Isa::kAvx2).empty(),
                                   isa_refusal(Isa::kAvx512).empty(),
                                   isa_refusal(Isa::kAvx512Bf16).empty()};
  return available[static_cast<int>(isa)];
}

bool streams_into_l2() {
  // Zen 4 (and 3, which no kernel asks for); measured in gemm_dense.cc.
  static const bool yes = (__builtin_cpu_init(), __builtin_cpu_is("amdfam19h"));
  return yes;
}

// Only on request, REGATTA_AMX=1: the tile kernels have not run on a CPU that has tiles yet. Linux
// hands out the tiles' state (8 KiB per thread) to processes that ask for it.
bool has_amx_int8() {
  static const bool granted = [] {
    const char* wanted = std::getenv("REGATTA_AMX");
    if (!wanted || std::string(wanted) != "1") return false;
#if defined(__linux__) && defined(SYS_arch_prctl)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
    return features().amx_int8 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
  }();
  return granted;
}

bool has_vnni() { return isa_available(Isa::kAvx512) && features().avx512_vnni; }

std::vector<std::string> cpu_feature_names() {
  std::vector<std::string> names;
  for (const CpuFeature& feature : feature_list()) {
    if (feature.present) names.push_back(feature.name);
  }
  return names;
}

OpTableBase::OpTableBase(const char* op) : op_(op) { registered().push_back(this); }

std::vector<const OpTableBase*> all_op_tables() {
  std::vector<const OpTableBase*> tables = registered();
  std::sort(tables.begin(), tables.end(), [](const OpTableBase* a, const OpTableBase* b) {
    return std::string(a->op()) < b->op();
  });
  return tables;
}

bool any_kernel_forced() { return forced_state().any.load(std::memory_order_relaxed); }

std::string OpTableBase::forced() const {
  Forced& state = forced_state();
  std::lock_guard<std::mutex> lock(state.mutex);
  auto found = state.by_op.find(op_);
  if (found == state.by_op.end()) found = state.by_op.find("*");
  return found == state.by_op.end() ? "" : found->second;
}

Status OpTableBase::none_fits(const std::string& forced,
                              const std::vector<CandidateInfo>& tried) const {
  std::string message = std::string("no kernel of ") + op_ + " fits";
  if (!forced.empty()) message += " the forced name '" + forced + "'";
  message += "; candidates:";
  for (const CandidateInfo& candidate : tried) {
    message += std::string(" ") + candidate.name + " (" +
               (candidate.accepts ? "fits" : candidate.reason) + ")";
  }
  if (!forced.empty()) message += "; change or unset REGATTA_KERNEL";
  return Status::error(message);
}

Status force_kernel(const char* spec) {
  std::map<std::string, std::string> by_op;
  Status status = parse_forced(spec ? spec : "", &by_op);
  if (!status.ok()) return status;
  Forced& state = forced_state();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.by_op = by_op;
  state.any = !by_op.empty();
  return {};
}

}  // namespace regatta::cpu

// Null when `spec` was taken, else what is wrong with it (valid until the next call).
REGATTA_EXPORT const char* regatta_force_kernel(const char* spec) {
  static std::string message;
  message = regatta::cpu::force_kernel(spec).message();
  return message.empty() ? nullptr : message.c_str();
}
