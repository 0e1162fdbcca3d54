// What a text file holds, checked: docs/runtime-format.md, "Text".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "include/regatta_text.h"

namespace regatta::text {

// Caught at the border (text.cc).
struct Failure {
  regatta_text_status status;
  std::string message;
};

inline constexpr uint32_t kFileVersion = 1;
inline constexpr uint32_t kMaxIds = 1 << 22;
inline constexpr uint64_t kMaxFileBytes = 1 << 29;
inline constexpr uint32_t kMaxSteps = 64;
inline constexpr uint32_t kMaxPattern = 1 << 16;      // bytes of a regular expression
inline constexpr uint32_t kMaxReplacement = 1 << 10;  // bytes that one step puts in at a place

enum class StepKind : uint32_t {
  kNfc = 1,
  kPrepend = 2,  // a in front of a text that is not empty; `way` is a Prepend
  kReplace = 3,  // b for each a
  // Behind those of above; each sees the pieces that the one before it left.
  kPrefixSpace = 16,  // a in front of a piece that does not begin with it
  kSplitRegex = 17,   // a: Oniguruma's Ruby syntax
  kSplitText = 18,    // a: as it stands
  kMetaspace = 19,    // a for each space; `way` is a Prepend, `on` cuts ahead of each a
};

enum class Behavior : uint32_t { kIsolated, kRemoved, kContiguous, kWithPrevious, kWithNext };
enum class Prepend : uint32_t { kAlways, kFirst, kNever };

struct Step {
  StepKind kind;
  uint32_t way = 0;  // a Behavior or a Prepend
  bool on = false;   // a split: what does not match counts as the match
  std::string a, b;
};

enum : uint32_t {
  kIgnoreMerges = 1,
  kByteFallback = 2,
  kFuseUnknown = 4,
  kByteLevel = 8,
  kEachByte = 16
};
enum : uint32_t { kSpecial = 1, kLeft = 2, kRight = 4, kNormalized = 8, kSingleWord = 16 };
enum class TextKind : uint8_t { kNone, kText, kByte };

struct Added {
  uint32_t id, flags;
  std::string content;
};

struct Merge {
  uint32_t left, right, rank, id;
};

// Strings behind each other; the i-th ends where the next begins.
class Strings {
 public:
  std::string_view operator[](size_t i) const {
    return std::string_view(bytes_).substr(offsets_[i], offsets_[i + 1] - offsets_[i]);
  }
  size_t size() const { return offsets_.size() - 1; }

 private:
  friend class Reader;
  std::vector<uint32_t> offsets_{0};
  std::string bytes_;
};

struct File {
  uint32_t flags;
  uint32_t strip;                     // spaces that the start of a text loses
  bool bare_start;                    // the first token's text loses all its spaces
  int64_t unknown;                    // an id, -1 for none
  std::vector<uint32_t> first, last;  // ids around a text
  std::vector<Step> steps;
  std::vector<Added> added;    // by content, those in a text ahead of those in a normalized one
  Strings texts;               // by id
  std::vector<uint8_t> kinds;  // by id: TextKind, | 128 for special tokens
  Strings words;               // in the order of their bytes
  std::vector<uint32_t> word_ids;
  std::vector<Merge> merges;  // by left, then right

  bool is(uint32_t flag) const { return (flags & flag) != 0; }
};

// Throws Failure.
File read_file(std::string_view bytes);

}  // namespace regatta::text
