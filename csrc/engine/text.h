// What an engine needs of a tokenizer. csrc/api/tokenizer.h makes it of what a caller gives.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "engine/ids.h"
#include "regatta/types.h"

namespace regatta::engine {

// The text that ids add behind a prompt, without special tokens.
class TextStream {
 public:
  virtual ~TextStream() = default;
  // piece: whole UTF-8 that became certain with an id. pending: what would follow it were there no
  // more ids, without a character's beginning at the end.
  virtual Status add(int32_t id, std::string* piece, std::string* pending) = 0;
  // The rest, bytes of no character as U+FFFD.
  virtual Status finish(std::string* piece) = 0;
};

// Threads may call it at one time, and each stream one thread at a time.
class Text {
 public:
  virtual ~Text() = default;
  // Special tokens in the text become their ids; none is added.
  virtual Status encode(const std::string& text, Ids* ids) const = 0;
  virtual Status decode(const Ids& ids, bool skip_special, std::string* text) const = 0;
  virtual Status stream(const Ids& prompt_ids, std::unique_ptr<TextStream>* stream) const = 0;
};

}  // namespace regatta::engine
