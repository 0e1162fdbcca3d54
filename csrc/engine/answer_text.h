// The text of one request as its tokens come, up to its first stop string: the twin of
// predict/text/answer_text.py, where places are in bytes.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/stop_strings.h"
#include "engine/text.h"

namespace regatta::engine {

// The text ends at the stop string that is complete first, the longest of those, however the text
// was cut into tokens. Text that may become one is held back from take().
class AnswerText {
 public:
  // Texts of tokens that the text leaves out, and that stop strings have.
  using Hidden = std::unordered_map<int32_t, std::string>;

  // include_stop: the text ends behind the stop string, not before it.
  AnswerText(std::unique_ptr<TextStream> stream, const std::vector<std::string>& stop,
             bool include_stop, Hidden hidden = {})
      : stream_(std::move(stream)),
        stops_(stop),
        include_stop_(include_stop),
        hidden_(std::move(hidden)) {}

  // may_stop: false where strings that are complete then do not count. is_last: the request ends
  // with this token in any case. *completes: it completes a stop string, which ends the text.
  Status append(int32_t token, bool may_stop, bool is_last, bool* completes);

  // Ends the text where it is, unless a stop string or a last token has ended it.
  Status finish();

  // The text that became certain since the last call.
  std::string take();

 private:
  // Where text begins that ends at `end` and is `length` long with the hidden texts in it.
  int64_t begin_of(int64_t end, int64_t length) const;

  std::unique_ptr<TextStream> stream_;
  const StopStrings stops_;
  const bool include_stop_;
  const Hidden hidden_;
  std::vector<std::pair<int64_t, int64_t>> places_;  // of hidden texts: where, how long
  int32_t node_ = StopStrings::kRoot;                // behind the certain text
  int64_t num_exempt_ = 0;                           // bytes in which no match may end
  std::string text_;                                 // certain; once has_ended_, all there is
  int64_t num_taken_ = 0;
  bool has_ended_ = false;
};

}  // namespace regatta::engine
