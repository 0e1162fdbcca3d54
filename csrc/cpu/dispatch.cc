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

// Those of kFeatures that are there; CPUID is asked once, because it costs microseconds in a guest.
const std::vector<std::string>& present_features() {
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

bool has_feature(const std::string& name) {
  const std::vector<std::string>& names = present_features();
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Why a CPU with tiles does not use them; empty when it does. Linux hands out the tiles' state
// (8 KiB per thread) to processes that ask for it; once is enough for all threads.
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
  constexpr const char* kNames[] = {"scalar", "avx2", "avx512", "avx512_bf16", "amx", "amx_fp16"};
  return kNames[static_cast<int>(isa)];
}

std::string isa_refusal(Isa isa) {
  struct Need {
    Isa from;
    const char* feature;
  };
  constexpr Need kNeeds[] = {{Isa::kAvx2, "avx2"},
                             {Isa::kAvx2, "fma"},
                             {Isa::kAvx2, "f16c"},
                             {Isa::kAvx512, "avx512f"},
                             {Isa::kAvx512, "avx512bw"},
                             {Isa::kAvx512, "avx512dq"},
                             {Isa::kAvx512, "avx512vl"},
                             {Isa::kAvx512Bf16, "avx512_vbmi"},
                             {Isa::kAvx512Bf16, "avx512_vnni"},
                             {Isa::kAvx512Bf16, "avx512_bf16"},
                             {Isa::kAmx, "amx_bf16"},
                             {Isa::kAmx, "amx_int8"},
                             {Isa::kAmxFp16, "amx_fp16"}};
  std::string missing;
  for (const Need& need : kNeeds) {
    if (isa < need.from || has_feature(need.feature)) continue;
    missing += (missing.empty() ? "this CPU lacks " : ", ") + std::string(need.feature);
  }
  return missing.empty() && isa >= Isa::kAmx ? tiles_refusal() : missing;
}

bool isa_available(Isa isa) {
  static const bool available[] = {true,
                                   isa_refusal(Isa::kAvx2).empty(),
                                   isa_refusal(Isa::kAvx512).empty(),
                                   isa_refusal(Isa::kAvx512Bf16).empty(),
                                   isa_refusal(Isa::kAmx).empty(),
                                   isa_refusal(Isa::kAmxFp16).empty()};
  return available[static_cast<int>(isa)];
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

namespace {
thread_local Isa running = Isa::kScalar;
}  // namespace

Isa running_isa() { return running; }
RunningIsa::RunningIsa(Isa isa) : before_(running) { running = isa; }
RunningIsa::~RunningIsa() { running = before_; }

bool has_vnni() {
  static const bool present = isa_available(Isa::kAvx512) && has_feature("avx512_vnni");
  return present;
}

std::vector<std::string> cpu_feature_names() { return present_features(); }

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
