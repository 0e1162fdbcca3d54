#include "dispatch.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>

#include "regatta/abi.h"

namespace regatta::cpu {
namespace {

std::vector<const OpTableBase*>& registered() {
  static std::vector<const OpTableBase*> tables;
  return tables;
}

// Forced candidates: "*" for all ops, else by op.
struct Forced {
  // Relaxed: it changes while no op runs (dispatch.h), and by_op is read under the mutex.
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

namespace {

// The rows of isas.h.
struct IsaRow {
  const char* name;
  bool pairs, tiles;
  const char* needs;
};
#define REGATTA_ISA_ROW(ENUM, NAME, SPACE, PAIRS, TILES, NEEDS, ...) {NAME, PAIRS, TILES, NEEDS},
constexpr IsaRow kIsas[] = {REGATTA_ISAS(REGATTA_ISA_ROW, )};
#undef REGATTA_ISA_ROW
constexpr size_t kNumIsas = sizeof(kIsas) / sizeof(kIsas[0]);

const IsaRow& row_of(Isa isa) { return kIsas[static_cast<size_t>(isa)]; }

}  // namespace

const char* isa_name(Isa isa) { return row_of(isa).name; }
bool has_pairs(Isa isa) { return row_of(isa).pairs; }
bool has_tiles(Isa isa) { return row_of(isa).tiles; }

std::string isa_refusal(Isa isa) {
  std::istringstream needs(row_of(isa).needs);
  std::string missing;
  for (std::string feature; needs >> feature;) {
    if (has_feature(feature)) continue;
    missing += (missing.empty() ? "this CPU lacks " : ", ") + feature;
  }
  return missing.empty() && has_tiles(isa) ? tiles_refusal() : missing;
}

bool isa_available(Isa isa) {
  static const std::vector<bool> available = [] {
    std::vector<bool> each;
    for (size_t i = 0; i < kNumIsas; ++i) each.push_back(isa_refusal(static_cast<Isa>(i)).empty());
    return each;
  }();
  return available[static_cast<size_t>(isa)];
}

Isa best_isa() {
  size_t best = 0;
  while (!isa_available(static_cast<Isa>(best))) ++best;  // at the latest at scalar
  return static_cast<Isa>(best);
}

namespace {
thread_local Isa running = Isa::kScalar;
}  // namespace

Isa running_isa() { return running; }
RunningIsa::RunningIsa(Isa isa) : before_(running) { running = isa; }
RunningIsa::~RunningIsa() { running = before_; }

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
