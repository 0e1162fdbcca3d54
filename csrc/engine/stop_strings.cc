#include "engine/stop_strings.h"

namespace regatta::engine {

StopStrings::StopStrings(const std::vector<std::string>& strings) : nodes_(1) {
  for (const std::string& string : strings) {
    int32_t node = kRoot;
    for (const unsigned char byte : string) {
      const auto added = nodes_[node].next.emplace(byte, static_cast<int32_t>(nodes_.size()));
      const int64_t depth = nodes_[node].depth + 1;
      node = added.first->second;
      if (added.second) nodes_.emplace_back().depth = depth;
    }
    nodes_[node].match = static_cast<int64_t>(string.size());
  }
  std::vector<int32_t> waiting = {kRoot};  // the shorter paths first
  for (size_t i = 0; i < waiting.size(); ++i) {
    const int32_t node = waiting[i];
    for (const auto& [byte, child] : nodes_[node].next) {
      const int32_t shorter = node == kRoot ? kRoot : step(nodes_[node].shorter, byte);
      nodes_[child].shorter = shorter;
      if (nodes_[child].match == 0) nodes_[child].match = nodes_[shorter].match;
      waiting.push_back(child);
    }
  }
}

int32_t StopStrings::step(int32_t node, unsigned char byte) const {
  for (;;) {
    const auto found = nodes_[node].next.find(byte);
    if (found != nodes_[node].next.end()) return found->second;
    if (node == kRoot) return kRoot;
    node = nodes_[node].shorter;
  }
}

StopStrings::Match StopStrings::scan(int32_t* node, const std::string& text, int64_t first) const {
  int64_t end = 0;
  for (const unsigned char byte : text) {
    *node = step(*node, byte);
    const int64_t length = nodes_[*node].match;
    if (++end > first && length > 0) return {end - length, end};
  }
  return {};
}

}  // namespace regatta::engine
