// The steps ahead of a model: a text is normalized, then cut into words.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "file.h"

struct re_pattern_buffer;

namespace regatta::text {

// What all searches in one text may try together: expressions that try more are hostile.
class Retries {
 public:
  explicit Retries(size_t text_size) : left_(10'000'000 + 64 * uint64_t{text_size}) {}

  // Takes what a search may try now; false where no more is left.
  bool take(uint64_t count) {
    const bool holds = count <= left_;
    left_ -= holds ? count : 0;
    return holds;
  }

 private:
  uint64_t left_;
};

// A regular expression of Oniguruma, in its Ruby syntax, as Hugging Face's tokenizers has them.
class Regex {
 public:
  explicit Regex(const std::string& pattern);

  // Calls `found` with the begin and the end of each match, empty ones included.
  void matches(std::string_view text, Retries* retries,
               const std::function<void(size_t, size_t)>& found) const;

 private:
  struct Free {
    void operator()(re_pattern_buffer* regex) const;
  };
  std::unique_ptr<re_pattern_buffer, Free> regex_;
};

class Steps {
 public:
  explicit Steps(const std::vector<Step>& steps);

  // at_start: the text begins at the start of what is encoded.
  std::string normalized(std::string_view text, bool at_start) const;

  // Calls `word` with each word.
  using Word = std::function<void(std::string_view)>;
  void cut(std::string_view text, bool at_start, Retries* retries, const Word& word) const;

 private:
  struct Cutting {
    const Word& word;
    Retries* retries;
    size_t& left;  // bytes that all steps may still see
  };
  static bool prepends(const Step& step, bool at_start);
  void cut_from(size_t index, std::string_view text, bool at_start, const Cutting& to) const;
  void split(size_t index, std::string_view text, bool at_start, const Cutting& to) const;

  const std::vector<Step>& steps_;
  std::vector<std::unique_ptr<Regex>> regexes_;  // by step, null for others
  size_t num_normalizers_ = 0;
};

}  // namespace regatta::text
