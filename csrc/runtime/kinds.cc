#include "runtime/kinds.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

namespace regatta::runtime {
namespace {

std::vector<const Kind*>& kinds() {  // sorted by name
  static auto* const all = new std::vector<const Kind*>;
  return *all;
}

Status parsed(std::string_view text, std::vector<BlockRecord>* records) {
  while (!text.empty()) {
    std::string_view fields = next_part(&text, '|');
    const std::string_view name = next_part(&fields, ' ');
    const auto kind = std::find_if(kinds().begin(), kinds().end(),
                                   [&](const Kind* each) { return each->name == name; });
    if (kind == kinds().end()) {
      std::string known;
      for (const Kind* each : kinds())
        known += (known.empty() ? "" : ", ") + std::string(each->name);
      return Status::error("blocks: kind is '" + std::string(name) + "' (allowed: " + known + ")");
    }
    records->push_back({*kind, nullptr});
    REGATTA_RETURN_IF_ERROR((*kind)->read(fields, &records->back().fields));
  }
  return {};
}

}  // namespace

Kind::Kind(const char* name, bool reads_step, size_t params_bytes)
    : name(name), reads_step(reads_step), params_bytes(params_bytes) {
  const auto before = [](const Kind* a, const Kind* b) {
    return std::strcmp(a->name, b->name) < 0;
  };
  kinds().insert(std::upper_bound(kinds().begin(), kinds().end(), this, before), this);
}

Status block_records(const std::string& text, const std::vector<BlockRecord>** records) {
  // A process has a few models, and a model a few texts: one for each run of its layers. Lists stay
  // where they are while threads read them.
  static std::mutex mutex;
  static auto* const known = new std::map<std::string, std::vector<BlockRecord>>;
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = known->find(text);
  if (found == known->end()) {
    std::vector<BlockRecord> made;
    REGATTA_RETURN_IF_ERROR(parsed(text, &made));
    found = known->emplace(text, std::move(made)).first;
  }
  *records = &found->second;
  return {};
}

}  // namespace regatta::runtime
