// Finds the first of many strings in a text that comes in pieces: one look per byte.
//
// Aho and Corasick 1975, as predict/text/stop_strings.py has it. Of whole UTF-8 in whole UTF-8 a
// match of bytes is one of characters.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace regatta::engine {

class StopStrings {
 public:
  static constexpr int32_t kRoot = 0;

  // In bytes; end 0: none. The begin is negative where it lies in earlier text.
  struct Match {
    int64_t begin = 0;
    int64_t end = 0;
  };

  // None of the strings is empty.
  explicit StopStrings(const std::vector<std::string>& strings);

  // Goes on from *node with text, to its end or to the first match: the one that ends first, the
  // longest of those, among the ones that end behind the first `first` bytes of the text.
  Match scan(int32_t* node, const std::string& text, int64_t first) const;

  // Bytes at the end of the text that may be the beginning of a string.
  int64_t depth(int32_t node) const { return nodes_[node].depth; }

 private:
  struct Node {
    std::unordered_map<unsigned char, int32_t> next;
    int32_t shorter = kRoot;  // of the longest proper suffix of its path which is a path too
    int64_t depth = 0;
    int64_t match = 0;  // bytes of the longest string that its path ends with
  };
  int32_t step(int32_t node, unsigned char byte) const;
  std::vector<Node> nodes_;
};

}  // namespace regatta::engine
