// Texts to ids: added tokens are found, the rest is normalized, cut and encoded.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bpe.h"
#include "file.h"
#include "steps.h"

namespace regatta::text {

class Tokenizer {
 public:
  explicit Tokenizer(File file);

  const File& file() const { return file_; }

  // The ids of valid UTF-8. literal: special tokens in it are text.
  std::vector<int32_t> encode(std::string_view text, bool add_special, bool literal) const;

 private:
  // A stretch of a text: an added token's, or what is between two.
  struct Part {
    std::string_view text;
    int64_t id;  // -1: none
  };
  std::vector<Part> parts(std::string_view text, bool normalized, bool literal) const;
  const Added* added_at(std::string_view text, bool normalized) const;
  void encode_plain(std::string_view text, bool at_start, Retries* retries,
                    std::vector<int32_t>* ids) const;

  const File file_;
  const size_t num_raw_;  // added tokens that are looked for ahead of the normalizer
  const Steps steps_;
  const Bpe bpe_;
  const Regex word_;  // a character of a word, for added tokens that stand alone
};

}  // namespace regatta::text
