// Byte-pair encoding of a word (Sennrich et al., 2016), as Hugging Face's tokenizers does it.
#pragma once

#include <array>
#include <string_view>
#include <vector>

#include "file.h"

namespace regatta::text {

class Bpe {
 public:
  explicit Bpe(const File& file);

  // Appends the ids of a word, which is not empty.
  void encode(std::string_view word, std::vector<int32_t>* ids) const;

 private:
  int64_t find(std::string_view word) const;  // its id, -1 for none
  const Merge* merge_of(uint32_t left, uint32_t right) const;
  std::vector<uint32_t> units(std::string_view word) const;

  const File& file_;
  std::vector<uint32_t> first_;           // merges whose left token is i begin at first_[i]
  std::array<int64_t, 256> single_;       // ids of one byte; of ASCII where words are characters
  std::array<int64_t, 256> byte_tokens_;  // of <0x00> to <0xFF>
};

}  // namespace regatta::text
