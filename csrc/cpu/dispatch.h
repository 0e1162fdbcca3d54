// CPU features, and the table of candidates from which each op picks its implementation.
//
// An op <name> has, in <name>.inl, `Status run_<name>(const XParams&)` in every ISA namespace, and
// in <name>.cc one table, which is all that the outside calls:
//
//   REGATTA_OPERATOR(linear, LinearParams)
//
// Order is preference. The first candidate whose ISA this CPU has and whose `refuse` returns null
// runs; when none does, the error lists every candidate with its reason. The scalar one is always
// there. REGATTA_KERNEL (environment) or regatta_force_kernel() (C API, tests) narrows the choice:
// "avx2" for all ops, "linear=scalar,paged_attention=avx2" for some, "" for none. A name that the
// CPU lacks, or that no op has, is an error when the op runs, not a silent fallback.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "regatta/types.h"

namespace regatta::cpu {

// kAvx512Bf16 has VNNI too. kAmx is its code, with products of bfloat16 and int8 by tiles; kAmxFp16
// with those of dense float16 besides.
enum class Isa : uint8_t { kScalar, kAvx2, kAvx512, kAvx512Bf16, kAmx, kAmxFp16 };

const char* isa_name(Isa isa);                 // "scalar", "avx2", ..., "amx", "amx_fp16"
bool isa_available(Isa isa);                   // CPU and operating system have it
bool has_vnni();                               // AVX-512 with vpdpbusd
bool streams_into_l2();                        // what is read once is best prefetched into L2 only
bool pairs_are_slow();                         // vdpbf16ps does less than multiply-adds of float
std::vector<std::string> cpu_feature_names();  // for reports: "avx2", "fma", "avx512_bf16", ...

// fn(T()) with T = float, bf16 or fp16. Every op's params were checked to have one of them.
template <class Fn>
Status with_dtype(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat32:
      return fn(float());
    case DType::kBFloat16:
      return fn(bf16());
    case DType::kFloat16:
      return fn(fp16());
    default:
      return Status::error(std::string("activations are ") + dtype_name(dtype) +
                           " (allowed: float32, bfloat16, float16)");
  }
}

// Whether the compiler's assembler knows tiles.
#define REGATTA_TILES (__GNUC__ >= 11)

template <class Params>
struct Candidate {
  const char* name;
  Isa isa;
  const char* (*refuse)(const Params&);  // reason, or null to accept; may be null itself
  Status (*run)(const Params&);
};

struct CandidateInfo {
  const char* name;
  bool accepts;        // as far as the CPU decides; a refusal by shape shows only in run()
  std::string reason;  // empty when it accepts
};

// What all tables share, for regatta_cpu_info(). Registers itself.
class OpTableBase {
 public:
  explicit OpTableBase(const char* op);
  const char* op() const { return op_; }
  virtual std::vector<CandidateInfo> candidates() const = 0;
  // Name forced for this op, or empty.
  std::string forced() const;

 protected:
  ~OpTableBase() = default;
  Status none_fits(const std::string& forced, const std::vector<CandidateInfo>& tried) const;

 private:
  const char* op_;
};

std::vector<const OpTableBase*> all_op_tables();  // sorted by op name

// Replaces what REGATTA_KERNEL said. Checks the spelling only. Not while an op runs.
Status force_kernel(const char* spec);
bool any_kernel_forced();

std::string isa_refusal(Isa isa);  // empty when available

// The instruction set of the candidate that this thread runs.
Isa running_isa();
class RunningIsa {
 public:
  explicit RunningIsa(Isa isa);
  ~RunningIsa();
  RunningIsa(const RunningIsa&) = delete;
  RunningIsa& operator=(const RunningIsa&) = delete;

 private:
  Isa before_;
};

template <class Params>
class OpTable final : public OpTableBase {
 public:
  OpTable(const char* op, std::initializer_list<Candidate<Params>> candidates)
      : OpTableBase(op), candidates_(candidates) {}

  Status run(const Params& params) const {
    const std::string name = any_kernel_forced() ? forced() : std::string();
    for (const Candidate<Params>& candidate : candidates_) {
      if (!name.empty() && name != candidate.name) continue;
      if (!isa_available(candidate.isa)) continue;
      if (candidate.refuse && candidate.refuse(params)) continue;
      const RunningIsa running(candidate.isa);
      return candidate.run(params);
    }
    std::vector<CandidateInfo> tried = candidates();
    for (size_t i = 0; i < tried.size(); ++i) {
      if (!tried[i].accepts || !candidates_[i].refuse) continue;
      if (const char* reason = candidates_[i].refuse(params))
        tried[i] = {tried[i].name, false, reason};
    }
    return none_fits(name, tried);
  }

  std::vector<CandidateInfo> candidates() const override {
    std::vector<CandidateInfo> infos;
    for (const Candidate<Params>& candidate : candidates_) {
      const std::string reason = isa_refusal(candidate.isa);
      infos.push_back({candidate.name, reason.empty(), reason});
    }
    return infos;
  }

 private:
  std::vector<Candidate<Params>> candidates_;
};

// The instruction sets, best first; behind scalar, which always fits, one that runs only where it
// is forced. FN is the same function name in each ISA namespace; REFUSE is that of avx512_bf16.
#define REGATTA_CANDIDATES_REFUSE(FN, REFUSE)                                     \
  {"amx", ::regatta::cpu::Isa::kAmx, REFUSE, avx512_bf16::FN},                    \
      {"avx512_bf16", ::regatta::cpu::Isa::kAvx512Bf16, REFUSE, avx512_bf16::FN}, \
      {"avx512", ::regatta::cpu::Isa::kAvx512, nullptr, avx512::FN},              \
      {"avx2", ::regatta::cpu::Isa::kAvx2, nullptr, avx2::FN},                    \
      {"scalar", ::regatta::cpu::Isa::kScalar, nullptr, scalar::FN}, {            \
    "amx_fp16", ::regatta::cpu::Isa::kAmxFp16, REFUSE, avx512_bf16::FN            \
  }
#define REGATTA_CANDIDATES(FN) REGATTA_CANDIDATES_REFUSE(FN, nullptr)

// Defines an op that refuses nothing and is only its table.
#define REGATTA_OPERATOR(NAME, PARAMS)                                                \
  static const OpTable<PARAMS> NAME##_table(#NAME, {REGATTA_CANDIDATES(run_##NAME)}); \
  Status NAME(const PARAMS& params) { return NAME##_table.run(params); }

// A call of a function that each ISA namespace has, in the one of ISA.
#define REGATTA_IN_ISA(ISA, ...)                                        \
  ((ISA) >= ::regatta::cpu::Isa::kAvx512Bf16 ? avx512_bf16::__VA_ARGS__ \
   : (ISA) == ::regatta::cpu::Isa::kAvx512   ? avx512::__VA_ARGS__      \
   : (ISA) == ::regatta::cpu::Isa::kAvx2     ? avx2::__VA_ARGS__        \
                                             : scalar::__VA_ARGS__)

}  // namespace regatta::cpu
