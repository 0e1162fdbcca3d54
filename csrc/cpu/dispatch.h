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

#include "cpu_features.h"
#include "isas.h"
#include "regatta/types.h"

namespace regatta::cpu {

// The kernel sets of isas.h, in its order.
#define REGATTA_ISA_ENUM(ENUM, ...) ENUM,
enum class Isa : uint8_t { REGATTA_ISAS(REGATTA_ISA_ENUM, ) };
#undef REGATTA_ISA_ENUM

const char* isa_name(Isa isa);  // "scalar", "avx2", ..., as the list spells it
bool isa_available(Isa isa);    // CPU and operating system have it
Isa best_isa();                 // the first of the list that is available
bool has_pairs(Isa isa);        // the list's columns
bool has_tiles(Isa isa);

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

// The rows of an op's table, in the list's order. FN is the same function name in each ISA
// namespace; REFUSE is that of the sets with pairs.
#define REGATTA_CANDIDATE(ENUM, NAME, SPACE, PAIRS, TILES, NEEDS, FN, REFUSE) \
  {NAME, ::regatta::cpu::Isa::ENUM, PAIRS ? REFUSE : nullptr, SPACE::FN},
#define REGATTA_CANDIDATES_REFUSE(FN, REFUSE) REGATTA_ISAS(REGATTA_CANDIDATE, FN, REFUSE)
#define REGATTA_CANDIDATES(FN) REGATTA_CANDIDATES_REFUSE(FN, nullptr)

// Defines an op that refuses nothing and is only its table.
#define REGATTA_OPERATOR(NAME, PARAMS)                                                \
  static const OpTable<PARAMS> NAME##_table(#NAME, {REGATTA_CANDIDATES(run_##NAME)}); \
  Status NAME(const PARAMS& params) { return NAME##_table.run(params); }

// A call of a function that each ISA namespace has, in the one of ISA.
#define REGATTA_IF_ISA(ENUM, NAME, SPACE, PAIRS, TILES, NEEDS, ISA, ...) \
  (ISA) == ::regatta::cpu::Isa::ENUM ? SPACE::__VA_ARGS__:
#define REGATTA_IN_ISA(ISA, ...) \
  (REGATTA_ISAS(REGATTA_IF_ISA, ISA, __VA_ARGS__) scalar::__VA_ARGS__)

}  // namespace regatta::cpu
