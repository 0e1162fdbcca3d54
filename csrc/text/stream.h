// The text of ids, in pieces of whole UTF-8.
#pragma once

#include <string>
#include <string_view>

#include "file.h"

namespace regatta::text {

class Stream {
 public:
  Stream(const File& file, bool skip_special)
      : file_(file), skip_special_(skip_special), strip_(file.strip) {}

  // Appends the text that became certain with an id.
  void add(int32_t id, std::string* out);

  // Behind a prompt: the text so far is the prompt's own. Bytes of a character that it begins stay.
  void begin_output();

  // Appends what was held back.
  void finish(std::string* out);

  // Appends what finish() would, without U+FFFD at its end; the stream stays as it is.
  void pending(std::string* out) const;

 private:
  void add_bytes(std::string_view bytes, std::string* out);
  void end_run(std::string* out);
  void put(std::string_view text, std::string* out);
  void put_replacement(std::string* out);

  const File& file_;
  const bool skip_special_;
  uint32_t strip_;        // spaces that may still be lost
  bool is_first_ = true;  // no token so far
  // Byte-level: the start of a character. Otherwise a run of byte tokens: they are a text, or each
  // is U+FFFD, and only the token behind tells.
  std::string held_;
  size_t num_of_prompt_ = 0;  // bytes of held_ that the prompt ended with
};

}  // namespace regatta::text
